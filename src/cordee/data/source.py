"""What samples are held in: a `Source` gives any samples of one split as a batch, `Splits` are a data set."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from cordee.core.batch import Batch
from cordee.core.errors import DataError


@runtime_checkable
class Source(Protocol):
    """One split of a data set."""

    num_samples: int | None  # None: read in the order of an IterableDataset, its length unknown
    input_shape: tuple[int, ...]  # of one sample

    def gather(self, indices: Tensor) -> Batch:
        """Return the samples with these int64 indices, ready for a model, as one batch."""
        ...


@dataclasses.dataclass(frozen=True)
class Splits:
    """A data set: what to train on, what to test on, and what a model has to know of it."""

    train: Source
    test: Source | None  # None: there is no test set
    input_shape: tuple[int, ...]
    num_classes: int | None  # None: regression
    name: str
    warnings: tuple[str, ...] = ()  # what the user should know of it


@dataclasses.dataclass(frozen=True)
class Scale:
    """How bytes become model inputs: (value - shift) * factor, per channel (the first dimension of a sample).

    Subtraction and multiplication are two kernels on purpose. Each rounds exactly, so a value does not
    depend on where in a tensor it stands; a fused multiply-add is used for whole vectors and not for tails.
    """

    shift: tuple[float, ...]
    factor: tuple[float, ...]

    @classmethod
    def to_unit_range(cls) -> Scale:
        return cls((0.0,), (1 / 255,))

    @classmethod
    def standardizing(cls, mean: tuple[float, ...], deviation: tuple[float, ...]) -> Scale:
        """Return the scale for bytes whose values divided by 255 have this mean and deviation."""
        return cls(tuple(255 * m for m in mean), tuple(1 / (255 * d) for d in deviation))

    def apply(self, raw: Tensor) -> Tensor:
        scaled = raw.to(torch.float32)
        if len(self.shift) == 1:
            shift, factor = self.shift[0], self.factor[0]
            return scaled.mul_(factor) if shift == 0.0 else scaled.sub_(shift).mul_(factor)
        per_channel = (-1, *(1,) * (raw.dim() - 2))
        return scaled.sub_(torch.tensor(self.shift).view(per_channel)).mul_(torch.tensor(self.factor).view(per_channel))


class ArraySource:
    """A split in memory. Bytes stay bytes, a quarter of the memory, and are scaled batch by batch."""

    def __init__(self, inputs: Tensor, targets: Tensor, scale: Scale | None = None) -> None:
        assert len(inputs) == len(targets)
        self.num_samples: int | None = len(inputs)
        self.input_shape = tuple(inputs.shape[1:])
        self.inputs = inputs.contiguous()
        self.targets = targets.contiguous()
        self.scale = Scale.to_unit_range() if scale is None and inputs.dtype == torch.uint8 else scale

    def rows(self, indices: Tensor) -> Batch:
        """Return samples as they are held; `finish` makes their inputs ready. Augmentation goes between."""
        return Batch(self.inputs.index_select(0, indices), self.targets.index_select(0, indices))

    def finish(self, raw: Tensor) -> Tensor:
        return raw if self.scale is None else self.scale.apply(raw)

    def gather(self, indices: Tensor) -> Batch:
        raw = self.rows(indices)
        return Batch(self.finish(raw.inputs), raw.targets)

    def take(self, indices: Tensor) -> ArraySource:
        """Return the source of these samples only."""
        return ArraySource(self.inputs.index_select(0, indices), self.targets.index_select(0, indices), self.scale)

    def first(self, num_samples: int) -> ArraySource:
        return ArraySource(self.inputs[:num_samples], self.targets[:num_samples], self.scale)


# Whether two hosts have the same data: a short text of it that costs a few samples to make.

NUM_LOOKED_AT = 16  # samples of each set, spread over it


def fingerprint(splits: Splits) -> str:
    """Return how many samples there are and a hash of some of them, in words.

    Samples that are read differently each time (a data set's own augmentation), and data that grows or has no length,
    are not compared.
    """
    parts = [f"train: {_describe(splits.train)}"]
    if splits.test is not None:
        parts.append(f"test: {_describe(splits.test)}")
    return ", ".join(parts)


def check_same(expected: str, splits: Splits) -> None:
    """Raise DataError if this host's data are not those of the run."""
    found = fingerprint(splits)
    if found != expected:
        raise DataError(
            f"the data of this host are not those of the run: here they are {found}; there {expected}. Copy the run's "
            "data here, and say where they are with --data-root"
        )


def _describe(source: Source) -> str:
    count = source.num_samples
    if count is None:
        return "samples that are not counted"
    positions = torch.linspace(0, count - 1, min(count, NUM_LOOKED_AT), dtype=torch.float64).round().long()
    first, second = _hash(source.gather(positions)), _hash(source.gather(positions))
    return f"{count} samples" + (f" ({first})" if first == second else "")


def _hash(batch: Batch) -> str:
    digest = hashlib.sha256()
    for tensor in (batch.inputs, batch.targets):
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]
