"""Labels that are no classes, begin with 1, or leave classes out, and samples that differ in shape."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from cordee.core.errors import DataError
from cordee.core.settings import Data
from cordee.core.shards import Shards
from cordee.data import GrowingSource, Place, Splits, load_data
from cordee.data.datasets import IterableSource
from cordee.data.reading import StreamPlan, read_stream

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Labelled(Dataset[tuple[Tensor, int]]):
    def __init__(self, labels: list[int], **attributes: Any) -> None:
        self.labels = labels
        vars(self).update(attributes)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return X[index], self.labels[index]


class Unequal(Labelled):
    num_classes = 3

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        side = 9 if index == 4 else 8
        return torch.zeros(3, side, side), self.labels[index]


def load(data: Any, ignored: int | None = None) -> Splits:
    return load_data(Data(use=data), seed=0, ignored=ignored)


@pytest.mark.parametrize(
    "data",
    [
        (X, torch.tensor([1, 2, 3, 1, 2, 3])),
        Labelled([1, 2, 3, 1, 2, 3]),
        Labelled([1, 2, 3] * 2, targets=[1, 2, 3] * 2),
    ],
    ids=["arrays", "Dataset", "targets"],
)
def test_labels_from_one_are_refused(data: Any) -> None:
    with pytest.raises(DataError, match=r"the labels are from 1 to 3.*subtract 1.*num_classes"):
        load(data)


def test_labels_from_one_of_which_the_classes_are_told() -> None:
    assert load(Labelled([1, 2, 3] * 2, num_classes=4)).num_classes == 4
    arrays = load((X, torch.tensor([0, 1, 2, 0, 1, 2])))
    assert arrays.num_classes == 3 and arrays.warnings == ()
    # A vocabulary may begin with a word that no text has, and a loss may ignore class 0.
    assert load((X, torch.tensor([[1, 2]] * 6))).num_classes == 3
    assert load((X, torch.tensor([1, 2, 3, 1, 2, 3])), ignored=0).num_classes == 4


def test_a_label_that_the_loss_ignores_is_no_class() -> None:
    targets = torch.tensor([[0, 1, -100], [2, -100, -100]] * 3)
    assert load((X, targets), ignored=-100).num_classes == 3
    assert load(Labelled([0, 1, 2, -100, 0, 1]), ignored=-100).num_classes == 3
    for ignored in (None, -1):
        with pytest.raises(DataError, match="is -100, but labels must be from 0"):
            load((X, targets), ignored)


def test_an_ignored_label_above_the_classes_adds_none() -> None:
    """As masks have it: 255 for what is not marked."""
    labels = [0, 1, 2, 255, 0, 1]
    for data in ((X, torch.tensor(labels)), Labelled(labels), Labelled(labels, targets=labels)):
        assert load(data, ignored=255).num_classes == 3
    # A word that the loss passes over is in the inputs as well.
    tokens = torch.tensor([[1, 2, 3], [0, 3, 3]])
    assert load((tokens, tokens), ignored=3).num_classes == 4


def test_labels_from_one_are_refused_beside_ignored_ones() -> None:
    labels = [1, 2, 3, -100, 2, 3]
    for data in ((X, torch.tensor(labels)), Labelled(labels), Labelled(labels, targets=labels)):
        with pytest.raises(DataError, match=r"the labels are from 1 to 3.*subtract 1"):
            load(data, ignored=-100)


def test_labels_that_are_all_ignored() -> None:
    assert load((X, torch.tensor([-100] * 6)), ignored=-100).num_classes == 1


def test_classes_without_samples_are_named() -> None:
    assert "no sample of class 1, 2" in load((X, torch.tensor([0, 3, 3, 0, 3, 3]))).warnings[0]
    folders = Labelled([0, 2] * 3, classes=["cat", "dog", "eel"], targets=[0, 2] * 3)
    assert "no sample of class 1 ('dog')" in load(folders).warnings[0]


def test_labels_that_are_identities_take_no_memory_for_each_class() -> None:
    splits = load((X, torch.tensor([0, 3, 3, 0, 3, 10**12])))
    assert splits.num_classes == 10**12 + 1
    assert "no sample of class 1, 2, 4, 5, 6, 7, 8, 9, …" in splits.warnings[0]


def test_samples_of_another_shape_are_named() -> None:
    source = load(Unequal([0, 1, 2] * 2)).train
    with pytest.raises(DataError, match=r"sample 0 is .*\(3, 8, 8\).*, sample 4 is .*\(3, 9, 9\).*: .*resize"):
        source.gather(torch.arange(6))


class Flowing(IterableDataset[tuple[Tensor, int]]):
    num_classes = 3

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return iter([(X[0], 0), (X[1], -100), (X[2], 2)])


def test_labels_that_the_loss_ignores_may_come_in_a_stream() -> None:
    stream = load(Flowing(), ignored=-100).train
    assert isinstance(stream, IterableSource)
    plan = StreamPlan(0, 0, 0, 3, Shards(0, 1, 1))
    (placed,) = read_stream(stream, plan, processes=0, ahead=1)
    assert placed.batch.targets.tolist() == [0, -100, 2]
    stream.ignored = None
    with pytest.raises(DataError, match=r"the label at position 1 is -100, but labels must be from 0 to 2"):
        list(read_stream(stream, plan, processes=0, ahead=1))


@pytest.mark.parametrize("ignored", [-100, None])
@pytest.mark.parametrize("is_folder", [True, False])
def test_labels_that_the_loss_ignores_may_come_in_data_that_grows(
    is_folder: bool, ignored: int | None, tmp_path: Path
) -> None:
    np.savez(tmp_path / "0.npz", x=X[:3].numpy(), y=np.array([0, -100, 2]))
    args = {"root": str(tmp_path), "num_classes": 3}
    data = Data(use="folder", args=args) if is_folder else Data(use=Flowing(), online=True)

    def take() -> list[int]:
        source = load_data(data, seed=0, ignored=ignored).train
        assert isinstance(source, GrowingSource)
        with contextlib.closing(source.open(Place())) as feed:
            while feed.poll(3) < 3:
                time.sleep(0.01)
            return feed.take(3).targets.tolist()

    if ignored is None:
        with pytest.raises(DataError, match=r"the label at position 1 is -100, but labels must be from 0 to 2"):
            take()
    else:
        assert take() == [0, -100, 2]
