"""Sources over a user's torch `Dataset` or `IterableDataset`: samples are read one by one and stacked."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset as TorchSubset
from torch.utils.data import default_collate

from cordee.core.batch import Batch
from cordee.core.errors import CordeeError, DataError
from cordee.data.blocks import Blocks
from cordee.data.order import hash_positions, preserved_generators, seed_generators
from cordee.data.source import check_classes, ready_inputs, ready_targets


class DatasetSource:
    """A map-style Dataset: `len(dataset)` and `dataset[i]`, which gives a pair (input, target).

    Each sample is read with Python's, NumPy's and torch's generators seeded from its position in the epoch,
    so random transforms are the same in any batch, on any shard and after a resume. A dataset that has
    `__getitems__` is asked for all samples of a batch at once and seeded by the first of them. A dataset that
    keeps a generator of its own is not under this control.
    """

    def __init__(self, dataset: Any, what: str, kept: Tensor | None = None) -> None:
        """`what` names the split in errors; `kept` are the samples to use, None for all. Reads one sample."""
        self.dataset = dataset
        self.what = what
        self.num_classes: int | None = None  # once known, every label read is checked against it
        self.ignored: int | None = None  # a label that the loss does not count
        self._kept = kept
        length = len(dataset) if kept is None else len(kept)
        self.num_samples: int | None = length
        if length == 0:
            raise DataError(f"{what} has no samples")
        self.example = self.read(torch.tensor([0]), torch.tensor([0]), seed=0)
        self.input_shape = checked_input_shape(self.example.inputs, what)

    def gather(self, indices: Tensor) -> Batch:
        return self.read(indices, indices, seed=0)

    @property
    def blocks(self) -> Blocks[Any] | None:
        """The blocks that the samples are read from, where the dataset has such."""
        blocks = getattr(self.dataset, "blocks", None)
        return blocks if isinstance(blocks, Blocks) and self._kept is None else None

    def take(self, indices: Tensor) -> DatasetSource:
        kept = indices if self._kept is None else self._kept.index_select(0, indices)
        return self._over(self.dataset, kept)

    def first(self, num_samples: int) -> DatasetSource:
        if self.blocks is not None:
            return self._over(self.dataset.first(num_samples))
        return self.take(torch.arange(min(num_samples, self.num_samples or 0)))

    def split_rows(self, fraction: float, seed: int) -> tuple[DatasetSource, DatasetSource]:
        """Return a part of the rows without a drawn share, and this share. For samples that lie in blocks."""
        rest, aside = self.dataset.split_rows(fraction, seed)
        return self._over(rest), self._over(aside)

    def _over(self, dataset: Any, kept: Tensor | None = None) -> DatasetSource:
        part = DatasetSource(dataset, self.what, kept)
        part.num_classes, part.ignored = self.num_classes, self.ignored
        return part

    def read(self, indices: Tensor, positions: Tensor, seed: int) -> Batch:
        """Return the samples with these indices, random transforms drawn from (seed, position)."""
        if len(indices) == 0:
            return Batch(self.example.inputs[:0], self.example.targets[:0])
        samples = self.numbers(indices)
        seeds = hash_positions(positions, seed).tolist()
        with preserved_generators():
            pairs = self._read_at_once(samples, seeds[0]) if self.reads_at_once else self._read(samples, seeds)
        return stacked(pairs, samples, self.what, self.num_classes, self.ignored)

    def numbers(self, indices: Tensor) -> list[int]:
        """Return the indices in the user's dataset."""
        numbers: list[int] = (indices if self._kept is None else self._kept.index_select(0, indices)).tolist()
        return numbers

    @property
    def reads_at_once(self) -> bool:
        """Whether samples that are read together are drawn from one seed: reading them apart gives others."""
        # torch's Subset has `__getitems__` too, but over a plain dataset it only reads one by one.
        return hasattr(self.dataset, "__getitems__") and not isinstance(self.dataset, TorchSubset)

    def _read(self, samples: Sequence[int], seeds: Sequence[int]) -> list[tuple[Any, Any]]:
        pairs = []
        for sample, seed in zip(samples, seeds, strict=True):
            seed_generators(seed)
            try:
                item = self.dataset[sample]
            except Exception as error:
                raise reading_error(f"sample {sample} of {self.what}", error) from error
            pairs.append(checked_pair(item, f"sample {sample} of {self.what}"))
        return pairs

    def _read_at_once(self, samples: list[int], seed: int) -> list[tuple[Any, Any]]:
        seed_generators(seed)
        names = f"samples {', '.join(map(str, samples[:8]))}{' …' if len(samples) > 8 else ''} of {self.what}"
        try:
            items = list(self.dataset.__getitems__(samples))
        except Exception as error:
            raise reading_error(names, error) from error
        if len(items) != len(samples):
            raise DataError(f"{names}: __getitems__ gave {len(items)} samples for {len(samples)} indices")
        return [checked_pair(item, f"sample {sample} of {self.what}") for sample, item in zip(samples, items)]


class IterableSource:
    """An IterableDataset: its own order, its length unknown. It is never shuffled here.

    `dataset.set_epoch(epoch)` is called before an epoch if there is such a method. The first sample is read
    once when the source is made. Every shard reads the whole stream and keeps its part of each batch.
    """

    def __init__(self, dataset: Any, what: str, limit: int | None = None) -> None:
        self.dataset = dataset
        self.what = what
        self.num_samples: int | None = None
        self.num_classes: int | None = None
        self.ignored: int | None = None
        self._limit = limit
        with preserved_generators():
            stream = self.stream(epoch=0)
            head = next(stream, None)
            stream.close()
        if head is None:
            raise DataError(f"{what} has no samples")
        self.example = stacked([head], [0], what, None)
        self.input_shape = checked_input_shape(self.example.inputs, what)

    def first(self, num_samples: int) -> IterableSource:
        part = IterableSource(self.dataset, self.what, num_samples)
        part.num_classes, part.ignored = self.num_classes, self.ignored
        return part

    def gather(self, indices: Tensor) -> Batch:
        raise DataError(f"{self.what} is an IterableDataset: its samples have no index and can only be read in order")

    def stream(self, epoch: int) -> SampleStream:
        return SampleStream(self, epoch)


class SampleStream(Iterator[tuple[Any, Any]]):
    """The checked samples of one pass over an IterableDataset; `close` ends the dataset's own iterator."""

    def __init__(self, source: IterableSource, epoch: int) -> None:
        self._source = source
        self._limit = source._limit
        self._epoch = epoch
        self._num_read = 0
        self._iterator: Any = None

    def __next__(self) -> tuple[Any, Any]:
        if self._limit is not None and self._num_read >= self._limit:
            raise StopIteration
        name = f"sample {self._num_read} of {self._source.what}"
        try:
            if self._iterator is None:
                if hasattr(self._source.dataset, "set_epoch"):
                    self._source.dataset.set_epoch(self._epoch)
                self._iterator = iter(self._source.dataset)
            item = next(self._iterator)
        except StopIteration:
            raise
        except Exception as error:
            raise reading_error(name, error) from error
        self._num_read += 1
        return checked_pair(item, name)

    def take(self, num_samples: int) -> list[tuple[Any, Any]]:
        return list(itertools.islice(self, num_samples))

    def close(self) -> None:
        if hasattr(self._iterator, "close"):
            self._iterator.close()


def stacked(
    pairs: Sequence[tuple[Any, Any]],
    samples: Sequence[int],
    what: str,
    num_classes: int | None,
    ignored: int | None = None,
) -> Batch:
    """Return samples as one batch, in the types a model takes; DataError if they do not fit together."""
    columns = []
    for part, values in (("inputs", [pair[0] for pair in pairs]), ("targets", [pair[1] for pair in pairs])):
        try:
            column = default_collate(values)
        except Exception as error:
            raise DataError(
                f"the {part} of {what} cannot be stacked into a batch: {_contrast(values, samples)}"
            ) from error
        if not isinstance(column, Tensor):
            raise DataError(
                f"the {part} of {what} are {_described(values[0])}: "
                "a sample must be a pair of tensors, arrays or numbers"
            )
        columns.append(column)
    inputs, targets = ready_inputs(columns[0]), ready_targets(columns[1])
    if num_classes is not None and not targets.is_floating_point():
        check_classes(targets, num_classes, what, samples, ignored)
    return Batch(inputs, targets)


def _contrast(values: Sequence[Any], samples: Sequence[int]) -> str:
    """Return how two of the samples differ, with their numbers and what to do."""
    kinds = [_described(value) for value in values]
    other = next((place for place, kind in enumerate(kinds) if kind != kinds[0]), None)
    if other is None:
        return f"sample {samples[0]} is {kinds[0]}"
    text = f"sample {samples[0]} is {kinds[0]}, sample {samples[other]} is {kinds[other]}"
    if "shape" in kinds[0] and "shape" in kinds[other]:
        text += ": bring all samples to one shape in the dataset (resize, crop or pad them)"
    return text


def checked_input_shape(inputs: Tensor, what: str) -> tuple[int, ...]:
    if inputs.dim() < 2:
        raise DataError(f"an input of {what} is a single number: give it a feature dimension, as in x.reshape(1)")
    return tuple(inputs.shape[1:])


def checked_pair(item: Any, name: str) -> tuple[Any, Any]:
    """Return a sample as (input, target); DataError that says what was got instead."""
    if isinstance(item, (tuple, list)) and len(item) == 2:
        return item[0], item[1]
    raise DataError(f"{name} must be a pair (input, target), the dataset gave {_described(item)}")


def reading_error(name: str, error: Exception) -> DataError:
    """Return the DataError for what a user's dataset raised, with the place it was raised at."""
    if isinstance(error, CordeeError):
        return DataError(str(error))
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename != __file__]
    where = f" (at {own[-1].filename}:{own[-1].lineno})" if own else ""
    return DataError(f"reading {name} raised {type(error).__name__}: {error}{where}")


def _described(value: Any) -> str:
    if isinstance(value, dict):
        return f"a dict with the keys {', '.join(map(repr, list(value)[:6]))}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"a {type(value).__name__} of shape {tuple(value.shape)} and type {value.dtype}"
    return f"a {type(value).__name__}"
