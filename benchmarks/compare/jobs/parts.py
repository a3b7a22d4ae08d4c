"""Models and data that the compared jobs name. Nothing of Cordée is imported: both checkouts get the same parts."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn


def images(size: int = 200, side: int = 28, test_size: int = 50) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return training and test images of 10 classes, each the pattern of its class plus noise, in memory."""
    generator = torch.Generator().manual_seed(7)
    patterns = torch.randn((10, 1, side, side), generator=generator)

    def draw(number: int) -> tuple[Tensor, Tensor]:
        targets = torch.arange(number) % 10
        return patterns[targets] + torch.randn((number, 1, side, side), generator=generator), targets

    return draw(size), draw(test_size)


class BatchNormNet(nn.Module):
    """Two convolutions with batch norms, and dropout."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(input_shape[0], 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 8, 3, stride=2, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.1),
        )
        self.head = nn.Linear(32, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.body(inputs))
        return outputs


class SlowNet(nn.Module):
    """A small perceptron with dropout that sleeps before each training pass."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, *, pause_s: float) -> None:
        super().__init__()
        num_inputs = int(torch.tensor(input_shape).prod())
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(num_inputs, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, num_classes)
        )  # fmt: skip
        self._pause_s = pause_s

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            time.sleep(self._pause_s)
        outputs: Tensor = self.body(inputs)
        return outputs


class PacedNet(nn.Module):
    """A linear layer that sleeps for `pace_s` in every training pass, and on one worker for four times as long.

    The slow worker is the first that makes the file `slow` in `folder`.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, *, folder: str, pace_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(input_shape[0], num_classes)
        self._folder, self._pace_s = Path(folder), pace_s
        self._is_slow: bool | None = None  # not known before the first pass: servers never make one

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            if self._is_slow is None:
                self._is_slow = self._claim()
            time.sleep(self._pace_s * (4 if self._is_slow else 1))
        outputs: Tensor = self.linear(inputs)
        return outputs

    def _claim(self) -> bool:
        try:
            os.close(os.open(self._folder / "slow", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True
