"""Profiles and hardware made up for tests: round numbers whose sums can be done in the head."""

from __future__ import annotations

from cordee.planner.hardware import DescribedCluster, Device, Link, ThisMachine
from cordee.planner.measurements import Block, Exchange, Machine, ModelProfile, Timing
from cordee.planner.prediction import Work

MB = 1_000_000


def profile(
    num_blocks: int = 4,
    *,
    block_s: float = 0.010,
    block_bytes: int = 10 * MB,
    samples: int = 64,
    splittable: float = 0.0,
) -> ModelProfile:
    """Blocks of 10 MB and, for 64 samples, 10 ms: a third forward, two thirds backward."""
    block_s, block_bytes, samples = 0.010, 10 * MB, 64
    block = Block(
        name="b",
        parameters=block_bytes // 4,
        parameter_bytes=block_bytes,
        activation_bytes=1000.0,
        output_bytes=100.0,
        splittable=splittable,
        sliceable=2 if splittable else 0,
    )
    timings = tuple(
        Timing(
            num_processes=1,
            num_threads=1,
            samples=count,
            forward_s=(block_s / 3 * count / samples,) * num_blocks,
            backward_s=(block_s * 2 / 3 * count / samples,) * num_blocks,
            optimizer_s=0.001,
            other_s=0.0,
        )
        for count in (samples // 4, samples)
    )
    return ModelProfile(
        blocks=(block,) * num_blocks,
        timings=timings,
        optimizer_state_bytes=2 * num_blocks * block_bytes,
        buffer_bytes=0,
        input_bytes=10.0,
        is_chain=True,
    )


def here(num_workers: int, *, free_bytes: float = 1e12, slowdown: float = 1.0, rate: float = 1e9) -> ThisMachine:
    """A machine that exchanges `rate` bytes a second, whatever the kind."""
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "send", "copy")
    sizes = (1000, 10_000_000)
    exchanges = tuple(
        Exchange(kind=kind, num_processes=num_workers, sizes=sizes, seconds=tuple(size / rate for size in sizes))
        for kind in kinds
    )
    machine = Machine(cores=num_workers, exchanges=exchanges, slowdowns={num_workers: slowdown})
    return ThisMachine(machine, num_workers, free_bytes)


def cluster(
    num_hosts: int,
    per_host: int = 1,
    *,
    rate: float = 1e9,
    latency_s: float = 0.0,
    memory_bytes: float = 1e12,
    speeds: tuple[float, ...] | None = None,
) -> DescribedCluster:
    names = [f"host-{index}" for index in range(num_hosts)]
    places = [name for name in names for _ in range(per_host)]
    factors = speeds or (1.0,) * len(places)
    devices = [Device(name, "gpu", speed, memory_bytes) for name, speed in zip(places, factors, strict=True)]
    networks = dict.fromkeys(names, Link(latency_s, rate))
    return DescribedCluster(devices, Link(0.0, 100 * rate), networks, overlaps=False)


def work(
    profile: ModelProfile, hardware: ThisMachine | DescribedCluster, batch_size: int = 64, accumulate: int = 1
) -> Work:
    return Work(profile, batch_size, hardware, accumulate)
