"""Starts processes that measure together what several workers take on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cordee.cluster.engine import CannotStart, Engine, Exited, ProcessSpec
from cordee.core import Job
from cordee.core.errors import CordeeError
from cordee.core.temporary import temporary_folder
from cordee.planner.machine import Exchange, Machine
from cordee.planner.probe_worker import ProbeReport, ProbeSpec
from cordee.planner.profile import ModelProfile, Timing

PATIENCE_S = 300.0  # for all that a crew measures


def measure_group(engine: Engine, num_processes: int, *, job: Job | None, budget_s: float) -> list[ProbeReport]:
    """Return what each of `num_processes` found of a job, or of the machine.

    Raises CordeeError with the log of a process that failed.
    """
    with temporary_folder() as name:
        folder = Path(name)
        if job is not None:
            (folder / "job.toml").write_text(job.to_toml(), encoding="utf-8")
        for index in range(num_processes):
            order = ProbeSpec(
                index=index,
                num_processes=num_processes,
                folder=name,
                job_file=str(folder / "job.toml") if job is not None else None,
                budget_s=budget_s,
            )
            argument, log = msgspec.to_builtins(order), str(folder / f"log-{index}")
            engine.start(ProcessSpec.new(index, "cordee.planner.probe_worker:main", argument, log=log))
        _await(engine, num_processes, folder)
        return [
            msgspec.json.decode((folder / f"report-{index}.json").read_bytes(), type=ProbeReport)
            for index in range(num_processes)
        ]


def add_to_machine(machine: Machine, reports: Sequence[ProbeReport]) -> Machine:
    """Return the machine with what a crew found out about it."""
    num_processes = len(reports)
    exchanges = [
        Exchange(
            kind=first.kind,
            num_processes=num_processes,
            sizes=first.sizes,
            # A ping-pong is there and back.
            seconds=tuple(seconds / 2 if first.kind == "send" else seconds for seconds in first.seconds),
        )
        for first in reports[0].exchanges
    ]
    return msgspec.structs.replace(
        machine,
        exchanges=(*machine.exchanges, *exchanges),
        slowdowns={**machine.slowdowns, num_processes: max(1.0, reports[0].slowdown)},
        process_bytes=max(machine.process_bytes, reports[0].process_bytes),
        bare_bytes=max(machine.bare_bytes, reports[0].bare_bytes),
    )


def add_to_profile(profile: ModelProfile, reports: Sequence[ProbeReport]) -> ModelProfile:
    """Return the profile with what a crew found out about the model. Its processes are new: they know its memory best.

    The smallest crew's word counts, whose passes are the largest.
    """
    is_first = all(timing.num_processes == 1 for timing in profile.timings)
    profile = msgspec.structs.replace(profile, timings=(*profile.timings, *_mean_timings(reports)))
    if not is_first or not reports[0].pass_bytes:
        return profile
    return msgspec.structs.replace(
        profile, pass_bytes=reports[0].pass_bytes, fixed_bytes=reports[0].fixed_bytes, is_fixed_whole=True
    )


def _mean_timings(reports: Sequence[ProbeReport]) -> list[Timing]:
    """Return the timings of a crew, each the mean over its members."""
    merged = []
    for same in zip(*(report.timings for report in reports), strict=True):
        merged.append(
            msgspec.structs.replace(
                same[0],
                forward_s=_means([timing.forward_s for timing in same]),
                backward_s=_means([timing.backward_s for timing in same]),
                optimizer_s=sum(timing.optimizer_s for timing in same) / len(same),
                other_s=sum(timing.other_s for timing in same) / len(same),
            )
        )
    return merged


def _await(engine: Engine, num_processes: int, folder: Path) -> None:
    left, deadline = num_processes, time.monotonic() + PATIENCE_S
    while left:
        if time.monotonic() > deadline:
            raise CordeeError(f"{left} of {num_processes} measuring processes did not end within {PATIENCE_S:g} s")
        for report in engine.reports(timeout_s=0.1):
            if isinstance(report, CannotStart):
                raise CordeeError(f"a measuring process cannot be started: {report.reason}")
            if not isinstance(report, Exited):
                continue
            if report.status:
                text = (folder / f"log-{report.index}").read_text(encoding="utf-8", errors="replace").strip()
                last = text.splitlines()[-1] if text else "it left no word"
                raise CordeeError(f"a measuring process {report.describe()}: {last}")
            left -= 1


def _means(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(sum(column) / len(column) for column in zip(*rows, strict=True))
