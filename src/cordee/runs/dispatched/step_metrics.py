"""The metrics of steps: what workers report of their parts is summed, and emitted when the step is complete."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cordee.monitoring import AnyEvent, events
from cordee.runs.dispatched.messages import TakeWork
from cordee.runs.dispatched.plan import RunPlan
from cordee.runs.dispatched.state import StepMetricsState, StepSum
from cordee.training.progress import Progress

Emit = Callable[[AnyEvent], None]  # for the run's file
MOST_REFUSALS = 100  # in a row: the run will not get anywhere


class StepMetrics:
    """Keeps the progress of a run. `show` is given step and loss, `rate` tells the learning rate of a step."""

    def __init__(
        self,
        plan: RunPlan,
        progress: Progress,
        state: StepMetricsState,
        emit: Emit,
        show: Callable[[int, float], None],
        rate: Callable[[int], float],
    ) -> None:
        self._plan = plan
        self._progress = progress
        self._state = state
        self._emit = emit
        self._show = show
        self._rate = rate
        self._window = (progress.samples, time.perf_counter())  # samples and time when speed was last told

    @property
    def begun_s(self) -> float | None:
        """When the first unit of work was handed out; None before."""
        return self._state.first_work_s

    @property
    def training_s(self) -> float | None:
        """Seconds from the first unit of work to the newest step; None before there is one."""
        first_s, last_s = self._state.first_work_s, self._state.last_step_s
        return None if first_s is None or last_s is None else last_s - first_s

    @property
    def to_apply(self) -> tuple[int, float]:
        """The step that servers are to apply before the next is computed (-1: none), and how they scale it."""
        return self._state.to_apply

    @property
    def has_only_refusals(self) -> bool:
        """Whether servers have refused everything for a while."""
        return self._state.num_refused_in_a_row >= MOST_REFUSALS

    def begin(self) -> None:
        """Record that work is handed out; the first time counts."""
        if self._state.first_work_s is None:
            self._state.first_work_s = time.perf_counter()
            self._window = (self._progress.samples, self._state.first_work_s)

    def add(self, step: int, done: TakeWork) -> None:
        """Take what a worker says of its part of a step."""
        self._state.num_refused_in_a_row = self._state.num_refused_in_a_row + 1 if done.refused else 0
        if done.refused:  # by one server or by all of them: told once
            self._emit(events.Warned(message=f"{done.refused}: it is refused, and the step continues without it"))
        sums = self._state.sums.setdefault(step, StepSum())
        if math.isfinite(done.loss_sum):
            sums.loss_sum += done.loss_sum
            sums.count += done.count
        sums.num_items += done.num_items
        sums.num_correct += max(done.num_correct, 0)
        sums.num_samples += done.num_samples
        sums.norms += done.norms

    def reopen(self) -> None:
        """Forget what was said of steps that are not complete: all of it is said again."""
        self._state.sums.clear()

    def close(self, num_steps: int) -> None:
        """Put into the progress what is not in it of the first `num_steps` steps, which are complete."""
        for step in range(self._state.counted, num_steps):
            self._close_step(step, self._state.sums.pop(step))

    def _close_step(self, step: int, sums: StepSum) -> None:
        plan, progress = self._plan, self._progress
        self._state.counted = step + 1
        self._state.last_step_s = time.perf_counter()
        if plan.is_first_of_epoch(step):
            progress.loss_sum, progress.loss_count = 0.0, 0
        progress.step = plan.steps_before(step + 1)
        progress.epoch, progress.batch = plan.place_before(step + 1)
        progress.samples += sums.num_samples
        progress.loss_sum += sums.loss_sum
        progress.loss_count += sums.count
        if plan.settings.is_synchronous:
            scale = clip_scale(total_norm(sums.norms, plan.dtype), plan.clip_norm) if plan.clip_norm else 1.0
            self._state.to_apply = (step, scale)
        loss = sums.loss_sum / sums.count if sums.count else math.nan
        self._show(progress.step, loss)
        if plan.reports(step):
            self._report(step, sums, loss)

    def _report(self, step: int, sums: StepSum, loss: float) -> None:
        plan, progress = self._plan, self._progress
        samples, since_s = self._window
        now_s = time.perf_counter()
        self._window = (progress.samples, now_s)
        self._emit(
            events.Step(
                step=progress.step,
                epoch=plan.epoch_of(step) + 1,
                loss=loss,
                accuracy=sums.num_correct / sums.num_items if sums.num_items and plan.counts_classes else None,
                lr=self._rate(plan.steps_before(step)),
                gradient_norm=float(total_norm(sums.norms, plan.dtype)) if plan.clip_norm and sums.count else None,
                samples=progress.samples,
                samples_per_second=(progress.samples - samples) / max(now_s - since_s, 1e-9),
            )
        )


def total_norm(norms: Sequence[tuple[int, float]], dtype: str) -> Tensor:
    """Return the norm of a gradient, of those of its parameters or of parts of them: the number of each, and its norm.

    Computed as `torch.nn.utils.clip_grad_norm_` does, in the type of the parameters: where none is in parts, the bits
    are those of `single`.
    """
    parts: dict[int, list[float]] = {}
    for number, norm in sorted(norms):
        parts.setdefault(number, []).append(norm)
    whole = [own[0] if len(own) == 1 else math.hypot(*own) for own in parts.values()]
    total: Tensor = torch.linalg.vector_norm(torch.tensor(whole, dtype=getattr(torch, dtype)))
    return total


def clip_scale(norm: Tensor, clip_norm: float) -> float:
    """Return what a gradient of this norm is multiplied by, as `torch.nn.utils.clip_grad_norm_` does."""
    return float(torch.clamp(clip_norm / (norm + 1e-6), max=1.0))
