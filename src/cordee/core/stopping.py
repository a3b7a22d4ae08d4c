"""When a run ends before its last step: a small state machine over what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from cordee.core.settings import Stop

Get = Callable[[str], float | None]  # what was measured by the name of a metric; None: it has no value


class Patience(msgspec.Struct):
    """How long it has been since the best evaluation. Saved with checkpoints."""

    best: float | None = None
    evaluations_since: int = 0


@dataclass
class StopPolicy:
    """Says which setting of `[stop]`, if any, ends the run now."""

    settings: Stop
    patience: Patience = field(default_factory=Patience)
    lower_is_better: frozenset[str] = frozenset({"loss"})
    best_by: str = ""  # the metric that the best evaluation is found by; "": as for patience

    def is_time_up(self, elapsed_s: float) -> bool:
        limit = self.settings.time_s
        return limit is not None and elapsed_s >= limit

    def after_step(self, num_steps: int, *, is_time_up: bool) -> str | None:
        if self.settings.steps is not None and num_steps >= self.settings.steps:
            return "steps"
        return "time" if is_time_up else None

    def after_evaluation(self, get: Get) -> str | None:
        """Record an evaluation."""
        score, best = self.score(get, self.settings.patience_metric), self.patience.best
        if not math.isnan(score) and (best is None or score > best):
            self.patience = Patience(best=score, evaluations_since=0)
        else:
            self.patience = Patience(best, self.patience.evaluations_since + 1)
        return self.stop_reason(get)

    def score(self, get: Get, metric: str = "") -> float:
        """Return a number of which more is better; NaN where there is none.

        Without a metric it is the accuracy, or the loss where there is none.
        """
        metric = metric or ("loss" if get("accuracy") is None else "accuracy")
        value = get(metric)
        if value is None:
            return math.nan
        return -value if metric in self.lower_is_better else value

    def stop_reason(self, get: Get) -> str | None:
        """Return why the latest recorded evaluation ends the run; None if it does not."""
        settings = self.settings
        accuracy, loss = get("accuracy"), get("loss")
        if settings.accuracy is not None and accuracy is not None and accuracy >= settings.accuracy:
            return "accuracy"
        if settings.loss is not None and loss is not None and loss <= settings.loss:
            return "loss"
        for name, goal in settings.metrics.items():
            value = get(name)
            # NaN is neither.
            if value is not None and (value <= goal if name in self.lower_is_better else value >= goal):
                return f"metrics.{name}"
        if settings.patience is not None and self.patience.evaluations_since >= settings.patience:
            return "patience"
        return None
