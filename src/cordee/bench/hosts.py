"""Two hosts: all-reduce of float32, and training with `data_parallel`, plain and encrypted, beside gloo and DDP on it.

The hosts are two network namespaces of this machine with a virtual cable between them, at full speed and with a limit
of 100 Mbit/s: root and iproute2 are needed. One process on each host. At full speed the cable is as fast as the
processors that copy and encrypt; between real machines a network comes first. A figure of all-reduce is the median over
several calls of the time on rank 0; busy is the processor time of that process, which other programs hardly change. A
figure of training is the time of a step, over all steps of a round.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from cordee.bench.harness import (
    Clock,
    Contestant,
    Loop,
    Place,
    Processes,
    Report,
    compete,
    describe_machine,
    goal_outcome,
    interleave,
    measure_cases,
    median_ratio,
)
from cordee.bench.loops import cordee_loop, image_data, synthetic_images, torch_loop
from cordee.bench.two_hosts import enter_host, two_hosts
from cordee.communication.shared_memory import BackendSettings, register
from cordee.core.errors import JobError
from cordee.core.settings import Data

ROUNDS = 5
SIZES = (1 << 10, 1 << 18, 1 << 22, 1 << 26)
LIMITS = {"full": 0.0, "100mbit": 100e6}  # bits a second in each direction; 0 is no limit
CONTESTANTS = ("plain", "encrypted", "gloo")  # in training, gloo is DDP on it
BATCH_SIZE = 32  # per worker
TRAINING_GOAL = 1.0  # how many times as fast as DDP on gloo plain should train


class Training(NamedTuple):
    """A model that two workers train, and for how long."""

    model: str
    get_data: Callable[[], Data]
    num_steps: int  # of a round at full speed
    num_limited_steps: int  # of a round at 100 Mbit/s


TRAININGS = (
    Training("lenet", image_data, 200, 50),
    Training("resnet20", partial(synthetic_images, 3, 32, test_size=0), 6, 6),
    Training("mlp of 4 M", partial(synthetic_images, 1, 28, test_size=0), 20, 3),
)
_ALL_REDUCE, _STEP = "all-reduce", "training step"
_FIGURE_S = 1.0  # calls of one figure take about so long
_FULL_SPEED = 4e9  # bits a second, to choose the number of calls by
Raw = dict[str, list[float]]


def measure(
    *,
    rounds: int,
    say: Callable[[str], None],
    cases: Sequence[str] = (),
    earlier: Report | None = None,
    sizes: Sequence[int] = SIZES,
    trainings: Sequence[Training] = TRAININGS,
) -> Report:
    """Measure the cases that are named, or all; figures of other cases in `earlier` are kept.

    In the rows, ratios above 1 mean that the encrypted, or the plain, backend is that many times faster.
    """
    if rounds < 1:
        raise JobError(f"rounds is {rounds}: it must be at least 1")
    measures: dict[str, Callable[[], Raw]] = {}
    for limit in LIMITS:
        measures[f"{limit}/{_ALL_REDUCE}"] = partial(_measure_all_reduce, limit, sizes, rounds, say)
        for training in trainings:
            measures[f"{limit}/{training.model}"] = partial(_measure_training, limit, training, rounds, say)
    raw, dates = measure_cases(measures, cases, earlier, say)
    rows: list[dict[str, Any]] = []
    for case in measures:
        if case not in dates:
            continue
        if case.endswith(_ALL_REDUCE):
            rows += [_row(raw, case, _bytes_of(size), None) for size in sizes]
        else:
            rows.append(_row(raw, case, _STEP, TRAINING_GOAL))
    settings = {
        "sizes": list(sizes),
        "models": [training.model for training in trainings],
        "batch_size_per_worker": BATCH_SIZE,
        "threads_per_worker": 1,
        "measured": dates,
    }
    return Report("hosts", describe_machine(), settings, raw, "ms", rows)


def _measure_all_reduce(limit: str, sizes: Sequence[int], rounds: int, say: Callable[[str], None]) -> Raw:
    raw: Raw = {}
    calls = [(size, _repetitions(size, LIMITS[limit] or _FULL_SPEED)) for size in sizes]
    with two_hosts(LIMITS[limit]) as names, contextlib.closing(Processes(partial(_serve, names), 2)) as group:
        contestants = {name: partial(_ask, group, name, calls) for name in CONTESTANTS}
        for name, figures in interleave(contestants, rounds, say).items():
            for size, times in zip(sizes, zip(*figures, strict=True), strict=True):
                raw[f"{name}, {_bytes_of(size)}"] = [elapsed_ms for elapsed_ms, _ in times]
                raw[f"{name}, processor, {_bytes_of(size)}"] = [busy_ms for _, busy_ms in times]
    return raw


def _measure_training(limit: str, training: Training, rounds: int, say: Callable[[str], None]) -> Raw:
    work: dict[str, Any] = {"model": training.model, "data": training.get_data(), "batch_size": BATCH_SIZE}
    loops: dict[str, Loop] = {
        "plain": partial(cordee_loop, **work, encrypt=False),
        "encrypted": partial(cordee_loop, **work, encrypt=True),
        "gloo": partial(torch_loop, **work),
    }
    num_steps = training.num_limited_steps if LIMITS[limit] else training.num_steps
    with two_hosts(LIMITS[limit]) as names:
        contestants = {
            name: Contestant(partial(_train, names=names, loop=loops[name]), 2, num_steps, BATCH_SIZE)
            for name in CONTESTANTS
        }
        speeds, _ = compete(contestants, rounds, say)
    return {f"{name}, {_STEP}": [2 * BATCH_SIZE / speed * 1e3 for speed in found] for name, found in speeds.items()}


def _train(place: Place, clock: Clock, *, names: Sequence[str], loop: Loop) -> None:
    """Run a loop as the process of one host."""
    enter_host(names[place.rank])
    loop(place, clock)


def _ask(group: Processes, name: str, calls: Sequence[tuple[int, int]]) -> list[tuple[float, float]]:
    times: list[tuple[float, float]] = group.ask((name, calls))[0]
    return times


def _repetitions(num_bytes: int, rate: float) -> int:
    return max(1, min(200, round(_FIGURE_S / (0.0005 + 8 * num_bytes / rate))))


def _bytes_of(num_bytes: int) -> str:
    return f"{num_bytes} bytes"


def _row(raw: Raw, case: str, work: str, goal: float | None) -> dict[str, Any]:
    plain, encrypted, gloo = (raw[f"{case}: {name}, {work}"] for name in CONTESTANTS)
    busy = {}
    for name in CONTESTANTS:
        found = raw.get(f"{case}: {name}, processor, {work}")
        busy[f"{name}_busy_ms"] = statistics.median(found) if found else None
    plain_times_gloo = median_ratio(gloo, plain)
    return {
        "case": case,
        "work": work,
        "plain_ms": statistics.median(plain),
        "encrypted_ms": statistics.median(encrypted),
        "gloo_ms": statistics.median(gloo),
        "plain_times_gloo": plain_times_gloo,
        "encrypted_times_gloo": median_ratio(gloo, encrypted),
        "encrypted_times_plain": median_ratio(plain, encrypted),
        **busy,
        "goal": goal,
        "outcome": "" if goal is None else goal_outcome(plain_times_gloo >= goal),
    }


def _serve(names: Sequence[str], place: Place, pipe: Connection) -> None:
    """Be a process of one host with a group for each contestant, asleep unless asked to measure."""
    enter_host(names[place.rank])
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
