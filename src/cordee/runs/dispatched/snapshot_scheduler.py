"""Gives the evaluator one task at a time: to read, measure and save what the servers have; takes what comes of it."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from cordee.checkpoint.layout import decode_values, encode_values
from cordee.communication.channel import Received
from cordee.communication.messages import Message
from cordee.compute import Metrics
from cordee.monitoring import events
from cordee.runs.dispatched.messages import EvaluatorTask, EvaluatorTaskDone, Leave
from cordee.runs.dispatched.plan import RunPlan
from cordee.runs.dispatched.state import Outcome, SnapshotState
from cordee.training.progress import Progress


class SnapshotScheduler:
    """Gives tasks through `reply` when the evaluator is free. `emit` takes an event for the run's file."""

    def __init__(
        self,
        plan: RunPlan,
        progress: Progress,
        state: SnapshotState,
        outcome: Outcome,
        reply: Callable[[Received, Message], None],
        emit: Callable[..., None],
    ) -> None:
        self._plan = plan
        self._progress = progress
        self._state = state
        self._outcome = outcome
        self._reply = reply
        self._emit = emit
        self._evaluator: Received | None = None  # when it is free

    @property
    def is_free(self) -> bool:
        """Whether somebody is there who has nothing to do."""
        return self._evaluator is not None

    @property
    def has_last_task(self) -> bool:
        """Whether the task is given that ends the run."""
        return self._state.has_last_task

    def has_task_for(self, step: int, *, is_last: bool) -> bool:
        """Whether the task is given for what the servers have after `step` steps of the ledger."""
        return self._state.has_last_task if is_last else self._state.task_step == step

    def may_continue(self, step: int) -> bool:
        """Whether training may continue after `step`: the snapshot is read, and no evaluation is waited for."""
        state = self._state
        return state.task_step == step and not (state.is_reading or state.is_deciding)

    def pause(self) -> None:
        """Record that nothing is handed out until a snapshot is read."""
        self._state.paused_s = self._state.paused_s or time.perf_counter()

    def resume(self) -> None:
        """Record that training continues."""
        self._state.paused_s = None

    def arrive(self, received: Received) -> None:
        """Take a request for a task."""
        self._evaluator = received
        if self._state.is_task_open:
            self._withdraw_task()  # it did not hear the last answer

    def lose(self) -> None:
        """Forget the evaluator; the next one is given its task."""
        self._evaluator = None
        state = self._state
        if state.is_task_open and not (state.is_reading or state.is_deciding):
            step = state.task_place[0]
            message = f"the evaluator was lost with what it had read at step {step}: it is not measured and not saved"
            self._emit(events.Warned(message=message))
        if state.is_task_open:
            self._withdraw_task()

    def shut_down(self) -> None:
        """Tell the evaluator, if it asks, that there is nothing more to do."""
        if self._evaluator is not None:
            evaluator, self._evaluator = self._evaluator, None
            self._reply(evaluator, Leave())

    def start_task(self, step: int, elapsed_s: float, to_apply: tuple[int, float], *, is_last: bool) -> bool:
        """Have the evaluator, which is free, read the servers as they are now, after `step` steps of the ledger.

        Returns False where that is not necessary: the run is to end, and what there is has been measured and saved.
        """
        assert self._evaluator is not None
        plan, state, progress = self._plan, self._state, self._progress
        is_interrupted = self._outcome.stopped_by == "interrupt"
        evaluates = plan.evaluates(step, is_last=is_last and not is_interrupted)
        evaluates &= progress.evaluated_at != progress.step  # unless that was just done
        saves = plan.saves(step, is_last=is_last) and state.saved_step != progress.step
        if is_last and not evaluates and not saves:
            return False
        progress.elapsed_s = elapsed_s
        apply_step, scale = to_apply
        state.num_tasks += 1
        state.task_place = (progress.step, progress.epoch, progress.batch, progress.samples)
        state.task_loss = progress.train_loss
        task = EvaluatorTask(
            number=state.num_tasks,
            step=progress.step,
            evaluate=evaluates,
            save=saves,
            is_last=is_last,
            progress=encode_values(msgspec.to_builtins(progress)).decode(),
            apply_step=apply_step,
            scale=scale,
            residuals=plan.saves_residuals(step, is_last=is_last),
        )
        evaluator, self._evaluator = self._evaluator, None
        self._reply(evaluator, task)
        state.task_step = step
        state.is_reading = state.is_task_open = True
        state.has_last_task = is_last
        state.is_deciding = is_last or (evaluates and plan.evaluation_may_stop)
        return True

    def take_snapshot(self, ages: tuple[int, ...]) -> None:
        """Record that the snapshot is read, and how old the gradients in it were."""
        self._outcome.ages = ages
        if any(ages):
            self._emit(events.Staleness(ages={str(age): count for age, count in enumerate(ages) if count}))
        self._state.is_reading = False
        self._state.stall_s = time.perf_counter() - (self._state.paused_s or time.perf_counter())

    def is_open(self, number: int) -> bool:
        """Whether this is the task that is being carried out."""
        return number == self._state.num_tasks and self._state.is_task_open

    def finish(self, done: EvaluatorTaskDone) -> str | None:
        """Take what came of the open task; return why the run should stop, if what was measured says so."""
        state, outcome, progress = self._state, self._outcome, self._progress
        state.is_reading = state.is_deciding = state.is_task_open = False
        outcome.weights_sha256 = done.weights_sha256
        step, epoch, batch, samples = state.task_place
        self._emit(
            events.Commit(step=step, epoch=epoch, batch=batch, samples=samples, weights_sha256=done.weights_sha256)
        )
        outcome.problem = done.problem
        if done.problem:
            self._emit(events.Warned(message=f"checkpoint at step {done.step} was not saved: {done.problem}"))
        elif done.path:
            state.saved_step = done.step
            self._emit(events.Checkpoint(step=done.step, path=done.path, seconds=done.seconds, stall_s=state.stall_s))
            outcome.stall_s += state.stall_s
        if not done.metrics:
            return None
        metrics = msgspec.convert(decode_values(done.metrics.encode()), Metrics)
        outcome.metrics = metrics
        found = progress.describe_evaluation(metrics, done.step, max(1, epoch if batch == 0 else epoch + 1))
        self._emit(msgspec.structs.replace(found, train_loss=state.task_loss))
        return progress.take_evaluation(metrics, done.step, self._plan.policy, self._plan.schedule)

    def _withdraw_task(self) -> None:
        state = self._state
        state.is_reading = state.is_deciding = state.has_last_task = state.is_task_open = False
        state.task_step = -1
