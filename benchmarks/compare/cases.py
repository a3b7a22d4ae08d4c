"""The cases of the comparison: small fixed jobs, one for each way to train and for what else a user calls."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from compare.comparing import Precision

JOBS = Path(__file__).parent / "jobs"
RUN = "{run}"  # stands for the run directory
TWO_WORKERS = "strategy.workers=2"
WITH_SERVERS = ("strategy.name=parameter_server", "strategy.workers=2", "strategy.servers=2")


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command of a case."""

    arguments: tuple[str, ...]  # after `python`
    is_by_before: bool = False  # made by BEFORE on both sides: what it leaves is continued by the other
    kills_after_step: int | None = None  # kill -9 of worker 1 once this step is recorded


@dataclass(frozen=True, kw_only=True)
class Case:
    """Commands that both checkouts run, in a folder of their own, and how closely the outcomes must agree."""

    name: str
    commands: tuple[Command, ...]
    precision: Precision = "exact"
    varies: tuple[str, ...] = ()  # fields of the summary that timing decides
    exported: str = ""  # a file of the run directory that must have the same bytes


def train(job: str, *settings: str, is_by_before: bool = False, kills_after_step: int | None = None) -> Command:
    overrides = [word for setting in settings for word in ("--set", setting)]
    arguments = ("-m", "cordee", "train", str(JOBS / job), "--run-dir", RUN, "-q", *overrides)
    return Command(arguments=arguments, is_by_before=is_by_before, kills_after_step=kills_after_step)


def resume(job: str, *settings: str) -> Command:
    return Command(arguments=(*train(job, *settings).arguments, "--resume"))


def _one(name: str, job: str, *settings: str, precision: Precision = "exact") -> Case:
    return Case(name=name, commands=(train(job, *settings),), precision=precision)


def _script(name: str, *arguments: str) -> Case:
    return Case(name=name, commands=(Command(arguments=arguments),))


_PAIR = ("strategy.name=data_parallel", "strategy.workers=2")
_HALF = (*_PAIR, "stop.steps=17")

# A measured cut may come out differently in the next run, and with it the dropout masks.
_STAGES = '[["flatten", "linear1", "activation1", "dropout1"], ["linear2", "activation2", "dropout2", "classifier"]]'
_MESH = "{data = 2, tensor = 2}"

CASES = (
    _one("single", "mlp.toml"),
    _one("single_batch_norm", "images.toml", "evaluation.every_steps=5", "checkpoint.keep_best=true"),
    _one("single_reproducible", "images.toml", "training.reproducible=true", "training.accumulate=1"),
    _one("single_bf16", "mlp.toml", "training.precision=bf16", "training.steps=15"),
    _one("stop_accuracy", "mlp.toml", "training.steps=1000", "stop.accuracy=0.8"),
    _one("stop_patience", "mlp.toml", "training.steps=1000", "stop.patience=2", "optimizer.lr=0.0"),
    _one("data_parallel", "mlp.toml", *_PAIR, "training.lr_scale=sqrt"),
    _one("data_parallel_batch_norm", "images.toml", TWO_WORKERS, "strategy.batch_norm=sync"),
    _one("data_parallel_ddp", "mlp.toml", TWO_WORKERS, "strategy.reducer=ddp"),
    _one("data_parallel_compression", "mlp.toml", TWO_WORKERS, "strategy.compression=bf16"),
    _one("local_sgd", "mlp.toml", "strategy.name=local_sgd", "strategy.workers=2", "strategy.sync_every=4"),
    # Its length is that of its rounds, not of the job's training.steps.
    _one("federated", "federated.toml"),
    _one("data_parallel_reproducible", "mlp.toml", TWO_WORKERS, "training.reproducible=true"),
    _one("sharded", "mlp.toml", "strategy.name=sharded", TWO_WORKERS, "strategy.unit_bytes=2000"),
    _one("parameter_server", "mlp.toml", *WITH_SERVERS),
    # Which worker computes which unit depends on timing, and so do the running statistics that each worker keeps.
    Case(
        name="parameter_server_batch_norm",
        commands=(train("images.toml", *WITH_SERVERS, "strategy.replicas=2"),),
        varies=("weights_sha256", "test_loss", "test_accuracy", "test_top5_accuracy", "best_step"),
    ),
    _one("parameter_server_reproducible", "mlp.toml", *WITH_SERVERS, "training.reproducible=true"),
    _one("parameter_server_bounded", "mlp.toml", *WITH_SERVERS, "strategy.staleness=2", precision="counted"),
    _one("parameter_server_unbounded", "mlp.toml", *WITH_SERVERS, "strategy.staleness=unbounded", precision="counted"),
    _one("pipeline", "mlp.toml", "strategy.name=pipeline", TWO_WORKERS, f"strategy.placement={_STAGES}"),
    _one("tensor", "tokens.toml", "strategy.name=tensor", TWO_WORKERS),
    _one("hybrid", "tokens.toml", "strategy.name=hybrid", "strategy.workers=4", f"strategy.mesh={_MESH}"),
    Case(name="resume", commands=(train("mlp.toml", *_HALF), resume("mlp.toml", *_PAIR))),
    # What one checkout has saved the other must be able to continue, with the same result.
    Case(
        name="resume_run_of_before",
        commands=(train("mlp.toml", *_HALF, is_by_before=True), resume("mlp.toml", *_PAIR)),
    ),
    # How many generations there are depends on when the replacement comes.
    Case(name="killed_worker", commands=(train("slow.toml", kills_after_step=10),), precision="repeated"),
    Case(
        name="export",
        commands=(
            train("images.toml", "training.epochs=1"),
            Command(arguments=("-m", "cordee", "export", RUN, "-o", f"{RUN}/exported.safetensors")),
        ),
        exported="exported.safetensors",
    ),
    _script("from_python", str(JOBS / "from_python.py"), RUN),
    _script("own_loop", "-m", "cordee", "run", "-n", "2", str(JOBS / "own_loop.py")),
    _script("backend", "-m", "cordee", "run", "-n", "2", str(JOBS / "backend.py")),
    _script("store", str(JOBS / "store.py")),
)
