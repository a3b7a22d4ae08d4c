"""What samples are held in: a `Source` gives any samples of one split as a batch, `Splits` are a data set."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from cordee.core import tree
from cordee.core.batch import Batch
from cordee.core.errors import DataError
from cordee.core.tree import Nested


@runtime_checkable
class Source(Protocol):
    """One split of a data set."""

    num_samples: int | None  # None: read in the order of an IterableDataset, its length unknown
    input_shape: Any  # of one sample: numbers, or nested as the inputs are

    def gather(self, indices: Tensor) -> Batch:
        """Return the samples with these int64 indices, ready for a model, as one batch."""
        ...


@dataclasses.dataclass(frozen=True)
class Splits:
    """A data set: what to train on, what to test on, and what a model has to know of it."""

    train: Source
    test: Source | None  # None: there is no test set
    input_shape: Any
    num_classes: int | None  # None: regression
    name: str
    warnings: tuple[str, ...] = ()  # what the user should know of it
    class_names: tuple[str, ...] | None = None  # in the order of the classes, where they have names


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

    def __init__(self, inputs: Nested, targets: Nested, scale: Scale | None = None) -> None:
        self._held = Batch(inputs, targets).map(Tensor.contiguous)
        self.inputs, self.targets = self._held
        assert all(len(leaf) == self._held.num_samples for leaf in self._held.leaves())
        self.num_samples: int | None = self._held.num_samples
        self.input_shape = tree.shapes(inputs)
        has_bytes = isinstance(inputs, Tensor) and inputs.dtype == torch.uint8
        self.scale = Scale.to_unit_range() if scale is None and has_bytes else scale

    def rows(self, indices: Tensor) -> Batch:
        """Return samples as they are held; `finish` makes their inputs ready. Augmentation goes between."""
        return self._held.map(lambda tensor: tensor.index_select(0, indices))

    def finish(self, raw: Nested) -> Nested:
        return raw if self.scale is None else self.scale.apply(raw)

    def gather(self, indices: Tensor) -> Batch:
        raw = self.rows(indices)
        return Batch(self.finish(raw.inputs), raw.targets)

    def take(self, indices: Tensor) -> ArraySource:
        """Return the source of these samples only."""
        return ArraySource(*self.rows(indices), self.scale)

    def first(self, num_samples: int) -> ArraySource:
        return ArraySource(*self._held.rows(0, num_samples), self.scale)


# Whether two hosts have the same data: a short text of it that costs a few samples to make.

NUM_LOOKED_AT = 16  # samples of each set, spread over it


def fingerprint(splits: Splits, *, reads_samples: bool = True) -> str:
    """Return how many samples there are and a hash of some of them, in words; without `reads_samples` how many.

    A source that has a `digest` of all its files, and not "", says it instead. Samples that are read differently each
    time (a data set's own augmentation), and data that grows or has no length, are not compared.
    """
    parts = [f"train: {_describe(splits.train, reads_samples)}"]
    if splits.test is not None:
        parts.append(f"test: {_describe(splits.test, reads_samples)}")
    return ", ".join(parts)


def check_same(expected: str, splits: Splits) -> None:
    """Raise DataError if this worker's data are not those of the run."""
    found = fingerprint(splits)
    if found != expected:
        raise DataError(
            f"the data of this worker are not those of the run: here they are {found}; there {expected}. On another "
            "host: copy the run's data there, and say where they are with --data-root. On the same: what makes the "
            "data must give the same each time"
        )


def compare_with_start(before: str, now: str) -> str:
    """Return what to warn of where a run continues with other data than it began with; nothing where they are the same.

    Both are fingerprints. Raises DataError for another number of training samples: every place in the order is of
    another sample then.
    """
    if before == now:
        return ""
    found = f"the data are not those that the run began with: there were {before}; now there are {now}"
    if before.partition(" samples")[0] != now.partition(" samples")[0]:
        raise DataError(f"{found}. Put the former data back to resume, or start a new run")
    return f"{found}. Training continues with what is there now"


def _describe(source: Source, reads_samples: bool) -> str:
    count = source.num_samples
    if count is None:
        return "samples that are not counted"
    digest = getattr(source, "digest", str)()
    if digest or not reads_samples:
        return f"{count} samples" + (f" ({digest})" if digest else "")
    positions = torch.linspace(0, count - 1, min(count, NUM_LOOKED_AT), dtype=torch.float64).round().long()
    try:
        first, second = _hash(source.gather(positions)), _hash(source.gather(positions))
    except DataError:  # a sample that cannot be read is an error where it is trained on
        return f"{count} samples"
    return f"{count} samples" + (f" ({first})" if first == second else "")


def _hash(batch: Batch) -> str:
    digest = hashlib.sha256()
    for tensor in batch.leaves():
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


# Arrays of the user's as a source: which types they become, and what is wrong with them.


def source_of_arrays(inputs: Any, targets: Any, what: str) -> ArraySource:
    """Return the source of a pair (inputs, targets), samples first.

    Anything `numpy.asarray` takes will do. Inputs of bytes stay bytes and are given to the model as numbers
    from 0 to 1; other whole numbers stay whole (tokens); the rest becomes float32. Targets of whole numbers
    are classes, int64, and one column of them is flattened; other targets are float32, for regression.
    `what` names the split in the DataError that everything else is answered with.
    """
    x = _tensor(inputs, f"the inputs of {what}")
    y = ready_targets(_tensor(targets, f"the targets of {what}"))
    if x.dim() == 0 or y.dim() == 0:
        raise DataError(f"the {'inputs' if x.dim() == 0 else 'targets'} of {what} are a single number, not an array")
    if len(x) != len(y):
        raise DataError(f"{what} has {len(x)} inputs but {len(y)} targets: each input needs one target")
    if len(x) == 0:
        raise DataError(f"{what} has no samples")
    if x.dim() == 1:
        raise DataError(
            f"the inputs of {what} have the shape {tuple(x.shape)}, one number per sample: "
            "give them a feature dimension, x.reshape(-1, 1)"
        )
    x = x if x.dtype == torch.uint8 else ready_inputs(x)
    for part, values in (("input", x), ("target", y)):
        check_finite(values, f"{part} of {what}")
    return ArraySource(x, y)


def source_of_trees(inputs: Any, targets: Any, what: str) -> ArraySource:
    """Return the source of nested arrays, all of them with the samples first. Lists are arrays, bytes whole numbers."""
    named: list[tuple[str, Tensor]] = []

    def convert(values: Any, part: str, path: str) -> Nested:
        if values is None:
            return None
        if isinstance(values, Mapping):
            return {key: convert(value, part, f"{path}.{key}" if path else str(key)) for key, value in values.items()}
        if isinstance(values, tuple):
            return tuple(convert(one, part, f"{path}.{i}" if path else str(i)) for i, one in enumerate(values))
        name = f"the {part} {path!r} of {what}" if path else f"the {part} of {what}"
        array = _tensor(values, name)
        if array.dim() == 0:
            raise DataError(f"{name} are a single number, not an array")
        check_finite(array, name)
        named.append((name, array))
        return array

    x = convert(inputs, "inputs", "")
    if not named:
        raise DataError(f"{what} has no inputs")
    y = convert(targets, "targets", "")
    first, size = named[0][0], len(named[0][1])
    for name, array in named:
        if len(array) != size:
            raise DataError(
                f"{name} have {len(array)} rows, and {first} have {size}: each sample needs a row in each of them"
            )
    if size == 0:
        raise DataError(f"{what} has no samples")
    return ArraySource(ready_inputs(x), ready_targets(y))


def ready_inputs(inputs: Nested) -> Nested:
    """Return inputs in the type a model takes: bytes as 0 to 1, tokens as int64, the rest as float32.

    Where they are nested, bytes are whole numbers, for they may be masks, and truth values stay such.
    """
    if not isinstance(inputs, Tensor):
        return tree.map_leaves(_ready_leaf, inputs)
    if inputs.dtype == torch.uint8:
        return inputs.to(torch.float32).mul_(1 / 255)
    return inputs.to(torch.int64 if _is_whole(inputs.dtype) else torch.float32)


def _ready_leaf(values: Tensor) -> Tensor:
    if values.dtype == torch.bool:
        return values
    return values.to(torch.int64 if _is_whole(values.dtype) else torch.float32)


def ready_targets(targets: Nested) -> Nested:
    """Return targets in the type a loss takes: classes as int64, without a column of its own, else float32."""
    if not isinstance(targets, Tensor):
        return tree.map_leaves(_ready_leaf, targets)
    if not (_is_whole(targets.dtype) or targets.dtype == torch.bool):
        return targets.to(torch.float32)
    if targets.dim() == 2 and targets.shape[1] == 1:
        targets = targets.squeeze(1)
    return targets.to(torch.int64)


def check_finite(values: Tensor, what: str) -> None:
    """Raise DataError, with the first sample it concerns, if a value is infinite or not a number."""
    if not values.is_floating_point() or bool(torch.isfinite(values).all()):
        return
    first = int((~torch.isfinite(values)).reshape(len(values), -1).any(1).nonzero()[0, 0])
    raise DataError(f"{what}: sample {first} has a value that is infinite or not a number; remove or fix such samples")


def check_classes(
    targets: Tensor,
    num_classes: int,
    what: str,
    samples: Sequence[int] | None = None,
    ignored: int | None = None,
) -> None:
    """Raise DataError, with the first position and value it concerns, for a class not in [0, num_classes).

    `samples` are the positions to name where rows of `targets` are not the positions themselves; `ignored` is a label
    that the loss does not count, which is no class.
    """
    if targets.numel() == 0:
        return
    lowest, highest = (int(bound) for bound in torch.aminmax(targets))
    if lowest >= 0 and highest < num_classes:
        return
    rows = targets.reshape(len(targets), -1)
    is_wrong = (rows < 0) | (rows >= num_classes)
    if ignored is not None:
        is_wrong &= rows != ignored
        if not is_wrong.any():
            return
    position, column = (int(index) for index in is_wrong.nonzero()[0])
    value, name = int(rows[position, column]), position if samples is None else samples[position]
    raise DataError(
        f"{what}: the label at position {name} is {value}, "
        f"but labels must be from 0 to {num_classes - 1} ({num_classes} classes)"
    )


def without_ignored(targets: Tensor, ignored: int | None) -> Tensor:
    """Return the labels that the loss counts, in one row where some are left out."""
    return targets if ignored is None else targets[targets != ignored]


def count_classes(targets: Tensor, what: str, ignored: int | None = None) -> int:
    """Return one more than the largest label, and at least 1; DataError for a negative one.

    The ignored label is no class: it may be -100 or 255.
    """
    counted = without_ignored(targets, ignored)
    num_classes = max(int(counted.max()), 0) + 1 if counted.numel() else 1
    check_classes(targets, num_classes, what, ignored=ignored)
    return num_classes


def find_missing(targets: Tensor, num_classes: int, names: Sequence[Any] | None = None) -> str | None:
    """Return which classes no sample has, in words; None if there are none, or if samples have several labels."""
    if targets.dim() != 1:  # of the words of a vocabulary some are always missing
        return None
    # Not counted class by class: of labels that are identities the highest may be a billion.
    present = set(np.unique(targets[(targets >= 0) & (targets < num_classes)].numpy()).tolist())
    missing = list(itertools.islice((label for label in range(num_classes) if label not in present), _NUM_NAMED + 1))
    if not missing:
        return None
    shown = [f"{one} ({str(names[one])!r})" if names is not None and one < len(names) else str(one) for one in missing]
    return ", ".join(shown[:_NUM_NAMED]) + (", …" if len(shown) > _NUM_NAMED else "")


_NUM_NAMED = 8  # classes that a message lists


def _tensor(values: Any, what: str) -> Tensor:
    if isinstance(values, Tensor):
        tensor = values.detach().cpu()
        if tensor.is_sparse or tensor.is_complex() or tensor.is_quantized:
            raise DataError(f"{what} are a tensor of the kind {tensor.layout}, {tensor.dtype}; give a plain one")
        return tensor if tensor.dtype in _HELD else tensor.to(torch.int64 if _is_whole(tensor.dtype) else torch.float32)
    try:
        array = np.asarray(values)
    except Exception as error:
        raise DataError(f"{what} cannot be read as an array: {error}") from error
    if array.dtype.kind not in "biuf":
        raise DataError(
            f"{what} have the type {array.dtype}, which is not numbers; rows of one length, of numbers, please"
        )
    if array.dtype.kind in "iu" and array.dtype != np.uint8:
        array = array.astype(np.int64)
    elif array.dtype.kind == "f":
        array = array.astype(np.float32)
    # A copy where torch could not share the memory: read-only, reversed, or not in this machine's byte order.
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


_HELD = (torch.uint8, torch.int64, torch.float32, torch.bool)


def _is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
