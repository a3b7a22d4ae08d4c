"""What is known of this machine: cores, memory, what sharing them costs, and how fast its workers talk."""

from __future__ import annotations

import bisect
import platform
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from cordee.version import __version__

LOOK_S = 0.3
BUSY_PERCENT = 20.0  # of all cores; an idle desktop stays below
FORM = 5  # of measurements in the cache; those of another form are made again
_UNLIMITED = 1 << 60  # what cgroups write where there is no limit


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """How long one kind of exchange takes among `num_processes`, by the bytes that each of them has."""

    kind: str  # all_reduce, all_gather, reduce_scatter, send; copy: each for itself, at the same time
    num_processes: int
    sizes: tuple[int, ...]  # bytes, growing
    seconds: tuple[float, ...]

    def at(self, num_bytes: float) -> float:
        """Return the seconds for `num_bytes`: on the line between two sizes, in proportion beyond the largest."""
        if num_bytes <= self.sizes[0]:
            return self.seconds[0]
        if num_bytes >= self.sizes[-1]:
            return self.seconds[-1] * num_bytes / self.sizes[-1]
        high = bisect.bisect_left(self.sizes, num_bytes)
        low = high - 1
        weight = (num_bytes - self.sizes[low]) / (self.sizes[high] - self.sizes[low])
        return self.seconds[low] + weight * (self.seconds[high] - self.seconds[low])


class Amount(NamedTuple):
    """What the overhead of a strategy grows with: see `Overhead`."""

    parts: float = 0
    tensors: float = 0
    num_bytes: float = 0


class Overhead(msgspec.Struct, frozen=True, kw_only=True):
    """What a strategy itself takes in a step, measured with a model that has next to nothing to compute."""

    strategy: str
    num_processes: int
    step_s: float = 0.0
    part_s: float = 0.0  # more for each micro-batch of pipeline, unit of sharded, sliced layer of tensor
    tensor_s: float = 0.0  # more for each tensor of parameters
    byte_s: float = 0.0  # more for each byte of parameters, beyond what the exchange of it takes by itself
    worker_bytes: int = 0  # a worker's own memory, with that model; 0 where it is not known


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements that do not depend on the model."""

    cores: int
    exchanges: tuple[Exchange, ...] = ()
    slowdowns: dict[int, float] = {}  # processes -> times longer for the same work, each having its share of the cores
    overheads: tuple[Overhead, ...] = ()
    was_busy: bool = False  # measured while it had other work as well
    process_bytes: int = 0  # a worker's own memory before it has a model
    bare_bytes: int = 0  # a worker's own memory when it computes next to nothing, and by no strategy

    def slowdown(self, num_processes: int) -> float:
        """Return how many times longer work takes in each of `num_processes` than in one that has all cores."""
        if num_processes == 1:
            return 1.0
        if num_processes in self.slowdowns:
            return self.slowdowns[num_processes]
        if not self.slowdowns:
            return float(num_processes)  # the cores are shared out evenly
        nearest = min(self.slowdowns, key=lambda known: abs(known - num_processes))
        return self.slowdowns[nearest] * num_processes / nearest

    def exchange(self, kind: str, num_processes: int) -> Exchange | None:
        """Return the measurement with the number of processes nearest to `num_processes`."""
        known = [exchange for exchange in self.exchanges if exchange.kind == kind]
        return min(known, key=lambda exchange: abs(exchange.num_processes - num_processes), default=None)

    def overhead_s(self, strategy: str, num_processes: int, amount: Amount) -> float:
        """Return what `strategy` adds to a step of `amount`; 0 where it was not measured."""
        nearest = self._overhead(strategy, num_processes)
        if nearest is None:
            return 0.0
        step_s = nearest.step_s + nearest.part_s * amount.parts
        return step_s + nearest.tensor_s * amount.tensors + nearest.byte_s * amount.num_bytes

    def knows_overhead(self, strategy: str) -> bool:
        return self._overhead(strategy, 1) is not None

    def worker_bytes(self, strategy: str, num_processes: int) -> int:
        """Return what a worker takes that trains this way but has next to no model."""
        nearest = self._overhead(strategy, num_processes)
        return nearest.worker_bytes or self.process_bytes if nearest else self.process_bytes

    def strategy_bytes(self, strategy: str, num_processes: int) -> int:
        """Return what a strategy itself takes of a worker's memory, beyond what any worker that computes takes.

        Less than nothing for `single`: a process that was not forked does not copy what it shared with its parent.
        """
        nearest = self._overhead(strategy, num_processes)
        return 0 if nearest is None or not nearest.worker_bytes else nearest.worker_bytes - self.bare_bytes

    def _overhead(self, strategy: str, num_processes: int) -> Overhead | None:
        known = [overhead for overhead in self.overheads if overhead.strategy == strategy]
        return min(known, key=lambda overhead: abs(overhead.num_processes - num_processes), default=None)

    def has_exchanges(self, num_processes: int) -> bool:
        return any(exchange.num_processes == num_processes for exchange in self.exchanges)


def describe_machine() -> str:
    """Return what makes measurements of this machine those of another: part of every key in the cache."""
    import torch  # here, so that simulating does without it

    from cordee.compute import usable_cores

    return f"form {FORM}; {_processor()}; {usable_cores()} cores; torch {torch.__version__}; cordee {__version__}"


def is_busy() -> bool:
    """Return whether other programs use this machine's cores at present. Takes a third of a second."""
    return float(psutil.cpu_percent(interval=LOOK_S)) > BUSY_PERCENT


def free_memory_bytes() -> int:
    """Return how much memory new processes may take: what the system has, or what a container's limit leaves."""
    free = int(psutil.virtual_memory().available)
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        most, taken = _number_in(Path(limit)), _number_in(Path(used))
        if most is not None and most < _UNLIMITED:
            free = min(free, max(0, most - (taken or 0)))
    return free


def _number_in(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
