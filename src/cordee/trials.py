"""What strategies themselves take: short runs, with real workers and servers, of models that have little to compute."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cordee.assembly import assemble
from cordee.cluster import Team
from cordee.cluster.local import LocalEngine
from cordee.core import Job
from cordee.core.errors import CordeeError
from cordee.monitoring import Event, Monitor, RunDirectory
from cordee.overheads import LARGE, NUM_LAYERS, SMALL, Bare, trial_job
from cordee.planner.machine import Overhead
from cordee.served import ServedRun
from cordee.strategies import STRATEGIES
from cordee.team_run import TeamRun

NUM_WINDOWS = 8


class _Trial(NamedTuple):
    """Settings to try, how many parts a step then has, and how many passes over the model it takes a worker."""

    settings: dict[str, Any]
    num_parts: int
    num_passes: float = 1.0
    hidden: tuple[int, ...] = SMALL


class _Found(NamedTuple):
    step_s: float
    peak_bytes: int
    parameter_bytes: int


def measure_trials(engine: LocalEngine, num_workers: int, bare: Sequence[Bare]) -> list[Overhead]:
    """Return what each strategy of this version adds to a step of `num_workers`, and the memory a worker then takes.

    `bare` are the steps of the small and the large model without any exchange, while as many workers take one each.
    """
    found = []
    for strategy, trials in _trials(num_workers).items():
        points: list[tuple[float, float]] = []
        peak_bytes = 0
        for trial in trials if strategy in STRATEGIES else ():
            job = trial_job(strategy, num_workers, trial.settings, trial.hidden)
            with contextlib.suppress(CordeeError):  # a strategy that refuses this machine is not to be had on it
                outcome = _run(engine, job)
                peak_bytes = max(peak_bytes, outcome.peak_bytes if trial.hidden == SMALL else 0)
                own = bare[0 if trial.hidden == SMALL else 1]
                bare_s = own.step_s + own.pass_s * (trial.num_passes - 1)
                num_parts = outcome.parameter_bytes if strategy == "parameter_server" else trial.num_parts
                points.append((num_parts, outcome.step_s - bare_s))
        if points:
            found.append(_line(strategy, num_workers, points, peak_bytes))
    return found


def _trials(num_workers: int) -> dict[str, tuple[_Trial, ...]]:
    def passes(num_micro: int) -> float:  # of a pipeline, in whole models, filling and draining included
        return (num_micro + num_workers - 1) / num_workers

    few, many = num_workers, 4 * num_workers
    return {
        "data_parallel": (_Trial({}, 1),),
        "sharded": (_Trial({}, 1), _Trial({"unit_bytes": 1}, NUM_LAYERS + 2)),
        "pipeline": (
            _Trial({"microbatches": few}, few, passes(few)),
            _Trial({"microbatches": many}, many, passes(many)),
        ),
        "tensor": (_Trial({}, NUM_LAYERS + 1),),
        "parameter_server": (_Trial({}, 0), _Trial({}, 0, hidden=LARGE)),
    }


def _line(strategy: str, num_workers: int, points: list[tuple[float, float]], peak_bytes: int) -> Overhead:
    """Return the overhead from two trials, on the line through them; of one trial of several parts all is theirs."""
    (few, low_s), (many, high_s) = points[0], points[-1]
    part_s = max(0.0, (high_s - low_s) / (many - few) if many > few else low_s / few if few > 1 else 0.0)
    step_s = max(0.0, low_s - part_s * few)
    return Overhead(strategy=strategy, num_processes=num_workers, step_s=step_s, part_s=part_s, worker_bytes=peak_bytes)


def _run(engine: LocalEngine, job: Job) -> _Found:
    size = job.strategy.workers
    parts = assemble(job, Team(num_workers=size, num_local_workers=size))
    rates = _Rates()
    kind = ServedRun if STRATEGIES[job.strategy.name].is_served else TeamRun
    with (
        tempfile.TemporaryDirectory(prefix="cordee-profile-") as folder,
        RunDirectory.create(Path(folder) / "run", job.to_toml()) as directory,
        Monitor([rates]) as monitor,
    ):
        try:
            summary = kind(parts, directory, monitor, lambda: False).lead(engine, resume=False)
        finally:
            engine.stop()  # so that nothing of it is heard of later
    # The first event is that of the first step, the second window has what warms up.
    step_s = job.training.batch_size / statistics.median(rates.samples_per_second[2:])
    parameter_bytes = sum(p.numel() * p.element_size() for p in parts.model.parameters())
    return _Found(step_s, summary.peak_memory_bytes or 0, parameter_bytes)


class _Rates:
    """Keeps the speed that step events tell."""

    def __init__(self) -> None:
        self.samples_per_second: list[float] = []

    def emit(self, event: Event) -> None:
        if event.type == "step":
            self.samples_per_second.append(event.fields["samples_per_second"])

    def close(self) -> None:
        pass
