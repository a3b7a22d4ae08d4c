"""Whether two hosts have the same data."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cordee.core import Batch
from cordee.core.errors import DataError
from cordee.data import ArraySource, Splits
from cordee.data.source import check_same, fingerprint


def splits(size: int, seed: int = 0) -> Splits:
    generator = torch.Generator().manual_seed(seed)
    source = ArraySource(torch.rand(size, 3, generator=generator), torch.arange(size) % 2)
    return Splits(source, None, (3,), 2, "some")


class Restless:
    """A data set that augments by itself."""

    num_samples: int | None = 10
    input_shape = (3,)

    def gather(self, indices: torch.Tensor) -> Batch:
        return Batch(torch.rand(len(indices), 3), indices)


def test_equal_data_have_one_fingerprint() -> None:
    assert fingerprint(splits(100)) == fingerprint(splits(100))
    assert fingerprint(splits(100)).startswith("train: 100 samples (")
    check_same(fingerprint(splits(1)), splits(1))


@pytest.mark.parametrize(
    "other", [splits(101), splits(100, seed=1), dataclasses.replace(splits(100), test=splits(5).train)]
)
def test_other_data_are_refused(other: Splits) -> None:
    with pytest.raises(DataError, match=r"not those of the run: here they are train: 10\d samples.*; there train: 100"):
        check_same(fingerprint(splits(100)), other)


def test_samples_that_change_with_each_reading_are_only_counted() -> None:
    restless = dataclasses.replace(splits(10), train=Restless())
    assert fingerprint(restless) == "train: 10 samples"
    check_same(fingerprint(restless), restless)
