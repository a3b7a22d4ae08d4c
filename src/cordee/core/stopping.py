"""When a run ends before its last step: a small state machine over what was measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec

from cordee.core.settings import Stop


class Patience(msgspec.Struct):
    """How long it has been since the best evaluation. Saved with checkpoints."""

    best: float | None = None
    evaluations_since: int = 0


@dataclass
class StopPolicy:
    """Says which setting of `[stop]`, if any, ends the run now."""

    settings: Stop
    patience: Patience = field(default_factory=Patience)

    def is_time_up(self, elapsed_s: float) -> bool:
        limit = self.settings.time_s
        return limit is not None and elapsed_s >= limit

    def after_step(self, num_steps: int, *, is_time_up: bool) -> str | None:
        if self.settings.steps is not None and num_steps >= self.settings.steps:
            return "steps"
        return "time" if is_time_up else None

    def after_evaluation(self, loss: float, accuracy: float | None) -> str | None:
        """Record an evaluation. Better means a higher accuracy, or a lower loss where there is none."""
        score = accuracy if accuracy is not None else -loss
        best = self.patience.best
        if not math.isnan(score) and (best is None or score > best):
            self.patience = Patience(best=score, evaluations_since=0)
        else:
            self.patience = Patience(best, self.patience.evaluations_since + 1)
        return self.stop_reason(loss, accuracy)

    def stop_reason(self, loss: float, accuracy: float | None) -> str | None:
        """Return why the latest recorded evaluation ends the run; None if it does not."""
        settings = self.settings
        if settings.accuracy is not None and accuracy is not None and accuracy >= settings.accuracy:
            return "accuracy"
        if settings.loss is not None and loss <= settings.loss:
            return "loss"
        if settings.patience is not None and self.patience.evaluations_since >= settings.patience:
            return "patience"
        return None
