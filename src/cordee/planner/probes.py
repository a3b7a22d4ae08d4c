"""Processes that measure together: what steps and exchanges take while all of them do the same on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from cordee.cluster import Team
from cordee.cluster.engine import CannotStart, Engine, Exited, ProcessSpec
from cordee.communication.shared_memory import register
from cordee.compute import usable_cores
from cordee.compute.devices import MemoryWatch
from cordee.core import Job
from cordee.core.errors import CordeeError
from cordee.core.temporary import temporary_folder
from cordee.planner.measurements import Exchange, Machine, ModelProfile, Timing
from cordee.planner.measuring import time_call
from cordee.planner.profiling import sharing, take_memory, take_timings
from cordee.planner.trials import KINDS, SMALL, Bare, measure_bare
from cordee.training.components import assemble

PATIENCE_S = 300.0  # for all that the processes measure


def measure_group(engine: Engine, num_processes: int, *, job: Job | None, budget_s: float) -> list[ProbeReport]:
    """Return what each of `num_processes` found of a job, or of the machine.

    Raises CordeeError with the log of a process that failed.
    """
    with temporary_folder() as name:
        folder = Path(name)
        if job is not None:
            (folder / "job.toml").write_text(job.to_toml(), encoding="utf-8")
        for index in range(num_processes):
            spec = ProbeSpec(
                index=index,
                num_processes=num_processes,
                folder=name,
                job_file=str(folder / "job.toml") if job is not None else None,
                budget_s=budget_s,
            )
            argument, log = msgspec.to_builtins(spec), str(folder / f"log-{index}")
            engine.start(ProcessSpec.new(index, "cordee.planner.probes:main", argument, log=log))
        _await(engine, num_processes, folder)
        return [
            msgspec.json.decode((folder / f"report-{index}.json").read_bytes(), type=ProbeReport)
            for index in range(num_processes)
        ]


def add_to_machine(machine: Machine, reports: Sequence[ProbeReport]) -> Machine:
    """Return the machine with what the processes measured of it."""
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
    """Return the profile with what new processes measured of the model; its memory too, which they know best.

    Of its memory the measurement with the fewest processes counts, whose passes are the largest.
    """
    is_first = all(timing.num_processes == 1 for timing in profile.timings)
    profile = msgspec.structs.replace(profile, timings=(*profile.timings, *_mean_timings(reports)))
    if not is_first or not reports[0].pass_bytes:
        return profile
    return msgspec.structs.replace(
        profile, pass_bytes=reports[0].pass_bytes, fixed_bytes=reports[0].fixed_bytes, is_fixed_whole=True
    )


def _mean_timings(reports: Sequence[ProbeReport]) -> list[Timing]:
    """Return the timings, each the mean over the processes."""
    merged = []
    for same in zip(*(report.timings for report in reports), strict=True):
        merged.append(
            msgspec.structs.replace(
                same[0],
                forward_s=_means([timing.forward_s for timing in same]),
                backward_s=_means([timing.backward_s for timing in same]),
                optimizer_s=statistics.fmean(timing.optimizer_s for timing in same),
                other_s=statistics.fmean(timing.other_s for timing in same),
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
    return tuple(map(statistics.fmean, zip(*rows, strict=True)))


EXCHANGES = ("all_reduce", "all_gather", "reduce_scatter", "send", "copy")
SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 23, 1 << 25)  # bytes


class ProbeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a process has to measure."""

    index: int
    num_processes: int
    folder: str  # where the processes meet and write what they found
    job_file: str | None  # None: measure the machine
    budget_s: float


class ProbeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a process found."""

    timings: tuple[Timing, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    bare: tuple[Bare, ...] = ()  # of the models of `trials`: see overheads.KINDS
    bare_bytes: int = 0  # at most, while it took them
    slowdown: float = 1.0
    process_bytes: int = 0  # to begin with
    pass_bytes: float = 0.0  # of the job's model: see ModelProfile
    fixed_bytes: float = 0.0


def main(argument: dict[str, Any]) -> int:
    """Measure, and write the report. Called in a fresh fork of the fork server."""
    spec = msgspec.convert(argument, ProbeSpec)
    memory = MemoryWatch()
    size, folder = spec.num_processes, Path(spec.folder)
    torch.set_num_threads(max(1, usable_cores() // size))
    report = ProbeReport(process_bytes=memory.start_bytes)
    # Memory first, while the process is as new as a worker's, and has no group yet.
    if spec.job_file is None:
        measure_bare(spec.index, size, SMALL)
        report = msgspec.structs.replace(report, bare_bytes=memory.peak_bytes())
    else:
        team = Team(spec.index, size, num_local_workers=size, local_rank=spec.index)
        parts = assemble(sharing(Job.load(spec.job_file), size), team)
        pass_bytes, fixed_bytes = take_memory(parts, memory)
        report = msgspec.structs.replace(report, pass_bytes=pass_bytes, fixed_bytes=fixed_bytes)
    register()
    store = dist.FileStore(str(folder / "store"), size)  # type: ignore[attr-defined]
    dist.init_process_group("cordee", store=store, rank=spec.index, world_size=size)
    if spec.job_file is None:
        report = msgspec.structs.replace(
            report,
            bare=tuple(measure_bare(spec.index, size, hidden) for hidden in KINDS),
            exchanges=tuple(map(_exchange, EXCHANGES)),
            slowdown=_slowdown(spec.index),
        )
    else:
        dist.barrier()
        timings, _ = take_timings(parts, num_processes=size, budget_s=spec.budget_s)
        report = msgspec.structs.replace(report, timings=tuple(timings))
    (folder / f"report-{spec.index}.json").write_bytes(msgspec.json.encode(report))
    dist.barrier()  # nobody leaves while another still measures: the cores would be less shared
    dist.destroy_process_group()
    return 0


def _exchange(kind: str) -> Exchange:
    seconds = []
    for num_bytes in SIZES:
        call = _make_call(kind, num_bytes)
        # Collectives need equally many calls everywhere; the sizes say how many, not the clock.
        num_calls = max(4, min(100, (1 << 23) // num_bytes))
        dist.barrier()
        seconds.append(time_call(call, budget_s=float("inf"), most_calls=num_calls))
    return Exchange(kind=kind, num_processes=dist.get_world_size(), sizes=SIZES, seconds=tuple(seconds))


def _make_call(kind: str, num_bytes: int) -> Callable[[], object]:
    """Return an exchange of `num_bytes`, in memory of its own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if kind in ("all_gather", "reduce_scatter"):
        share = torch.ones(max(1, num_bytes // 4 // size))
        whole = torch.ones(share.numel() * size)
        if kind == "all_gather":
            return lambda: dist.all_gather_into_tensor(whole, share)
        return lambda: dist.reduce_scatter_tensor(share, whole)
    data = torch.ones(num_bytes // 4)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(data)
    if kind == "copy":
        target = torch.empty_like(data)
        return lambda: target.copy_(data)
    peer = rank ^ 1
    if peer >= size:  # an odd one out has nobody to talk to
        return lambda: None

    def ping_pong() -> None:
        """Between neighbours, all pairs at once."""
        for call in (dist.send, dist.recv) if rank % 2 == 0 else (dist.recv, dist.send):
            call(data, peer)

    return ping_pong


def _slowdown(index: int) -> float:
    """Return how many times longer a small network's step takes while all members take one. Collective."""
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.Flatten(), nn.Linear(25088, 64))
    inputs = torch.ones(16, 3, 32, 32)

    def step() -> None:
        model(inputs).sum().backward()

    share = torch.get_num_threads()
    alone_s = 0.0
    if index == 0:
        torch.set_num_threads(usable_cores())
        alone_s = time_call(step, budget_s=0.3, most_calls=100)
        torch.set_num_threads(share)
    dist.barrier()
    together_s = time_call(step, budget_s=0.5, most_calls=1000)
    dist.barrier()
    return together_s / alone_s if index == 0 else 0.0
