"""What is known of a model on this machine: per block its size, its memory, and how long it takes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


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

    def step(self, samples: float, num_processes: int = 1) -> Timing:
        """Return how long a step over `samples` takes, on the line through the two nearest measurements."""
        known = sorted(
            (timing for timing in self.timings if timing.num_processes == num_processes), key=lambda t: t.samples
        )
        assert known, f"nothing was measured with {num_processes} processes"
        if len(known) == 1:
            return _scaled(known[0], samples)
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


def _scaled(timing: Timing, samples: float) -> Timing:
    ratio = samples / timing.samples
    return msgspec.structs.replace(
        timing,
        samples=round(samples),
        forward_s=tuple(seconds * ratio for seconds in timing.forward_s),
        backward_s=tuple(seconds * ratio for seconds in timing.backward_s),
        other_s=timing.other_s * ratio,
    )


def slowed(timing: Timing, factor: float) -> Timing:
    """Return the same step where everything takes `factor` times as long."""
    return msgspec.structs.replace(
        timing,
        forward_s=tuple(seconds * factor for seconds in timing.forward_s),
        backward_s=tuple(seconds * factor for seconds in timing.backward_s),
        optimizer_s=timing.optimizer_s * factor,
        other_s=timing.other_s * factor,
    )
