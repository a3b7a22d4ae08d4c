"""Where training is and how long it will take: numbers only, the clock is given."""

from __future__ import annotations

import math
from typing import Any, SupportsFloat

import msgspec

# The speed shown is a mean over about this long, so that it neither jitters nor lags.
_SMOOTHING_S = 5.0


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What a progress bar shows at one moment; None is not known (yet)."""

    step: int
    total_steps: int | None
    epoch: int | None  # counted from 1
    epochs: int | None
    loss: float | None
    test_accuracy: float | None  # of the latest evaluation
    samples_per_second: float | None
    left_s: float | None
    elapsed_s: float


class Tracker:
    """Follows one run from its `run_started` fields on."""

    def __init__(self, run: dict[str, Any], now_s: float) -> None:
        self.total_steps: int | None = run.get("total_steps")
        self._stop_steps: int | None = run.get("stop_steps")  # where a rule ends the run, if that is sooner
        self.epochs: int | None = run.get("epochs")
        self.test_accuracy: float | None = None
        self.loss: float | None = None
        self.step: int = run.get("start_step") or 0
        self._start_step, self._started_s = self.step, now_s
        self._batch_size: int | None = run.get("batch_size")
        self._epoch: int | None = None
        self._steps_per_second: float | None = None
        self._anchor_step, self._anchor_s = self.step, now_s
        self._paused_s = 0.0

    def advance(self, step: int, loss: SupportsFloat | None, now_s: float) -> None:
        """Take note that `step` optimizer steps are done."""
        self.step = step
        if loss is not None:
            self.loss = float(loss)
        passed_s = now_s - self._anchor_s
        if step > self._anchor_step and passed_s > 0:
            speed = (step - self._anchor_step) / passed_s
            weight = 1.0 - math.exp(-passed_s / _SMOOTHING_S)
            before = self._steps_per_second
            self._steps_per_second = speed if before is None else before + weight * (speed - before)
            self._anchor_step, self._anchor_s = step, now_s

    def pause(self, seconds: float, now_s: float) -> None:
        """Leave `seconds` just spent on something else (an evaluation, a checkpoint) out of the speed."""
        self._paused_s += seconds
        self._anchor_s = min(self._anchor_s + seconds, now_s)

    def note_epoch(self, epoch: int | None) -> None:
        self._epoch = epoch if epoch is not None else self._epoch

    def elapsed_s(self, now_s: float) -> float:
        return now_s - self._started_s

    def view(self, now_s: float) -> View:
        speed = self._steps_per_second
        has_speed = speed is not None and self._batch_size is not None
        return View(
            step=self.step,
            total_steps=self.total_steps,
            epoch=self._current_epoch(),
            epochs=self.epochs,
            loss=self.loss,
            test_accuracy=self.test_accuracy,
            samples_per_second=speed * self._batch_size if has_speed else None,  # type: ignore[operator]
            left_s=self._left_s(),
            elapsed_s=self.elapsed_s(now_s),
        )

    def _left_s(self) -> float | None:
        ends = [end for end in (self.total_steps, self._stop_steps) if end is not None]
        if not ends or not self._steps_per_second:
            return None
        steps_left = max(min(ends) - self.step, 0)
        paused_s_per_step = self._paused_s / max(self.step - self._start_step, 1)
        return steps_left * (1.0 / self._steps_per_second + paused_s_per_step)

    def _current_epoch(self) -> int | None:
        if not self.total_steps or not self.epochs:
            return self._epoch
        # The steps of an epoch follow from the totals; the last event may be from the epoch before.
        return min(self.epochs, max(self.step - 1, 0) * self.epochs // self.total_steps + 1)
