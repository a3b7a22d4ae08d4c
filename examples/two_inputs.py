"""A model of two inputs that returns a dict: digits in two halves."""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset


class Halves(Dataset[dict[str, Any]]):
    """Digits of 8 × 8 pixels, the upper half apart from the lower one."""

    num_classes = 10

    def __init__(self, *, is_test: bool) -> None:
        pixels, labels = load_digits(return_X_y=True)
        images = torch.tensor(pixels, dtype=torch.float32).view(-1, 8, 8) / 16
        chosen = torch.arange(len(images)) % 5 == 4
        chosen = chosen if is_test else ~chosen
        self._images, self._labels = images[chosen], torch.tensor(labels)[chosen]

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = self._images[index]
        return {"upper": image[:4].flatten(), "lower": image[4:].flatten(), "label": int(self._labels[index])}


def halves() -> tuple[Halves, Halves]:
    return Halves(is_test=False), Halves(is_test=True)


class TwoHalves(nn.Module):
    def __init__(self, num_classes: int, hidden: int = 64) -> None:
        super().__init__()
        self.upper, self.lower = nn.Linear(32, hidden), nn.Linear(32, hidden)
        self.out = nn.Linear(hidden, num_classes)

    def forward(self, upper: Tensor, lower: Tensor) -> dict[str, Tensor]:
        hidden = torch.relu(self.upper(upper) + self.lower(lower))
        return {"logits": self.out(hidden), "hidden": hidden}
