"""What is known of this machine: cores, memory, what sharing them costs, and how fast its workers talk."""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import logging
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import psutil

from cordee.core.env import cache_folder
from cordee.core.errors import StorageError
from cordee.monitoring.files import write_atomically
from cordee.version import __version__

LOOK_S = 0.3
BUSY_PERCENT = 20.0  # of all cores; an idle desktop stays below
FORM = 5  # of measurements in the cache; those of another form are made again


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

    return f"form {FORM}; {processor_name()}; {usable_cores()} cores; torch {torch.__version__}; cordee {__version__}"


def is_busy() -> bool:
    """Return whether other programs use this machine's cores at present. Takes a third of a second."""
    return float(psutil.cpu_percent(interval=LOOK_S)) > BUSY_PERCENT


def free_memory_bytes() -> int:
    """Return how much memory new processes may take: what the system has, or what a container's limit leaves."""
    free, limit = int(psutil.virtual_memory().available), memory_limit()
    return free if limit is None else min(free, limit[0])


def memory_limit(control_groups: Path = Path("/sys/fs/cgroup")) -> tuple[int, int] | None:
    """Return what is left of, and the whole of, the memory that this process's container may use, if limited."""
    for limit_file, used_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit, used = (int((control_groups / name).read_text()) for name in (limit_file, used_file))
        except (OSError, ValueError):  # not there, or "max"
            continue
        return max(0, limit - used), limit
    return None


def processor_name() -> str:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a model that cannot be cut further."""

    name: str
    parameters: int
    parameter_bytes: int
    tensors: int = 0  # that the parameters are in
    activation_bytes: float  # per sample, kept from the forward to the backward pass
    output_bytes: float  # per sample, handed to the next block
    splittable: float = 0.0  # share of the parameters in layers that `tensor` can slice
    sliceable: int = 0  # how many such layers


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """One step, measured while `num_processes` processes of this machine took one each at the same time."""

    num_processes: int
    num_threads: int  # of each of them
    samples: int  # of each of them
    forward_s: tuple[float, ...]  # block by block
    backward_s: tuple[float, ...]
    optimizer_s: float
    other_s: float  # the batch, the loss, the loop

    @property
    def step_s(self) -> float:
        return sum(self.forward_s) + sum(self.backward_s) + self.optimizer_s + self.other_s

    @property
    def pass_s(self) -> float:
        """Forward and backward."""
        return sum(self.forward_s) + sum(self.backward_s)

    def at_least(self, other: Timing) -> Timing:
        """Return the longer of both, block by block; what is not in blocks stays."""
        return msgspec.structs.replace(
            self,
            forward_s=tuple(map(max, self.forward_s, other.forward_s)),
            backward_s=tuple(map(max, self.backward_s, other.backward_s)),
        )

    def times(self, factor: float, *, optimizer: float = 1.0) -> Timing:
        """Return the step where all but the optimizer takes `factor` times as long, and that `optimizer` times."""
        return msgspec.structs.replace(
            self,
            forward_s=tuple(seconds * factor for seconds in self.forward_s),
            backward_s=tuple(seconds * factor for seconds in self.backward_s),
            optimizer_s=self.optimizer_s * optimizer,
            other_s=self.other_s * factor,
        )


class ModelProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A model in a job: blocks in the order they are computed, and timings of one or more kinds."""

    blocks: tuple[Block, ...]
    timings: tuple[Timing, ...]
    optimizer_state_bytes: int  # of all parameters
    buffer_bytes: int
    input_bytes: float  # per sample
    is_chain: bool  # blocks follow each other: the model can be cut between any two of them
    precision: str = "fp32"
    pass_bytes: float = 0.0  # per sample, of a forward and backward pass at its peak; 0 where it was not measured
    fixed_bytes: float = 0.0  # of a pass, whatever the samples: kernels' work space, libraries loaded on first use
    is_fixed_whole: bool = False  # `fixed_bytes` is all that a new process took beside model and activations
    was_busy: bool = False  # measured while the machine had other work as well

    @property
    def num_parameters(self) -> int:
        return sum(block.parameters for block in self.blocks)

    @property
    def parameter_bytes(self) -> int:
        return sum(block.parameter_bytes for block in self.blocks)

    @property
    def num_tensors(self) -> int:
        return sum(block.tensors for block in self.blocks)

    @property
    def activation_bytes(self) -> float:
        """Per sample, of all blocks."""
        return sum(block.activation_bytes for block in self.blocks)

    @property
    def peak_bytes(self) -> float:
        """Per sample, of a pass at its worst: as measured, or all activations, and two gradients of the largest."""
        largest = max((block.output_bytes for block in self.blocks), default=0.0)
        return max(self.pass_bytes, self.activation_bytes + 2 * largest)

    def has_timings(self, num_processes: int) -> bool:
        return any(timing.num_processes == num_processes for timing in self.timings)

    def most_samples(self, num_processes: int) -> int:
        """Return the samples of the largest step that so many processes took at the same time."""
        return max(timing.samples for timing in self.timings if timing.num_processes == num_processes)

    def step(self, samples: float, num_processes: int = 1) -> Timing:
        """Return how long a step over `samples` takes, on the line through the two nearest measurements."""
        known = sorted(
            (timing for timing in self.timings if timing.num_processes == num_processes), key=lambda t: t.samples
        )
        assert known, f"nothing was measured with {num_processes} processes"
        if len(known) == 1:
            return msgspec.structs.replace(known[0].times(samples / known[0].samples), samples=round(samples))
        above = next((i for i, timing in enumerate(known) if timing.samples >= samples), len(known) - 1)
        low, high = known[max(above - 1, 0)], known[max(above, 1)]
        weight = (samples - low.samples) / (high.samples - low.samples)
        return msgspec.structs.replace(
            low,
            samples=round(samples),
            forward_s=_between(low.forward_s, high.forward_s, weight, samples / low.samples),
            backward_s=_between(low.backward_s, high.backward_s, weight, samples / low.samples),
            optimizer_s=(low.optimizer_s + high.optimizer_s) / 2,  # does not depend on the samples
            other_s=_between((low.other_s,), (high.other_s,), weight, samples / low.samples)[0],
        )


def _between(low: Sequence[float], high: Sequence[float], weight: float, ratio: float) -> tuple[float, ...]:
    # Below the smallest batch the line may cross zero; a share of the smallest is then the better guess.
    return tuple(max(a + (b - a) * weight, a * min(ratio, 1.0) * 0.5) for a, b in zip(low, high, strict=True))


log = logging.getLogger("cordee.planner")
Kept = TypeVar("Kept", bound=msgspec.Struct)


def key_of(*parts: str) -> str:
    """Return a short name for what `parts` describe."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def read_kept(kind: str, key: str, into: type[Kept]) -> Kept | None:
    """Return what was kept under `key`; None if there is nothing, or nothing that this version understands."""
    try:
        return msgspec.json.decode(_path(kind, key).read_bytes(), type=into)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def keep(kind: str, key: str, value: msgspec.Struct) -> None:
    """Keep `value`. A cache that cannot be written costs time, not the run: it is logged."""
    path = _path(kind, key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, msgspec.json.format(msgspec.json.encode(value), indent=1))
    except (OSError, StorageError) as error:
        log.warning("the measurement is not kept: %s", error)


def _path(kind: str, key: str) -> Path:
    return cache_folder() / kind / f"{key}.json"
