"""Where a run is, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from cordee.compute import Metrics
from cordee.core.stopping import Patience
from cordee.data import Place


class Progress(msgspec.Struct):
    """Where a run is. Saved with each checkpoint; with the job it determines everything that follows."""

    step: int = 0  # optimizer steps taken
    epoch: int = 0  # epochs begun before the present one
    batch: int = 0  # batches of the present epoch already used
    samples: int = 0
    elapsed_s: float = 0.0  # over all attempts
    loss_sum: float = 0.0  # over the present epoch
    loss_count: int = 0
    evaluated_at: int = -1  # step of the last evaluation
    metrics: Metrics | None = None  # what it measured
    best_step: int = -1  # of the best evaluation
    place: Place = Place()  # in data that grows
    patience: Patience = msgspec.field(default_factory=Patience)


@dataclass(frozen=True)
class Outcome:
    """How training ended. `stopped_by` is None when all steps were taken."""

    progress: Progress
    stopped_by: str | None
    metrics: Metrics | None
    samples_per_second: float
    stall_s: float  # that training stood still for checkpoints

    @property
    def train_loss(self) -> float | None:
        return self.progress.loss_sum / self.progress.loss_count if self.progress.loss_count else None
