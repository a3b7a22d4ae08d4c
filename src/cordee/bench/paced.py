"""A model that takes its time: workers whose speed is set, whatever the machine, to see who waits for whom.

It sleeps instead of computing, so that four workers fit on two cores. One worker of a run is the slow one: the first
that claims it, by a file in a folder that all of them know.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

from torch import Tensor, nn


class Paced(nn.Module):
    """A linear layer that takes `pace_s` for every training pass, and on the slow worker four times that.

    `slow_share` is the share of the slow worker's passes that are slow, in spells of four; 1 is always.
    """

    def __init__(
        self, input_shape: tuple[int, ...], num_classes: int, *, folder: str, pace_s: float, slow_share: float
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(input_shape[0], num_classes)
        self._folder, self._pace_s, self._slow_share = Path(folder), pace_s, slow_share
        self._is_slow: bool | None = None  # not known before the first pass: servers never make one
        self._random = random.Random(0)
        self._spell, self._is_in_spell = 0, False

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            time.sleep(self._pace_s * (4 if self._draw() else 1))
        outputs: Tensor = self.linear(inputs)
        return outputs

    def _draw(self) -> bool:
        if self._is_slow is None:
            self._is_slow = self._claim()
        if not self._is_slow:
            return False
        if self._spell == 0:
            self._spell, self._is_in_spell = 4, self._random.random() < self._slow_share
        self._spell -= 1
        return self._is_in_spell

    def _claim(self) -> bool:
        try:
            os.close(os.open(self._folder / "slow", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True
