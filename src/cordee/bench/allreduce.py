"""All-reduce of float32 on one host: the cordee backend beside gloo, OpenMPI and what the memory allows.

Cordée and gloo are measured in the same processes, through `torch.distributed`; OpenMPI through mpi4py, in processes
that are started again in each round, since its waiting would keep the cores busy. Every figure is the median over
many calls of the time on rank 0. The limit is what one copy and one addition of the data take in each of the
processes at the same time, without any waiting: it can not be beaten by a method that copies at all.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from cordee.bench.harness import Place, Processes, Report, describe_machine, interleave, median_ratio
from cordee.communication.shared_memory import register
from cordee.core.errors import JobError

SIZES = (1 << 10, 1 << 15, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
PROCESSES = (2, 4)
_CHUNK = 1 << 18  # elements: the limit goes through the data as the backend does, in pieces that stay in the cache
_BYTES_PER_ROUND = 1 << 27
_PATIENCE_S = 300.0


def measure(
    *,
    rounds: int,
    say: Callable[[str], None],
    sizes: Sequence[int] = SIZES,
    processes: Sequence[int] = PROCESSES,
) -> Report:
    """Measure; in the rows, ratios above 1 mean that Cordée is that many times faster.

    `share_of_limit` is how much of the speed of a bare copy and addition it reaches.
    """
    if rounds < 1:
        raise JobError(f"rounds is {rounds}: it must be at least 1")
    has_mpi = _has_mpi()
    if not has_mpi:
        say("no mpirun or no mpi4py, so OpenMPI is left out (Debian: openmpi-bin libopenmpi-dev; pip: mpi4py)")
    raw: dict[str, list[float]] = {}
    for num_processes in processes:
        with contextlib.closing(Processes(_serve, num_processes)) as group:
            contestants: dict[str, Callable[[], list[float]]] = {
                name: lambda name=name: group.ask((name, sizes))[0]  # type: ignore[misc]
                for name in ("cordee", "gloo", "limit")
            }
            if has_mpi:
                contestants["openmpi"] = lambda: _time_openmpi(num_processes, sizes)  # noqa: B023
            say(f"{num_processes} processes")
            for name, figures in interleave(contestants, rounds, say).items():
                for size, milliseconds in zip(sizes, zip(*figures, strict=True), strict=True):
                    raw[_key(name, num_processes, size)] = list(milliseconds)
    rows = [_row(raw, num_processes, size) for num_processes in processes for size in sizes]
    settings = {"sizes": list(sizes), "processes": list(processes), "rounds": rounds, "threads": 1}
    return Report("allreduce", describe_machine(), settings, raw, "ms", rows)


def repetitions(num_bytes: int) -> int:
    """Return how many calls of a size make up one figure: enough for a median, little enough to wait for."""
    return max(5, min(200, _BYTES_PER_ROUND // (8 * num_bytes)))


def _key(contestant: str, num_processes: int, num_bytes: int) -> str:
    return f"{contestant}, {num_processes} processes, {num_bytes} bytes"


def _row(raw: dict[str, list[float]], num_processes: int, num_bytes: int) -> dict[str, Any]:
    def figures(contestant: str) -> list[float] | None:
        return raw.get(_key(contestant, num_processes, num_bytes))

    ours, gloo, limit, openmpi = (figures(name) for name in ("cordee", "gloo", "limit", "openmpi"))
    assert ours is not None and gloo is not None and limit is not None
    return {
        "processes": num_processes,
        "bytes": num_bytes,
        "cordee_ms": statistics.median(ours),
        "gloo_ms": statistics.median(gloo),
        "openmpi_ms": None if openmpi is None else statistics.median(openmpi),
        "times_gloo": median_ratio(gloo, ours),
        "times_openmpi": None if openmpi is None else median_ratio(openmpi, ours),
        "share_of_limit": median_ratio(limit, ours),
    }


def _serve(place: Place, pipe: Connection) -> None:
    """Be a process with a cordee and a gloo group, asleep unless asked to measure."""
    register()
    dist.init_process_group("cordee", init_method=place.rendezvous, rank=place.rank, world_size=place.size)
    groups = {"cordee": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    while True:
        contestant, sizes = pipe.recv()
        dist.barrier(groups["gloo"])
        pipe.send([_time_one(groups.get(contestant), num_bytes) for num_bytes in sizes])


def _time_one(group: Any, num_bytes: int) -> float:
    data = torch.ones(num_bytes // 4)
    scratch, other = torch.zeros(_CHUNK), torch.zeros(_CHUNK)
    pieces = [(piece, scratch[: piece.numel()], other[: piece.numel()]) for piece in torch.split(data, _CHUNK)]

    def call() -> None:
        if group is not None:
            dist.all_reduce(data, group=group)
            return
        for piece, copy, addend in pieces:
            copy.copy_(piece)
            piece.add_(addend)

    times = []
    for index in range(2 + repetitions(num_bytes)):
        started = time.perf_counter()
        call()
        if index >= 2:
            times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


_MPI_SCRIPT = """
import json, statistics, sys, time
import numpy
from mpi4py import MPI
world = MPI.COMM_WORLD
found = []
for num_bytes, repetitions in json.loads(sys.argv[1]):
    data = numpy.ones(num_bytes // 4, dtype=numpy.float32)
    times = []
    for index in range(2 + repetitions):
        started = time.perf_counter()
        world.Allreduce(MPI.IN_PLACE, data)
        if index >= 2:
            times.append((time.perf_counter() - started) * 1e3)
    found.append(statistics.median(times))
if world.rank == 0:
    print(json.dumps(found))
"""


def _time_openmpi(num_processes: int, sizes: Sequence[int]) -> list[float]:
    work = json.dumps([(size, repetitions(size)) for size in sizes])
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(num_processes), sys.executable]
    finished = subprocess.run(
        [*command, "-c", _MPI_SCRIPT, work], capture_output=True, text=True, timeout=_PATIENCE_S, check=False
    )
    if finished.returncode != 0:
        raise RuntimeError(f"mpirun failed: {finished.stderr.strip()[-500:]}")
    return [float(value) for value in json.loads(finished.stdout.strip().splitlines()[-1])]


def _has_mpi() -> bool:
    """Return whether OpenMPI can be used from this interpreter."""
    if shutil.which("mpirun") is None:
        return False
    return subprocess.run([sys.executable, "-c", "import mpi4py"], capture_output=True, check=False).returncode == 0
