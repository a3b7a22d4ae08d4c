"""Models that misbehave in the middle of training."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class NanNet(nn.Module):
    """Gives gradients that are not numbers in its third training step of every worker."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(input_shape[0], num_classes)
        self.steps = 0

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.linear(inputs)
        if self.training and torch.is_grad_enabled():
            self.steps += 1
            if self.steps == 3:
                outputs = outputs * float("nan")
        return outputs


class FailingNet(NanNet):
    """Raises in its third training step."""

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled() and self.steps == 2:
            raise RuntimeError("at its end")
        return super().forward(inputs)
