"""What strategies themselves take: short runs, with real workers and servers, of models that have little to compute.

`python -m` runs this module in a process that trains such a model alone, and prints by how many bytes it grew.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from cordee.cluster import Team
from cordee.cluster.engine import Engine, stop_processes
from cordee.compute.devices import MemoryWatch
from cordee.core import Batch, Job
from cordee.core.errors import CordeeError
from cordee.core.temporary import temporary_folder
from cordee.monitoring import AnyEvent, Monitor, RunDirectory, events
from cordee.planner.hardware import ThisMachine, gathering_s, summing_s
from cordee.planner.measurements import Amount, Machine, Overhead
from cordee.planner.measuring import typical_s
from cordee.runs.kind import lead_run
from cordee.strategies.table import STRATEGIES, CostModel, usual_strategy
from cordee.training.components import assemble
from cordee.training.session import Session

NUM_LAYERS = 8
SMALL = (16,) * NUM_LAYERS
DEEP = (16,) * 32
LARGE = (1024,) * 3  # 8 MB of parameters
KINDS = (SMALL, DEEP, LARGE)
NUM_STEPS = 48
NUM_WINDOWS = 8
MOST_S = 4.0  # of training in a trial; a busy machine takes fewer steps
WARM_UP_STEPS = 8
TIMEOUT_S = 120.0


class _Trial(NamedTuple):
    """Settings to try, how many parts a step then has, and how many passes over the model it takes a worker."""

    settings: dict[str, Any]
    num_parts: int
    num_passes: float = 1.0
    hidden: tuple[int, ...] = SMALL


class Found(NamedTuple):
    """What a short run took."""

    step_s: float
    peak_bytes: int  # of the worker that took most; 0: not known
    num_tensors: int  # of parameters
    num_bytes: int


def measure_trials(engine: Engine, num_workers: int, bare: Sequence[Bare], machine: Machine) -> list[Overhead]:
    """Return what each strategy of this version adds to a step of `num_workers`, and the memory a worker then takes.

    `bare` are the steps of the models of `overheads.KINDS` without any exchange, while as many workers take one each.
    Exchanges that the cost model counts by themselves are not part of it: `machine` has them.
    """
    found = []
    trials_of = _trials(num_workers)
    for strategy, entry in STRATEGIES.items():
        amounts: list[Amount] = []
        seconds: list[float] = []
        peak_bytes = 0
        for trial in trials_of.get(entry.cost_model, ()):
            job = trial_job(strategy, num_workers, trial.settings, trial.hidden)
            with contextlib.suppress(CordeeError):  # a strategy that refuses this machine is not to be had on it
                outcome = run_trial(engine, job)
                amount = Amount(trial.num_parts, outcome.num_tensors, outcome.num_bytes)
                peak_bytes = max(peak_bytes, outcome.peak_bytes if trial.hidden == SMALL else 0)
                own = bare[KINDS.index(trial.hidden)]
                counted_s = own.step_s + own.pass_s * (trial.num_passes - 1)
                counted_s += _exchange_s(entry.cost_model, amount, ThisMachine(machine, num_workers, 0.0))
                amounts.append(amount)
                seconds.append(outcome.step_s - counted_s)
        if amounts:
            fitted = fit(entry.overhead_grows_with, amounts, seconds)
            found.append(Overhead(strategy=strategy, num_processes=num_workers, worker_bytes=peak_bytes, **fitted))
    return found


def fit(fields: Sequence[str], amounts: Sequence[Amount], seconds: Sequence[float]) -> dict[str, float]:
    """Return the fields of an Overhead, none below 0, that explain the seconds of trials best."""
    columns = {
        "step_s": np.ones(len(amounts)),
        "part_s": np.array([amount.parts for amount in amounts], float),
        "tensor_s": np.array([amount.tensors for amount in amounts], float),
        "byte_s": np.array([amount.num_bytes for amount in amounts], float),
    }
    left = [field for field in fields if columns[field].any()]
    while left:
        scales = [columns[field].max() for field in left]
        table = np.stack([columns[field] / scale for field, scale in zip(left, scales, strict=True)], axis=1)
        found, *_ = np.linalg.lstsq(table, np.array(seconds), rcond=None)
        if found.min() >= 0:
            return {field: float(value / scale) for field, value, scale in zip(left, found, scales, strict=True)}
        left.pop(int(found.argmin()))  # noise: nothing takes less than no time
    return {}


def step_of(samples_per_second: Sequence[float], batch_size: int) -> float:
    """Return the seconds of a step from the speeds that the windows of a trial had.

    Raises CordeeError if time was up before there was one, as on a machine that has much else to do.
    """
    # The first is that of the first step, the second window has what warms up.
    counted = samples_per_second[2:] or samples_per_second
    if not counted:
        raise CordeeError("the trial took no step in its time")
    return batch_size / statistics.median(counted)


def _exchange_s(cost_model: CostModel, amount: Amount, hardware: ThisMachine) -> float:
    """Return what the cost model counts for the exchanges of a trial, beside the overhead."""
    members = range(len(hardware.devices))
    if cost_model == "replicas":
        return summing_s(hardware, amount.num_bytes, members)
    if cost_model == "shards":
        gather_s, scatter_s = gathering_s(hardware, [int(amount.num_bytes / amount.parts)] * int(amount.parts), members)
        return 2 * gather_s + scatter_s
    return 0.0


def _trials(num_workers: int) -> dict[CostModel, tuple[_Trial, ...]]:
    def passes(num_micro: int) -> float:  # of a pipeline, in whole models, filling and draining included
        return (num_micro + num_workers - 1) / num_workers

    few, many = num_workers, 4 * num_workers
    return {
        "replicas": (_Trial({}, 0), _Trial({}, 0, hidden=LARGE)),
        "shards": (
            _Trial({}, 1),
            _Trial({"unit_bytes": 1}, NUM_LAYERS + 2),
            _Trial({}, 1, hidden=DEEP),
            _Trial({}, len(LARGE), hidden=LARGE),  # two layers that are large enough, and the rest
        ),
        "stages": (
            _Trial({"microbatches": few}, few, passes(few)),
            _Trial({"microbatches": many}, many, passes(many)),
        ),
        "slices": (_Trial({}, NUM_LAYERS + 1), _Trial({}, len(LARGE) + 1, hidden=LARGE)),
        "servers": (_Trial({}, 0), _Trial({}, 0, hidden=LARGE)),
    }


def run_trial(engine: Engine, job: Job) -> Found:
    """Run a job with its workers and servers in new processes of `engine`; return what it took."""
    size = job.strategy.workers
    parts = assemble(job, Team(num_workers=size, num_local_workers=size))
    rates = _Rates()
    with (
        tempfile.TemporaryDirectory(prefix="cordee-profile-") as folder,
        RunDirectory.create(Path(folder) / "run", job.to_toml()) as directory,
        Monitor([rates]) as monitor,
    ):
        try:
            summary = lead_run(parts, directory, monitor, lambda: False, engine, resume=False)
        finally:
            stop_processes(engine)  # so that nothing of it arrives later
    step_s = step_of(rates.samples_per_second, job.training.batch_size)
    sizes = [parameter.nbytes for parameter in parts.model.parameters()]
    return Found(step_s, summary.peak_memory_bytes or 0, len(sizes), sum(sizes))


class _Rates:
    """Keeps the speed that step events report."""

    def __init__(self) -> None:
        self.samples_per_second: list[float] = []

    def emit(self, event: AnyEvent) -> None:
        if isinstance(event, events.Step) and event.samples_per_second is not None:
            self.samples_per_second.append(event.samples_per_second)

    def close(self) -> None:
        pass


def trial_job(strategy: str, num_workers: int, settings: dict[str, Any], hidden: tuple[int, ...] = SMALL) -> Job:
    return Job.from_dict(
        {
            "model": {"use": "mlp", "hidden": list(hidden)},
            "data": {"use": "synthetic", "shape": [16], "num_classes": 4, "size": 2048, "test_size": 0},
            "optimizer": {"use": "sgd", "lr": 0.001},
            "training": {"batch_size": 8 * num_workers, "steps": NUM_STEPS, "device": "cpu"},
            "strategy": {"name": strategy, "workers": num_workers, **settings},
            "monitoring": {"every_steps": NUM_STEPS // NUM_WINDOWS},
            "evaluation": {"every_epochs": 0},
            "checkpoint": {"every_steps": 0},
            "stop": {"time": MOST_S},
        }
    )


class Bare(msgspec.Struct, frozen=True):
    """Seconds of a step without any exchange."""

    step_s: float
    pass_s: float  # of which forward and backward


def measure_bare(index: int, num_workers: int, hidden: tuple[int, ...]) -> Bare:
    """Return what a step of a model takes while all members take one, exchanging nothing."""
    team = Team(index, num_workers, num_local_workers=num_workers, local_rank=index)
    return _step_s(trial_job(usual_strategy(num_workers), num_workers, {}, hidden), team)


def _step_s(job: Job, team: Team) -> Bare:
    parts = assemble(job, team)
    optimizer = parts.recipe.make(parts.model.named_parameters())
    times, passes = [], []
    with contextlib.closing(parts.train.batches(0)) as batches:
        for batch, _ in zip(batches, range(NUM_STEPS), strict=False):
            assert isinstance(batch, Batch)
            started = time.perf_counter()
            total = parts.computation.loss.count_batch(batch)
            parts.computation.forward_backward(parts.model, [batch], total_count=total, measure=False)
            passes.append(time.perf_counter() - started)
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - started)
    return Bare(typical_s(times[WARM_UP_STEPS:]), typical_s(passes[WARM_UP_STEPS:]))


def measure_alone() -> int:
    """Return the growth, of a process that is new; 0 where it is not known."""
    # -P: a file in the working folder that is called like a module of Python's is not that module.
    command = [sys.executable, "-P", "-m", "cordee.planner.trials"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        return int(done.stdout)
    except (subprocess.SubprocessError, OSError, ValueError):
        return 0


def main() -> None:
    memory = MemoryWatch()
    parts = assemble(trial_job(usual_strategy(1), 1, {}), Team())
    parts.setup()
    with temporary_folder() as folder, Monitor([]) as monitor:
        session = Session(parts, monitor, Path(folder), should_stop=lambda: False, memory=memory)
        session.run(resume=False, log_file=Path(folder) / "log")
    sys.stdout.write(f"{max(0, memory.peak_bytes() - memory.start_bytes)}\n")


if __name__ == "__main__":
    main()
