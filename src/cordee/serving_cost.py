"""What parameter servers take beside computing: two short runs with real servers on this machine."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cordee.assembly import assemble
from cordee.cluster import Team
from cordee.cluster.local import LocalEngine
from cordee.core import Job
from cordee.monitoring import Event, Monitor, RunDirectory
from cordee.overheads import served_jobs
from cordee.planner.machine import Overhead
from cordee.served import ServedRun

NUM_WINDOWS = 5


def measure_serving(engine: LocalEngine, num_workers: int, bare_s: Sequence[float]) -> Overhead:
    """Return what a step with one server takes more than `bare_s`, the steps of `served_jobs` without any exchange.

    The difference between a model that has next to no parameters and one of some megabytes is the price of a byte.
    """
    measured = []
    for job, bare in zip(served_jobs(num_workers), bare_s, strict=True):
        step_s, num_bytes = _run(engine, job)
        measured.append((num_bytes, max(0.0, step_s - bare)))
    (few, low_s), (many, high_s) = measured
    part_s = max(0.0, (high_s - low_s) / (many - few))
    return Overhead(
        strategy="parameter_server",
        num_processes=num_workers,
        step_s=max(0.0, low_s - part_s * few),
        part_s=part_s,
    )


def _run(engine: LocalEngine, job: Job) -> tuple[float, int]:
    """Return the seconds of a step, and the bytes of the parameters."""
    assert job.training.steps is not None
    every = max(1, job.training.steps // (NUM_WINDOWS + 1))
    job = msgspec.structs.replace(job, monitoring=msgspec.structs.replace(job.monitoring, every_steps=every))
    size = job.strategy.workers
    parts = assemble(job, Team(num_workers=size, num_local_workers=size))
    rates = _Rates()
    with (
        tempfile.TemporaryDirectory(prefix="cordee-profile-") as folder,
        RunDirectory.create(Path(folder) / "run", job.to_toml()) as directory,
        Monitor([rates]) as monitor,
    ):
        try:
            ServedRun(parts, directory, monitor, lambda: False).lead(engine, resume=False)
        finally:
            engine.stop()  # so that nothing of it is heard of later
    # The first event is that of the first step.
    step_s = job.training.batch_size / statistics.median(rates.samples_per_second[1:])
    return step_s, sum(p.numel() * p.element_size() for p in parts.model.parameters())


class _Rates:
    """Keeps the speed that step events tell."""

    def __init__(self) -> None:
        self.samples_per_second: list[float] = []

    def emit(self, event: Event) -> None:
        if event.type == "step":
            self.samples_per_second.append(event.fields["samples_per_second"])

    def close(self) -> None:
        pass
