"""Metrics of torchmetrics that are made of others."""

from __future__ import annotations

from typing import Any

import torch
import torchmetrics
from torch import Tensor


class Count(torchmetrics.Metric):
    """How many samples there were: no mean, so that a sample that counts twice is seen."""

    n: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("n", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.n += len(targets)

    def compute(self) -> Tensor:
        return self.n


class Sum(torchmetrics.metric.CompositionalMetric):
    """What `a + b` makes of two metrics."""

    def __init__(self) -> None:
        super().__init__(torch.add, Count(), Count())


class Wrapped(torchmetrics.Metric):
    """Has a state of its own, and another metric."""

    extra: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = Count()
        self.add_state("extra", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, *args: Any) -> None:
        self.inner.update(*args)
        self.extra += 1.0

    def compute(self) -> Tensor:
        return self.inner.compute() + 0 * self.extra

    def reset(self) -> None:
        super().reset()
        self.inner.reset()
