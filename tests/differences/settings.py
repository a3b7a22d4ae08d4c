"""For every setting, what it must change where it is accepted, or which test looks at it.

A setting that is not in the table fails `test_settings.py`: a new one needs an entry.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from cordee.core.job import Job
from cordee.core.settings import Checkpoint, Cluster, Data, Evaluation, Monitoring, Stop, Strategy, Training
from cordee.strategies.table import STRATEGIES
from differences.generator import PLAIN, Table, job_table
from differences.running import Outcome

# The smallest form of each strategy that is more than another one.
BASES: dict[str, Table] = {
    "single": {"workers": 1},
    "data_parallel": {"workers": 2},
    "local_sgd": {"workers": 2, "sync_every": 1},
    "parameter_server": {"workers": 2},
    "sharded": {"workers": 2},
    "pipeline": {"workers": 2, "microbatches": 2},
    "tensor": {"workers": 2, "plan": {"*.linear": "gather"}},
    "hybrid": {"workers": 2, "mesh": {"pipeline": 2}, "microbatches": 2},
    "federated": {"workers": 2, "partition": {"clients": 5}},
}
ROUNDS = "federated"  # whose rounds are the steps of the job
ALL = tuple(name for name in BASES if name != ROUNDS)  # ROUNDS takes those of IN_ROUNDS
REPRODUCING = tuple(sorted(name for name, entry in STRATEGIES.items() if entry.can_reproduce))
AVERAGING = tuple(name for name in ALL if name != "local_sgd")  # which has no common weights between agreements
WITH_SHARES = ("data_parallel", "parameter_server", "sharded")  # workers compute other samples


# What is looked at


def weights(outcome: Outcome) -> Any:
    return outcome.summary["weights_sha256"]


def rates(outcome: Outcome) -> Any:
    return [event["lr"] for event in outcome.of("step")]


def losses(outcome: Outcome) -> Any:
    return [event["loss"] for event in outcome.of("step")]


def steps(outcome: Outcome) -> Any:
    return outcome.summary["steps"], outcome.summary["stopped_by"]


def evaluations(outcome: Outcome) -> Any:
    return [(event["step"], event["samples"]) for event in outcome.of("evaluation")]


def measured(outcome: Outcome) -> Any:
    return [list(event["metrics"]) for event in outcome.of("evaluation")]


def test_losses(outcome: Outcome) -> Any:
    return [event["test_loss"] for event in outcome.of("evaluation")]


def round_losses(outcome: Outcome) -> Any:
    return [event["loss"] for event in outcome.of("round")]


def started(key: str) -> Callable[[Outcome], Any]:
    return lambda outcome: outcome.of("run_started")[0][key]


def saved(outcome: Outcome) -> Any:
    return outcome.saved_steps


def reported(outcome: Outcome) -> Any:
    return [event["step"] for event in outcome.of("step")]


def processes(outcome: Outcome) -> Any:
    roles = sorted(str(event.get("role")) for event in outcome.of("worker_started"))
    return roles, sorted(path.name for path in (outcome.folder / "logs").iterdir())


def exit_code(outcome: Outcome) -> Any:
    return outcome.code


def stages(outcome: Outcome) -> Any:
    found = [
        re.findall(r"stage \d+ on worker \d+: .*", path.read_text()) for path in (outcome.folder / "logs").iterdir()
    ]
    return sorted(line for lines in found for line in lines)


def csv_file(outcome: Outcome) -> Any:
    return (outcome.folder / "metrics.csv").exists()


def tensorboard(outcome: Outcome) -> Any:
    return (outcome.folder / "tensorboard").exists()


@dataclass(frozen=True)
class Changes:
    """Setting the key to `value` changes what `look` sees, in each of `strategies`."""

    value: Any
    look: Callable[[Outcome], Any]
    strategies: tuple[str, ...] = ALL
    base: Mapping[str, Any] = field(default_factory=dict)  # other keys, "section.key" and value, on both sides


@dataclass(frozen=True)
class Elsewhere:
    """What the key changes is not in what a run leaves behind; this test looks at it."""

    test: str


NORMED = {"model.blocks": ["batch_norm", "linear"]}
DROPPED = {"model.blocks": ["dropout", "linear"]}
IMAGES = {"data.use": "differences.parts:images"}
FREE = {"strategy.staleness": 1}
TOPK = {"strategy.compression": "topk", "strategy.topk": 0.5}
ONLINE = Elsewhere("unit/training/test_online.py")
FAULTS = Elsewhere("faults/test_team_faults.py")
AUTOSCALE = Elsewhere("distributed/test_autoscale.py")

EFFECTS: dict[str, Changes | Elsewhere] = {
    "name": Changes("other", started("name")),
    "seed": Changes(5, weights),
    "python_path": Elsewhere("unit/core/test_references.py"),
    "data.normalize": Changes(False, weights, base={"data.use": "iris"}),
    "data.augment": Changes(["flip"], weights, base=IMAGES),
    "data.train_limit": Changes(16, started("train_samples")),
    "data.test_limit": Changes(4, evaluations),
    "data.test_fraction": Changes(0.25, evaluations, base={"data.test_size": 0}),
    "data.inputs": Elsewhere("unit/data/test_samples.py"),
    "data.target": Elsewhere("unit/data/test_samples.py"),
    "data.collate": Elsewhere("distributed/test_nested_batches.py"),
    "data.prefetch": Elsewhere("unit/data/test_loader.py"),  # of parameter_server: in test_reading_processes.py too
    # Of parameter_server, whose workers read what they are handed out: distributed/test_parameter_server_settings.py.
    "data.processes": Elsewhere("unit/data/test_reading_processes.py"),
    "data.online": ONLINE,
    "data.holdout": ONLINE,
    "data.holdout_size": ONLINE,
    "training.batch_size": Changes(6, weights),
    "training.epochs": Changes(2, steps, base={"training.epochs": 1}),
    "training.steps": Changes(5, steps),
    "training.reproducible": Changes(True, weights, REPRODUCING, base=DROPPED),
    "training.shards": Changes(4, weights, REPRODUCING, base={"training.reproducible": True, **DROPPED}),
    "training.lr_scale": Changes("linear", rates, WITH_SHARES),
    "training.precision": Changes("bf16", weights, base={"model.double": False}),
    "training.compile": Elsewhere("unit/compute/test_compiling.py"),
    "training.memory_format": Elsewhere("distributed/test_memory_format.py"),
    # A part of a batch is what a batch norm sees.
    "training.accumulate": Changes(2, weights, base=NORMED),
    "training.clip_norm": Changes(0.01, weights),
    "training.recompute": Elsewhere("unit/models/test_recomputation.py"),  # the same weights: drawn by random jobs
    "training.freeze": Changes([r"^2\."], weights, base={"model.blocks": ["linear", "linear", "linear"]}),
    "training.ema": Changes(0.9, test_losses, AVERAGING),
    "training.device": Changes("cuda", exit_code),
    "training.threads": Changes(2, started("threads")),
    "strategy.name": Elsewhere("differences/generator.py"),
    "strategy.workers": Changes(3, started("workers"), ("data_parallel", "parameter_server", "sharded")),
    "cluster.failure_timeout": FAULTS,
    "cluster.max_restarts": FAULTS,
    "cluster.min_workers": FAULTS,
    "cluster.wait_for_workers": FAULTS,
    "cluster.spares": Elsewhere("unit/cluster/test_agent_engine.py"),
    "cluster.address": FAULTS,
    "cluster.engine": Elsewhere("engines/engine_runs.py"),
    "cluster.connect": Elsewhere("engines/engine_runs.py"),
    "cluster.encrypt": Elsewhere("distributed/test_between_hosts.py"),
    "cluster.balance": Elsewhere("distributed/test_balance.py"),
    "cluster.autoscale": AUTOSCALE,
    "cluster.max_workers": AUTOSCALE,
    "cluster.autoscale_every": AUTOSCALE,
    "stop.accuracy": Changes(0.01, steps, base={"evaluation.every_steps": 1}),
    "stop.loss": Changes(100.0, steps, base={"evaluation.every_steps": 1}),
    "stop.time": Changes("1ms", steps),
    "stop.steps": Changes(2, steps),
    "metrics": Changes({"f1": "f1"}, measured),
    "callbacks": Elsewhere("unit/training/test_callbacks.py"),
    "stop.metrics": Changes({"f1": 0.0}, steps, base={"evaluation.every_steps": 1, "metrics": {"f1": "f1"}}),
    # The rate is 0: no metric gets better. F1 has its best value at once where it is 0, and others do not matter.
    "stop.patience_metric": Changes(
        "worse",
        steps,
        base={
            "evaluation.every_steps": 1,
            "training.steps": 5,
            "stop.patience": 1,
            "metrics": {"worse": {"use": "differences.parts:worsening", "better": "higher"}},
        },
    ),
    "stop.patience": Changes(1, steps, base={"evaluation.every_steps": 1, "optimizer.lr": 0.0, "training.steps": 5}),
    "stop.idle": ONLINE,
    "evaluation.every_epochs": Changes(1, evaluations, base={"training.steps": 5}),
    "evaluation.every_steps": Changes(2, evaluations),
    # Sums are made in another order.
    "evaluation.batch_size": Elsewhere("unit/test_trainer.py"),
    "checkpoint.storage": Elsewhere("faults/test_storage_faults.py"),
    "checkpoint.every_steps": Changes(2, saved),
    "checkpoint.keep": Changes(1, saved, base={"checkpoint.every_steps": 1}),
    "checkpoint.keep_best": Changes(
        True, saved, base={"evaluation.every_steps": 1, "checkpoint.keep": 1, "optimizer.lr": 0.0}
    ),
    "checkpoint.asynchronous": Elsewhere("unit/test_trainer.py"),
    "monitoring.every_steps": Changes(2, reported),
    "monitoring.tensorboard": Changes(True, tensorboard),
    "monitoring.csv": Changes(True, csv_file),
    "monitoring.mlflow": Elsewhere("trackers/test_trackers.py"),
    "monitoring.wandb": Elsewhere("trackers/test_trackers.py"),
    "data_parallel.batch_norm": Changes("sync", weights, base=NORMED),
    "data_parallel.compression": Changes("fp16", weights, base={"model.double": False}),
    "data_parallel.reducer": Elsewhere("distributed/test_data_parallel.py"),
    "data_parallel.segment_bytes": Elsewhere("distributed/test_data_parallel.py"),
    "federated.algorithm": Changes("fedavgm", weights),
    "federated.rounds": Changes(5, steps),
    "federated.local_epochs": Changes(2, weights),
    "federated.local_steps": Changes(3, weights),
    "federated.clients_per_round": Changes(2, weights),
    "federated.fraction": Changes(0.4, weights),
    "federated.sampling": Changes("poisson", weights, base={"strategy.fraction": 0.4}),
    "federated.deadline": Changes("0.02s", weights, base={"strategy.clock": {"stragglers": 0.5}}),
    "federated.weights": Changes("equal", weights),
    "federated.most_samples": Changes(4, weights),
    "federated.max_norm": Changes(0.001, weights),
    "federated.personal": Changes(["*.bias"], weights),
    "federated.client_test": Changes(0.4, weights),
    "federated.compress": Changes("int8", weights),
    "federated.partition": Changes({"clients": 4}, weights),
    "federated.privacy": Changes({"clip_norm": 1.0, "noise": 1.0, "accountant": "rdp"}, weights),
    "federated.robust": Changes("median", weights),
    "federated.secure": Changes(True, exit_code),
    "federated.clock": Changes({"failures": 0.5}, weights),
    "local_sgd.sync_every": Changes(2, weights),
    "local_sgd.outer": Changes({"use": "sgd", "lr": 0.5}, weights),
    "local_sgd.batch_norm": Changes("local", weights, base=NORMED),
    "local_sgd.compress": Changes("int8", weights),
    "local_sgd.fragments": Elsewhere("distributed/test_local_sgd.py"),
    "local_sgd.delay": Elsewhere("distributed/test_local_sgd.py"),
    "local_sgd.workers_per_group": Elsewhere("distributed/test_local_groups.py"),
    "sharded.unit_bytes": Elsewhere("unit/strategies/test_sharded.py"),
    "sharded.keep_gathered": Elsewhere("distributed/test_sharded_training.py"),
    "sharded.offload": Changes(True, exit_code),
    "sharded.batch_norm": Changes("sync", weights, base=NORMED),
    "pipeline.stages": Changes(2, stages, base={"strategy.schedule": "interleaved", "model.blocks": ["linear"] * 6}),
    "pipeline.schedule": Elsewhere("distributed/test_pipeline_training.py"),
    "pipeline.microbatches": Changes(4, weights, base=NORMED),
    "pipeline.recompute": Elsewhere("distributed/test_pipeline_training.py"),
    "pipeline.placement": Changes([["0"], ["1", "2", "3", "4", "5", "6"]], stages, base={"strategy.placement": []}),
    "tensor.plan": Changes({"*.linear": "scatter"}, weights),
    "hybrid.mesh": Changes({"sharded": 2}, stages, base={"strategy.microbatches": None}),
    "parameter_server.servers": Changes(2, processes),
    # Each push is an update of its own, instead of one for each step.
    "parameter_server.staleness": Changes(1, weights),
    "parameter_server.push_every": Elsewhere("distributed/test_parameter_server.py"),
    "parameter_server.pull_every": Elsewhere("distributed/test_parameter_server.py"),
    "parameter_server.aggregate": Changes("sum", weights),
    "parameter_server.staleness_lr": Elsewhere("unit/strategies/parameter_server/test_parameter_shard.py"),
    "parameter_server.delay_compensation": Elsewhere("unit/strategies/parameter_server/test_parameter_shard.py"),
    "parameter_server.compression": Changes("int8", weights, base={"model.double": False}),
    "parameter_server.topk": Changes(0.2, weights, base={**TOPK, "model.double": False}),
    "parameter_server.weight_decay": Changes(0.5, weights),
    "parameter_server.clip_norm": Changes(0.01, weights),
    "parameter_server.replicas": Changes(2, processes),
    "parameter_server.servers_on": Elsewhere("faults/test_agents_on_hosts.py"),
    "parameter_server.drop_late": Elsewhere("unit/runs/dispatched/test_dispatcher.py"),
    # Arguments of the built-in parts.
    "optimizer.lr": Changes(0.01, rates),
    "optimizer.momentum": Changes(0.9, weights),
    "optimizer.weight_decay": Changes(0.5, weights),
    "optimizer.groups": Changes([{"match": "bias", "lr": 0.5}], weights),
    "schedule.per": Changes(
        "step", rates, base={"schedule.use": "StepLR", "schedule.step_size": 1, "schedule.per": "epoch"}
    ),
    "schedule.metric": Changes(
        "accuracy",
        rates,
        base={
            "schedule.use": "ReduceLROnPlateau",
            "schedule.patience": 0,
            "schedule.threshold": 100.0,
            "evaluation.every_steps": 1,
            "optimizer.lr": 0.3,
            "training.steps": 6,
        },
    ),
    "loss.label_smoothing": Changes(0.3, losses),
    "loss.ignore_index": Changes(1, losses),
    "schedule.warmup_steps": Changes(3, rates),
    "schedule.final": Changes(0.5, rates, base={"schedule.use": "cosine"}),
    "schedule.total_steps": Changes(9, rates, base={"schedule.use": "linear"}),
    "schedule.every_steps": Changes(1, rates, base={"schedule.use": "step", "schedule.every_steps": 2}),
    "schedule.factor": Changes(0.9, rates, base={"schedule.use": "step", "schedule.every_steps": 2}),
}

# What of the above is tried with rounds as well, and what is looked at there where it is not the same: steps are not
# reported. Others are refused (training.epochs, say), or say nothing of rounds (schedule.per).
IN_ROUNDS = {
    *("name", "seed", "metrics"),
    *(f"data.{key}" for key in ("normalize", "augment", "train_limit", "test_limit", "test_fraction")),
    *(
        f"training.{key}"
        for key in ("batch_size", "precision", "accumulate", "clip_norm", "freeze", "device", "threads")
    ),
    *(f"stop.{key}" for key in ("accuracy", "loss", "time", "steps", "metrics", "patience_metric", "patience")),
    *("evaluation.every_epochs", "evaluation.every_steps"),
    *("checkpoint.every_steps", "checkpoint.keep", "checkpoint.keep_best"),
    *("monitoring.every_steps", "monitoring.tensorboard", "monitoring.csv"),
    *("optimizer.lr", "optimizer.momentum", "optimizer.weight_decay", "optimizer.groups"),
    *("loss.label_smoothing", "loss.ignore_index"),
    *(f"schedule.{key}" for key in ("warmup_steps", "final", "total_steps", "every_steps", "factor")),
}
_LOOK_IN_ROUNDS = {rates: weights, losses: round_losses, reported: exit_code}

_SECTIONS = {
    "data": Data,
    "training": Training,
    "cluster": Cluster,
    "stop": Stop,
    "evaluation": Evaluation,
    "checkpoint": Checkpoint,
    "monitoring": Monitoring,
}
_NAMED = ("model", "loss", "optimizer", "schedule")  # sections that name a part, whose keys are its arguments


def known_settings() -> set[str]:
    """Return all keys that a job file may have, those of strategies as "strategy's name.key"."""
    keys = {f"{name}.{key}" for name, section in _SECTIONS.items() for key in _keys(section)} - {
        "data.use",
        "data.args",
    }
    keys |= {f"strategy.{key}" for key in _keys(Strategy)} - {"strategy.settings"}
    keys |= {f"{name}.{key}" for name, entry in STRATEGIES.items() for key in _keys(entry.settings)}
    return keys | {key for key in _keys(Job) if key not in {*_SECTIONS, *_NAMED, "strategy"}}


def _keys(struct: type[msgspec.Struct]) -> set[str]:
    return {item.name for item in msgspec.structs.fields(struct)}


def accepting(key: str, effect: Changes) -> tuple[str, ...]:
    """Return the strategies in which the key is tried."""
    section = key.partition(".")[0]
    if section in STRATEGIES:
        return (section,)
    return (*effect.strategies, ROUNDS) if key in IN_ROUNDS else effect.strategies


def look_of(effect: Changes, strategy: str) -> Callable[[Outcome], Any]:
    """Return what the setting changes in this strategy."""
    return _LOOK_IN_ROUNDS.get(effect.look, effect.look) if strategy == ROUNDS else effect.look


def tables(key: str, effect: Changes, strategy: str) -> tuple[Table, Table]:
    """Return the job without and with the setting."""
    choices = {**PLAIN, "blocks": ["linear", "linear"], "strategy": {"name": strategy, **BASES[strategy]}}
    base = job_table(choices)
    if strategy == ROUNDS:
        base["strategy"]["rounds"] = base["training"].pop("steps")
        base["data"]["size"] = 62  # clients of 12 and 13 samples: more than a batch, and not all the same
        del base["monitoring"]
    for path, value in effect.base.items():
        _put(base, path, value)
    section, _, inner = key.rpartition(".")
    path = f"strategy.{inner}" if section in STRATEGIES else key
    changed = {name: dict(value) if isinstance(value, dict) else value for name, value in base.items()}
    _put(changed, path, effect.value)
    return base, changed


def _put(table: Table, path: str, value: Any) -> None:
    if path == "training.steps" and table["strategy"]["name"] == ROUNDS:
        path = "strategy.rounds"
    section, _, key = path.rpartition(".")
    inner = table.setdefault(section, {}) if section else table
    if value is None:
        inner.pop(key, None)
        return
    inner[key] = value
    if path == "training.epochs":
        inner.pop("steps", None)
    if path == "data.use" and value == "iris":
        table["data"] = {"use": "iris"}
        table["training"]["batch_size"] = 50


TESTS_FOLDER = Path(__file__).resolve().parents[1]
