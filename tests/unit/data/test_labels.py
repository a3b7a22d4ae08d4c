"""Labels that are no classes, begin with 1, or leave classes out, and samples that differ in shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from cordee.core.errors import DataError
from cordee.core.settings import Data
from cordee.data import Splits, load_data

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


def test_classes_without_samples_are_named() -> None:
    assert "no sample of class 1, 2" in load((X, torch.tensor([0, 3, 3, 0, 3, 3]))).warnings[0]
    folders = Labelled([0, 2] * 3, classes=["cat", "dog", "eel"], targets=[0, 2] * 3)
    assert "no sample of class 1 ('dog')" in load(folders).warnings[0]


def test_samples_of_another_shape_are_named() -> None:
    source = load(Unequal([0, 1, 2] * 2)).train
    with pytest.raises(DataError, match=r"sample 0 is .*\(3, 8, 8\).*, sample 4 is .*\(3, 9, 9\).*: .*resize"):
        source.gather(torch.arange(6))
