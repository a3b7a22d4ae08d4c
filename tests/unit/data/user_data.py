"""Datasets as users write them."""

from __future__ import annotations

import os
import random
import time

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from cordee.data import ArraySource, Splits


class Numbered(Dataset):
    """Samples whose target is their index."""

    def __init__(self, size: int = 20, num_classes: int | None = None) -> None:
        self.size = size
        if num_classes is not None:
            self.num_classes = num_classes

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int):
        return torch.full((3,), float(index)), index


class Drawing(Numbered):
    """Draws from all three generators, as random transforms do."""

    def __getitem__(self, index: int):
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.tensor([*drawn, float(index)]), index


class Failing(Numbered):
    def __getitem__(self, index: int):
        if index == 13:
            raise OSError("cannot open picture 13")
        return super().__getitem__(index)


class Dying(Numbered):
    def __getitem__(self, index: int):
        if index == 13:
            os._exit(3)
        return super().__getitem__(index)


class Slow(Numbered):
    def __getitem__(self, index: int):
        time.sleep(0.01)
        return super().__getitem__(index)


class AtOnce(Numbered):
    """Reads many samples in one call."""

    calls = 0

    def __getitems__(self, indices: list[int]):
        self.calls += 1
        return [self[index] for index in indices]


class Giving(Dataset):
    """Gives the same thing for every index."""

    def __init__(self, item, size: int = 4) -> None:
        self.item = item
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int):
        return self.item


class Stream(IterableDataset):
    """Numbers from 0 on, the epoch in front."""

    def __init__(self, size: int = 10, fail_at: int | None = None) -> None:
        self.size = size
        self.fail_at = fail_at
        self.epoch = 0
        self.num_classes = 1000
        self.is_closed = False

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        self.is_closed = False
        try:
            for number in range(self.size):
                if number == self.fail_at:
                    raise ValueError("line 7 is not a number")
                yield torch.tensor([float(self.epoch), float(number), random.random()]), number
        finally:
            self.is_closed = True


def make_pair(size: int = 8):
    return np.arange(size * 2.0).reshape(size, 2), np.arange(size) % 3


def make_both(size: int = 8, test_size: int = 4):
    return make_pair(size), make_pair(test_size)


def make_dataset(size: int = 8):
    return Numbered(size)


def make_splits():
    source = ArraySource(torch.zeros(6, 2), torch.tensor([0, 1, 2, 3, 4, 5]))
    return Splits(train=source, test=None, input_shape=(2,), num_classes=9, name="mine")


def make_seeded(seed: int, normalize: bool):
    return np.full((4, 2), float(seed + normalize)), np.zeros(4, dtype=int)


def make_broken():
    raise RuntimeError("the disk is not mounted")
