"""A process of a crew that measures: steps and exchanges while the others do the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from cordee.cluster import Team
from cordee.communication.shared_memory import register
from cordee.compute import usable_cores
from cordee.compute.devices import MemoryWatch
from cordee.core import Job
from cordee.planner.machine import Exchange
from cordee.planner.measuring import time_call
from cordee.planner.overheads import KINDS, SMALL, Bare, measure_bare
from cordee.planner.profile import Timing
from cordee.planner.profiling import sharing, take_memory, take_timings
from cordee.training.components import assemble

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 23, 1 << 25)  # bytes


class ProbeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a member of a crew is told."""

    index: int
    num_processes: int
    folder: str  # where the crew meets and writes what it found
    job_file: str | None  # None: measure the machine
    budget_s: float


class ProbeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a member found."""

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
    order = msgspec.convert(argument, ProbeSpec)
    memory = MemoryWatch()
    size, folder = order.num_processes, Path(order.folder)
    torch.set_num_threads(max(1, usable_cores() // size))
    report = ProbeReport(process_bytes=memory.start_bytes)
    # Memory first, while the process is as new as a worker's, and has no group yet.
    if order.job_file is None:
        measure_bare(order.index, size, SMALL)
        report = msgspec.structs.replace(report, bare_bytes=memory.peak_bytes())
    else:
        team = Team(order.index, size, num_local_workers=size, local_rank=order.index)
        parts = assemble(sharing(Job.load(order.job_file), size), team)
        pass_bytes, fixed_bytes = take_memory(parts, memory)
        report = msgspec.structs.replace(report, pass_bytes=pass_bytes, fixed_bytes=fixed_bytes)
    register()
    store = dist.FileStore(str(folder / "store"), size)  # type: ignore[attr-defined]
    dist.init_process_group("cordee", store=store, rank=order.index, world_size=size)
    if order.job_file is None:
        report = msgspec.structs.replace(
            report,
            bare=tuple(measure_bare(order.index, size, hidden) for hidden in KINDS),
            exchanges=tuple(_exchange(kind, num_bytes_of) for kind, num_bytes_of in _KINDS.items()),
            slowdown=_slowdown(order.index),
        )
    else:
        dist.barrier()
        timings, _ = take_timings(parts, num_processes=size, budget_s=order.budget_s)
        report = msgspec.structs.replace(report, timings=tuple(timings))
    (folder / f"report-{order.index}.json").write_bytes(msgspec.json.encode(report))
    dist.barrier()  # nobody leaves while another still measures: the cores would be less shared
    dist.destroy_process_group()
    return 0


def _exchange(kind: str, make: Callable[[int], Callable[[], object]]) -> Exchange:
    seconds = []
    for num_bytes in SIZES:
        call = make(num_bytes)
        # Collectives need equally many calls everywhere; the sizes say how many, not the clock.
        num_calls = max(4, min(100, (1 << 23) // num_bytes))
        dist.barrier()
        seconds.append(time_call(call, budget_s=float("inf"), most_calls=num_calls))
    return Exchange(kind=kind, num_processes=dist.get_world_size(), sizes=SIZES, seconds=tuple(seconds))


def _all_reduce(num_bytes: int) -> Callable[[], object]:
    data = torch.ones(num_bytes // 4)
    return lambda: dist.all_reduce(data)


def _all_gather(num_bytes: int) -> Callable[[], object]:
    share = torch.ones(max(1, num_bytes // 4 // dist.get_world_size()))
    whole = torch.empty(share.numel() * dist.get_world_size())
    return lambda: dist.all_gather_into_tensor(whole, share)


def _reduce_scatter(num_bytes: int) -> Callable[[], object]:
    share = torch.ones(max(1, num_bytes // 4 // dist.get_world_size()))
    whole = torch.ones(share.numel() * dist.get_world_size())
    return lambda: dist.reduce_scatter_tensor(share, whole)


def _send(num_bytes: int) -> Callable[[], object]:
    """Half of a ping-pong between neighbours, all pairs at once."""
    data = torch.ones(num_bytes // 4)
    rank, size = dist.get_rank(), dist.get_world_size()
    peer = rank ^ 1
    if peer >= size:  # an odd one out has nobody to talk to
        return lambda: None

    def ping_pong() -> None:
        if rank % 2 == 0:
            dist.send(data, peer)
            dist.recv(data, peer)
        else:
            dist.recv(data, peer)
            dist.send(data, peer)

    return ping_pong


def _copy(num_bytes: int) -> Callable[[], object]:
    source, target = torch.ones(num_bytes // 4), torch.empty(num_bytes // 4)
    return lambda: target.copy_(source)


_KINDS: dict[str, Callable[[int], Callable[[], object]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "send": _send,
    "copy": _copy,
}


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
