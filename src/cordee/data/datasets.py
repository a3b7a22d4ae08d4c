"""Sources over a user's torch `Dataset` or `IterableDataset`: samples are read one by one and made batches."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset as TorchSubset

from cordee.core import tree
from cordee.core.batch import Batch
from cordee.core.errors import CordeeError, DataError
from cordee.core.tree import Nested
from cordee.data.blocks import Blocks
from cordee.data.order import hash_positions, preserved_generators, seed_generators
from cordee.data.samples import PAIRS, SampleFormat

_END = object()  # of a stream


class DatasetSource:
    """A map-style Dataset: `len(dataset)` and `dataset[i]`, which gives a sample (`samples.SampleFormat`).

    Each sample is read with Python's, NumPy's and torch's generators seeded from its position in the epoch,
    so random transforms are the same in any batch, on any shard and after a resume. A dataset that has
    `__getitems__` is asked for all samples of a batch at once and seeded by the first of them. A dataset that
    keeps a generator of its own is not under this control.
    """

    def __init__(
        self, dataset: Any, what: str, kept: Tensor | None = None, sample_format: SampleFormat = PAIRS
    ) -> None:
        """`what` names the split in errors; `kept` are the samples to use, None for all. Reads one sample."""
        self.dataset = dataset
        self.what = what
        self.format = sample_format
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

    def digest(self) -> str:
        """Return a digest of the files whose rows these are; "" where rows would have to be read for it."""
        return "" if self.blocks is None else self.blocks.reader.digest()

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
        part = DatasetSource(dataset, self.what, kept, self.format)
        part.num_classes, part.ignored = self.num_classes, self.ignored
        return part

    def read(self, indices: Tensor, positions: Tensor, seed: int) -> Batch:
        """Return the samples with these indices, random transforms drawn from (seed, position)."""
        if len(indices) == 0:
            return self.example.rows(0, 0)
        samples = self.numbers(indices)
        seeds = hash_positions(positions, seed).tolist()
        with preserved_generators():
            items = self._read_at_once(samples, seeds[0]) if self.reads_at_once else self._read(samples, seeds)
        return self.format.batch(items, samples, self.what, self.num_classes, self.ignored, seeds[0])

    def numbers(self, indices: Tensor) -> list[int]:
        """Return the indices in the user's dataset."""
        numbers: list[int] = (indices if self._kept is None else self._kept.index_select(0, indices)).tolist()
        return numbers

    @property
    def reads_at_once(self) -> bool:
        """Whether samples that are read together are drawn from one seed: reading them apart gives others."""
        # torch's Subset has `__getitems__` too, but over a plain dataset it only reads one by one.
        return hasattr(self.dataset, "__getitems__") and not isinstance(self.dataset, TorchSubset)

    def _read(self, samples: Sequence[int], seeds: Sequence[int]) -> list[Any]:
        items = []
        for sample, seed in zip(samples, seeds, strict=True):
            seed_generators(seed)
            try:
                items.append(self.dataset[sample])
            except Exception as error:
                raise reading_error(f"sample {sample} of {self.what}", error) from error
        return items

    def _read_at_once(self, samples: list[int], seed: int) -> list[Any]:
        seed_generators(seed)
        names = f"samples {', '.join(map(str, samples[:8]))}{' …' if len(samples) > 8 else ''} of {self.what}"
        try:
            items = list(self.dataset.__getitems__(samples))
        except Exception as error:
            raise reading_error(names, error) from error
        if len(items) != len(samples):
            raise DataError(f"{names}: __getitems__ gave {len(items)} samples for {len(samples)} indices")
        return items


class IterableSource:
    """An IterableDataset: its own order, its length unknown. It is never shuffled here.

    `dataset.set_epoch(epoch)` is called before an epoch if there is such a method. The first sample is read
    once when the source is made. Every shard reads the whole stream and keeps its part of each batch.
    """

    def __init__(self, dataset: Any, what: str, limit: int | None = None, sample_format: SampleFormat = PAIRS) -> None:
        self.dataset = dataset
        self.what = what
        self.format = sample_format
        self.num_samples: int | None = None
        self.num_classes: int | None = None
        self.ignored: int | None = None
        self._limit = limit
        with preserved_generators():
            stream = self.stream(epoch=0)
            head = next(stream, _END)
            stream.close()
        if head is _END:
            raise DataError(f"{what} has no samples")
        self.example = sample_format.batch([head], [0], what)
        self.input_shape = checked_input_shape(self.example.inputs, what)

    def first(self, num_samples: int) -> IterableSource:
        part = IterableSource(self.dataset, self.what, num_samples, self.format)
        part.num_classes, part.ignored = self.num_classes, self.ignored
        return part

    def gather(self, indices: Tensor) -> Batch:
        raise DataError(f"{self.what} is an IterableDataset: its samples have no index and can only be read in order")

    def stream(self, epoch: int) -> SampleStream:
        return SampleStream(self, epoch)


class SampleStream(Iterator[Any]):
    """The samples of one pass over an IterableDataset; `close` ends the dataset's own iterator."""

    def __init__(self, source: IterableSource, epoch: int) -> None:
        self._source = source
        self._limit = source._limit
        self._epoch = epoch
        self._num_read = 0
        self._iterator: Any = None

    def __next__(self) -> Any:
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
        return item

    def take(self, num_samples: int) -> list[Any]:
        return list(itertools.islice(self, num_samples))

    def close(self) -> None:
        if hasattr(self._iterator, "close"):
            self._iterator.close()


def checked_input_shape(inputs: Nested, what: str) -> Any:
    """Return the shape of a sample; DataError if it is a single number."""
    if isinstance(inputs, Tensor) and inputs.dim() < 2:
        raise DataError(f"an input of {what} is a single number: give it a feature dimension, as in x.reshape(1)")
    return tree.shapes(inputs)


def reading_error(name: str, error: Exception) -> DataError:
    """Return the DataError for what a user's dataset raised, with the place it was raised at."""
    if isinstance(error, CordeeError):
        return DataError(str(error))
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename != __file__]
    where = f" (at {own[-1].filename}:{own[-1].lineno})" if own else ""
    return DataError(f"reading {name} raised {type(error).__name__}: {error}{where}")
