"""Parts of a source: the first samples, or a share set aside for testing."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from cordee.core.batch import Batch
from cordee.core.errors import DataError, JobError
from cordee.core.seeds import derive_seed
from cordee.core.settings import Data
from cordee.data.source import Source, Splits


class Subset:
    """Some samples of any source."""

    def __init__(self, source: Source, kept: Tensor) -> None:
        self.num_samples: int | None = len(kept)
        self.input_shape = source.input_shape
        self._source = source
        self._kept = kept

    def gather(self, indices: Tensor) -> Batch:
        return self._source.gather(self._kept.index_select(0, indices))


def cut_splits(splits: Splits, data: Data, seed: int) -> Splits:
    """Return the splits with `data.test_fraction`, then `data.train_limit` and `data.test_limit` applied.

    The share set aside is drawn from the job's seed. A setting that cannot be followed is a JobError.
    """
    if data.test_fraction > 0:
        splits = _with_test_fraction(splits, data.test_fraction, seed)
    if data.train_limit is not None:
        splits = dataclasses.replace(splits, train=_first(splits.train, data.train_limit))
    if data.test_limit is not None:
        if splits.test is None:
            raise JobError(
                f"data.test_limit = {data.test_limit}, but {splits.name} has no test set: "
                "set data.test_fraction, or remove the limit"
            )
        splits = dataclasses.replace(splits, test=_first(splits.test, data.test_limit))
    return splits


def _with_test_fraction(splits: Splits, fraction: float, seed: int) -> Splits:
    if splits.test is not None:
        raise JobError(f"data.test_fraction = {fraction}, but {splits.name} has a test set: remove the setting")
    num_samples = splits.train.num_samples
    if num_samples is None:
        raise JobError(
            f"data.test_fraction = {fraction} cannot be set aside from an IterableDataset of unknown length: "
            "give a test set of its own"
        )
    num_test = round(fraction * num_samples)
    if not 0 < num_test < num_samples:
        raise JobError(f"data.test_fraction = {fraction} of {num_samples} samples leaves nothing on one side")
    generator = torch.Generator().manual_seed(derive_seed(seed, "test_fraction"))
    drawn = torch.randperm(num_samples, generator=generator)
    test, train = (part.sort().values for part in drawn.split_with_sizes([num_test, num_samples - num_test]))
    return dataclasses.replace(splits, train=_take(splits.train, train), test=_take(splits.train, test))


def _take(source: Source, kept: Tensor) -> Source:
    take = getattr(source, "take", None)
    return take(kept) if take is not None else Subset(source, kept)


def _first(source: Source, num_samples: int) -> Source:
    first = getattr(source, "first", None)
    if first is not None:
        return first(num_samples)  # type: ignore[no-any-return]
    if source.num_samples is None:
        raise DataError("a limit needs a source that knows its length, or that has the method first(num_samples)")
    return Subset(source, torch.arange(min(num_samples, source.num_samples)))
