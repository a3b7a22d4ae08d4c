"""All-reduce of float32 between two hosts: the cordee backend, plain and encrypted, beside gloo.

The hosts are two network namespaces of this machine with a virtual cable between them, at full speed and with a limit
of 100 Mbit/s: root and iproute2 are needed. One process on each host. At full speed the cable is as fast as the
processors that copy and encrypt; between real machines a network comes first. Every figure is the median over several
calls of the time on rank 0; busy is the processor time of that process, which other programs hardly change.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from cordee.bench.harness import Place, Processes, Report, describe_machine, interleave, median_ratio
from cordee.communication.shared_memory import BackendSettings, register
from cordee.core import env
from cordee.core.errors import JobError

ROUNDS = 5
SIZES = (1 << 10, 1 << 18, 1 << 22, 1 << 26)
LIMITS = {"full speed": 0.0, "100 Mbit/s": 100e6}  # bits a second in each direction; 0 is no limit
CONTESTANTS = ("plain", "encrypted", "gloo")
_FIGURE_S = 1.0  # calls of one figure take about so long
_FULL_SPEED = 4e9  # bits a second, to choose the number of calls by
_DEVICE = "cordee-bench"
_CLONE_NEWNET = 0x40000000


def measure(
    *,
    rounds: int,
    say: Callable[[str], None],
    sizes: Sequence[int] = SIZES,
    limits: Sequence[str] = tuple(LIMITS),
) -> Report:
    """Measure; in the rows, ratios above 1 mean that the encrypted, or the plain, backend is that many times faster."""
    if rounds < 1:
        raise JobError(f"rounds is {rounds}: it must be at least 1")
    raw: dict[str, list[float]] = {}
    for limit in limits:
        rate = LIMITS[limit]
        say(limit)
        with _two_hosts(rate) as names, contextlib.closing(Processes(partial(_serve, names), 2)) as group:
            calls = [(size, _repetitions(size, rate or _FULL_SPEED)) for size in sizes]
            contestants = {name: partial(_ask, group, name, calls) for name in CONTESTANTS}
            for name, figures in interleave(contestants, rounds, say).items():
                for size, times in zip(sizes, zip(*figures, strict=True), strict=True):
                    raw[_key(name, limit, size)] = [elapsed_ms for elapsed_ms, _ in times]
                    raw[_key(f"{name}, processor", limit, size)] = [busy_ms for _, busy_ms in times]
    rows = [_row(raw, limit, size) for limit in limits for size in sizes]
    return Report("hosts", describe_machine(), {"sizes": list(sizes), "rounds": rounds}, raw, "ms", rows)


def _ask(group: Processes, name: str, calls: Sequence[tuple[int, int]]) -> list[tuple[float, float]]:
    times: list[tuple[float, float]] = group.ask((name, calls))[0]
    return times


def _repetitions(num_bytes: int, rate: float) -> int:
    return max(1, min(200, round(_FIGURE_S / (0.0005 + 8 * num_bytes / rate))))


def _key(contestant: str, limit: str, num_bytes: int) -> str:
    return f"{contestant}, {limit}, {num_bytes} bytes"


def _row(raw: dict[str, list[float]], limit: str, num_bytes: int) -> dict[str, Any]:
    plain, encrypted, gloo = (raw[_key(name, limit, num_bytes)] for name in CONTESTANTS)
    busy = {
        f"{name}_busy_ms": statistics.median(raw[_key(f"{name}, processor", limit, num_bytes)]) for name in CONTESTANTS
    }
    return {
        "link": limit,
        "bytes": num_bytes,
        "plain_ms": statistics.median(plain),
        "encrypted_ms": statistics.median(encrypted),
        "gloo_ms": statistics.median(gloo),
        "plain_times_gloo": median_ratio(gloo, plain),
        "encrypted_times_gloo": median_ratio(gloo, encrypted),
        "encrypted_times_plain": median_ratio(plain, encrypted),
        **busy,
    }


def _serve(names: Sequence[str], place: Place, pipe: Connection) -> None:
    """Be a process of one host with a group for each contestant, asleep unless asked to measure."""
    _enter(names[place.rank])
    env.adopt({"GLOO_SOCKET_IFNAME": _DEVICE})
    register()
    dist.init_process_group("cordee", init_method=place.rendezvous, rank=place.rank, world_size=place.size)
    groups = {
        "plain": dist.group.WORLD,
        "encrypted": dist.new_group(pg_options=BackendSettings(encrypt=True)),
        "gloo": dist.new_group(backend="gloo"),
    }
    while True:
        contestant, calls = pipe.recv()
        pipe.send([_time_one(groups[contestant], *call) for call in calls])


def _time_one(group: Any, num_bytes: int, repetitions: int) -> tuple[float, float]:
    """Return the milliseconds of a call, and how many of them the processors of this process were busy."""
    data = torch.ones(num_bytes // 4)
    times, busy_s = [], 0.0
    for index in range(repetitions + (repetitions > 2)):  # the first is not counted where there are several
        dist.barrier(group)
        started_s, started_busy_s = time.perf_counter(), time.process_time()
        dist.all_reduce(data, group=group)
        if index or repetitions <= 2:
            times.append((time.perf_counter() - started_s) * 1e3)
            busy_s += time.process_time() - started_busy_s
        data.fill_(1.0)
    return statistics.median(times), busy_s / len(times) * 1e3


@contextlib.contextmanager
def _two_hosts(rate: float) -> Iterator[list[str]]:
    """Inside, there are two network namespaces with a cable of so many bits a second between them."""
    names = [f"cordee-bench-{os.getpid()}-{side}" for side in "ab"]
    try:
        for name in names:
            _call("ip", "netns", "add", name)
        ends = ("netns", names[0], "type", "veth", "peer", "name", _DEVICE, "netns", names[1])
        _call("ip", "link", "add", _DEVICE, *ends)
        for number, name in enumerate(names, start=1):
            _call("ip", "-n", name, "addr", "add", f"10.98.0.{number}/24", "dev", _DEVICE)
            _call("ip", "-n", name, "link", "set", _DEVICE, "up")
            _call("ip", "-n", name, "link", "set", "lo", "up")
            if rate:
                bucket = ("rate", f"{rate:.0f}bit", "burst", "64kb", "latency", "100ms")
                _call("tc", "-n", name, "qdisc", "add", "dev", _DEVICE, "root", "tbf", *bucket)
        yield names
    finally:
        for name in names:
            with contextlib.suppress(JobError):
                _call("ip", "netns", "delete", name)


def _call(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", "") or error
        raise JobError(f"two hosts cannot be made on this machine, which takes root and iproute2: {why}") from None


def _enter(name: str) -> None:
    """Move this process, which has no other thread yet, to a network namespace."""
    descriptor = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(descriptor)
