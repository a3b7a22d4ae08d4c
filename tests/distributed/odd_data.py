"""Data sets and losses whose batches do not weigh as much as they have samples, named by jobs as "odd_data:name"."""

from __future__ import annotations

import torch
from torch import Tensor

NUM_CLASSES, WIDTH = 4, 12
IGNORED = 3


def mostly_ignored(*, num_samples: int = 60, num_test: int = 24) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Six of seven labels are of the class IGNORED: many batches, and more shares, have no other."""

    def split(size: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        labels = torch.full((size,), IGNORED)
        labels[::7] = torch.arange(len(labels[::7])) % IGNORED
        return torch.randn((size, WIDTH), generator=generator), labels

    return split(num_samples, 3), split(num_test, 4)
