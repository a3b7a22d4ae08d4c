"""The training loop. It knows `Strategy`, never a strategy by name."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable

import msgspec
import torch

from cordee import checkpoint
from cordee.checkpoint import State
from cordee.cluster.messages import FirstStep, StepTime, TeamReport
from cordee.compute import NO_VOTES, Loss, Votes
from cordee.core import Batch
from cordee.core.batch import Pieces
from cordee.core.errors import DataError, StorageError
from cordee.core.fault_points import reach
from cordee.data.online import OnlineStream, Taken, newest
from cordee.monitoring import Monitor, events
from cordee.monitoring.timeline import Phase
from cordee.strategies.strategy import TrainsAlone, Update
from cordee.training.blame import blame_sample, not_finite_error
from cordee.training.callbacks import RunCallbacks
from cordee.training.checkpointer import Checkpointer, require_finite
from cordee.training.clock import TrainingClock
from cordee.training.comparing import StateComparison
from cordee.training.components import Components
from cordee.training.measuring import WithoutValue, finish, make_policy, measure, ready, take_up, why_stopped_before
from cordee.training.online_data import NextAction, await_data
from cordee.training.progress import Outcome, Progress, add_progress, read_newest
from cordee.training.shares import Balance, cut
from cordee.training.window import Window, record_lost_samples

NO_SAMPLES = Batch(torch.empty(0), torch.empty(0))


class Trainer:
    """Takes one worker through a run: step, evaluate, save, until the end or until it is asked to stop."""

    def __init__(
        self,
        parts: Components,
        monitor: Monitor,
        checkpoints: checkpoint.Store,
        should_stop: Callable[[], bool] = lambda: False,
        should_pause: Callable[[], bool] = lambda: False,
        report: Callable[[TeamReport], None] = lambda _: None,
    ) -> None:
        """`report` tells the coordinator of a team how its training goes."""
        self._parts = parts
        self._job = parts.job
        self._monitor = monitor
        self._should_stop = should_stop
        self._should_pause = should_pause
        self._report = report
        self.is_stepping = False  # a step was begun and is not finished
        self._is_new_team = False  # no step was taken in it yet
        self._balance = Balance.of(parts)
        self._policy = make_policy(parts)
        self._without_value = WithoutValue()
        self._comparison = StateComparison()
        self._callbacks = RunCallbacks(parts.callbacks, monitor.emit, self._save_now)
        self._saver = Checkpointer(checkpoints, parts.job.checkpoint, monitor, self._callbacks.on_written)
        self._votes = NO_VOTES  # of all workers, in the last step
        self._is_stopping = False  # agreed on by all
        self._newest: Batch | None = None  # samples of growing data that were set aside
        self._progress = Progress()
        self._clock = TrainingClock()
        self._start_samples = 0
        self._window = Window()
        self._alone = parts.strategy if isinstance(parts.strategy, TrainsAlone) else None
        self._is_report_due = False

    @property
    def progress(self) -> Progress:
        return self._progress

    @property
    def agreed_step(self) -> int:
        """How many steps had been taken when all members last agreed."""
        return (self._window.start or self._progress).step

    def enter(self, parts: Components, state: State | None) -> None:
        """Continue as a member of another team from `state`, which stays as it is, or begin. Collective."""
        self._parts = parts
        self._window.carry(self._progress)
        if state is not None:
            self.resume(state)
        else:
            self._window.drop()
        self._votes, self._is_stopping, self.is_stepping, self._is_new_team = NO_VOTES, False, False, True
        self._clock.enter_team()
        self._balance = Balance.of(parts)
        reach("enter.resumed")
        self._comparison.begin()
        self._compare()
        self._finish_window()
        # Who writes checkpoints may be another now. What counts is what is on the disk, or on the way there; the first
        # says, for others may look a moment earlier or later.
        step = self._progress.step
        is_saved = parts.team.gather(int(parts.team.is_first and self._saver.holds(step)))[0]
        self._saver.step = step if is_saved else -1
        reach("enter.done")

    def begin(self) -> None:
        """Take no step as taken. Local."""
        self._start_samples -= self._progress.samples
        self._progress, self._newest = Progress(), None
        self._window.drop()
        self._take_up_rules()

    def _take_up_rules(self) -> None:
        """Continue rules that depend on what was measured before from where the progress has them."""
        self._policy.patience = self._progress.patience
        take_up(self._parts, self._progress)

    def wait_for_checkpoint(self) -> None:
        """Wait until no checkpoint is being written."""
        self._saver.wait()

    def state(self) -> State:
        """Return all that another worker needs to be where this one is."""
        return self._with_progress(self._parts.strategy.state_dict())

    def _with_progress(self, state: State) -> State:
        return add_progress(state, self._window.start or self._progress, self._newest)

    def _compare(self, *, is_consolidated: bool = False, common: State | None = None) -> None:
        """Compare a digest of all that this worker continues from with the others'. Collective.

        Raises TrainingError, on every member, if members that should have the same do not.
        """
        step, add = self._progress.step, self._with_progress
        self._comparison.compare(self._parts, step, add, is_consolidated=is_consolidated, common=common)

    def report_commit(self) -> None:
        """Record where this worker is and what it was compared by, for `cordee doctor --run`. Local."""
        self._monitor.emit(self._comparison.describe_commit(self._progress, self._parts.team.generation))

    def resume(self, state: State) -> None:
        """Continue from a checkpoint, in the middle of an epoch where it was made there."""
        before = self._progress.samples
        self._progress = msgspec.convert(state.values["progress"], Progress)
        self._take_up_rules()
        self._start_samples += self._progress.samples - before
        self._newest = read_newest(state, self._parts.example)
        self._parts.strategy.load_state_dict(state)
        self._window.resume(self._progress)
        self._saver.step = self._progress.step

    def run(self, is_end: Callable[[], bool] = lambda: True) -> Outcome | None:
        """Train to the end. Raises TrainingError when training cannot continue; nothing saved before is lost.

        When a member of the team asked for a halt after a step, `is_end` says whether the run ends there. If it
        does not, None is returned, and a later call continues. Raises StorageError when the weights it ended
        with could not be saved.
        """
        progress = self._progress
        self._clock.begin(progress.elapsed_s, progress.samples)
        self._monitor.timeline.enter("training")
        self._monitor.timeline.switch(Phase.COMPUTE)
        try:
            self._callbacks.start(self._parts, progress.step)
            stopped_by = why_stopped_before(self._policy, progress)
            if stopped_by is None and not self._parts.is_done(progress):
                stopped_by = self._after_step() if progress.step else None  # what a lost team left undone
                stopped_by = stopped_by or (self._train_online() if self._parts.is_online else self._train())
            self._settle_checkpoint()
            if stopped_by == "interrupt" and not is_end():
                if not self._parts.is_elastic and self._saver.step != progress.step:
                    self._save(at_once=True)  # while those who have the parts of it are together
                if not self._parts.is_elastic:
                    self.wait_for_checkpoint()  # the next team begins with it
                return None
            if stopped_by != "interrupt":
                stopped_by = self._evaluate() or stopped_by  # a rule that the last evaluation meets is named as well
                if self._parts.test is not None and progress.evaluated_at != progress.step:
                    stopped_by = "interrupt"
            if not (is_saved := self._saver.step == progress.step):
                self._save(at_once=True)
            is_apart = not self._parts.is_whole or (is_saved and self._alone is not None)  # what all have learnt
            weights_sha256 = finish(self._parts, self._callbacks) if is_apart else None
            with self._clock.away(), self._monitor.timeline.inside(Phase.SAVE):
                self.wait_for_checkpoint()
            if self._saver.problem is not None:
                raise StorageError(self._saver.describe_lost_weights()) from self._saver.problem
        finally:
            self._saver.drop()
            progress.elapsed_s = self._clock.elapsed_s
            self._clock.end()
        trained = progress.samples - self._start_samples
        speed = trained / self._clock.training_s if trained else None
        outcome = Outcome(stopped_by, progress.metrics, speed, self._saver.stall_s, weights_sha256)
        self._callbacks.tell_of_checkpoints(self._parts, self._progress.step)
        self._callbacks.notify("on_end", outcome, self._parts, progress.step)
        return outcome

    def _train(self) -> str | None:
        progress, timeline = self._progress, self._monitor.timeline
        while not self._parts.is_done(progress):
            self._parts.strategy.model.train()
            if progress.batch == 0:
                progress.loss_sum, progress.loss_count = 0.0, 0
            is_exhausted = False
            timeline.switch(Phase.DATA)
            with contextlib.closing(self._parts.train.batches(progress.epoch, progress.batch)) as batches:
                for batch in batches:
                    self._take_step(batch)
                    if (reason := self._after_step()) is not None:
                        return reason
                    if self._parts.is_done(progress) or self._change_shares():
                        break
                    timeline.switch(Phase.DATA)
                else:
                    is_exhausted = True
            if is_exhausted and progress.batch == 0:
                raise DataError(
                    f"the training set gave no samples in epoch {progress.epoch + 1}: "
                    "an IterableDataset must start again each time it is iterated over"
                )
            is_over = progress.epochs_finished(self._parts.train.num_batches) > progress.epoch
            if (is_exhausted or is_over) and (reason := self._after_epoch()) is not None:
                return reason
        if self._window.is_open:  # the data had no length: nobody knew that this was the last step
            self._agree(None)
            return self._after_step()
        return None

    def _train_online(self) -> str | None:
        """Train on what arrives until it ends, or there is a reason to stop."""
        progress = self._progress
        with contextlib.closing(self._parts.open_stream(progress.place)) as stream:
            while not self._parts.is_done(progress):
                found = self._await_data(stream)
                if found.action != "take":
                    return None if found.action == "end" else found.action
                if progress.evaluated_at == progress.step:
                    progress.loss_sum, progress.loss_count = 0.0, 0  # a mean since the last evaluation
                self._parts.strategy.model.train()
                taken = stream.take(found.num_samples)
                self._take_step(taken.part, taken)
                if (reason := self._after_step()) is not None:
                    return reason
        return None

    def _await_data(self, stream: OnlineStream) -> NextAction:
        """Wait until all members have the next batch, or there is a reason not to. Collective."""
        self._settle_checkpoint()  # nobody knows for how long
        with self._clock.away(), self._monitor.timeline.inside(Phase.DATA):
            return await_data(
                stream,
                self._parts.team,
                wants_halt=lambda: self._should_stop() or self._should_pause(),
                is_time_up=lambda: self._policy.is_time_up(self._clock.elapsed_s),
                idle_s=self._job.stop.idle_s,
            )

    def _take_step(self, batch: Batch | Pieces, taken: Taken | None = None) -> None:
        progress, strategy, monitoring = self._progress, self._parts.strategy, self._job.monitoring
        measure = progress.step % monitoring.every_steps == 0
        self._monitor.timeline.switch(Phase.COMPUTE)
        self._parts.seed_step(progress.step)
        self.is_stepping = True
        reach("step.begun")
        if self._alone is not None:
            self._take_step_alone(self._alone, batch, measure)
            self._monitor.timeline.end_step(progress.step)
            return
        loss = strategy.forward_backward(cut(batch, self._parts), measure=measure, vote=self._vote)
        self._record_step_time()
        self._balance.record(self._clock.own_s, batch.num_samples)
        self._settle_checkpoint()
        if not math.isfinite(loss.mean):
            advice = blame_sample(self._parts, progress, batch)
            last, what = self._saver.last(), f"the loss is {loss.mean}"
            raise not_finite_error(what, progress.step + 1, progress.epoch + 1, last, advice)
        # A batch in which every label is ignored says nothing: optimizers would still decay weights and count a step.
        update = strategy.update(progress.step) if loss.count else strategy.skip(progress.step)
        progress.step += 1
        if (scale := self._parts.computation.scale) is not None:
            progress.loss_scale = scale.dump()
        self.is_stepping = False
        progress.batch += 1
        self._window.record_step(progress)
        if taken is not None:
            progress.place = taken.place
            self._newest = newest(self._newest, taken.aside, self._job.data.holdout_size)
        self._votes = progress.take_loss(loss)
        self._monitor.progress(step=progress.step, loss=loss.mean)
        self._record_first_step()
        self._report_update(loss, update, measure)
        self._monitor.timeline.end_step(progress.step)

    def _take_step_alone(self, strategy: TrainsAlone, batch: Batch | Pieces, measure: bool) -> None:
        """Take a step that the others know nothing of, and agree with them where it is time to."""
        progress = self._progress
        self._window.open(progress)
        since_s = time.perf_counter()
        strategy.train_alone(cut(batch, self._parts), step=progress.step, measure=measure)
        self._clock.own_s = time.perf_counter() - since_s
        self._record_step_time()
        progress.step += 1
        progress.batch += 1
        self._is_report_due |= measure
        self._monitor.progress(step=progress.step, loss=None)
        self._record_first_step()
        if progress.step - self.agreed_step >= strategy.sync_every or self._is_last_step():
            self._agree(batch)
        self.is_stepping = False

    def _is_last_step(self) -> bool:
        ends = [end for end in (self._parts.total_steps, self._job.stop.steps) if end is not None]
        return self._progress.step >= min(ends, default=self._progress.step + 1)

    def _agree(self, batch: Batch | Pieces | None) -> None:
        """Have members agree on what they did alone; `batch` is the share of the last step. Collective."""
        strategy, progress, window = self._alone, self._progress, self._window
        assert strategy is not None and window.start is not None
        loss = strategy.agree(self._vote, is_end=self._is_last_step() or batch is None)
        if not math.isfinite(loss.mean):
            before = msgspec.structs.replace(progress, batch=progress.batch - 1)
            advice = blame_sample(self._parts, before, NO_SAMPLES if batch is None else batch)
            what = f"the loss is {loss.mean}"
            raise not_finite_error(what, progress.step, progress.epoch + 1, self._saver.last(), advice)
        step = progress.step - 1
        update = strategy.update(step) if loss.count else strategy.skip(step)
        window.close(progress)
        self._votes = progress.take_loss(loss)
        record_lost_samples(progress, self._parts, self._monitor)
        self._monitor.progress(step=progress.step, loss=loss.mean)
        reach("agree.done")
        self._report_update(loss, update, self._is_report_due)
        self._is_report_due = False

    def _finish_window(self) -> None:
        """Agree on what members did alone before their last team was lost. Collective."""
        if self._alone is None:
            return
        end = self._window.take_up(self._alone, self._progress, self._parts.team)
        if end is not None:
            self._progress = end
            self._agree(NO_SAMPLES)
            self._compare()

    def _record_first_step(self) -> None:
        reach("step.taken")
        if self._is_new_team:
            self._is_new_team = False
            if self._parts.team.is_first:
                self._report(FirstStep(self._progress.step))

    def _report_update(self, loss: Loss, update: Update, is_due: bool) -> None:
        if update.warning and self._parts.team.is_first:  # all workers would say the same
            self._monitor.emit(events.Warned(message=update.warning))
        if is_due or self._callbacks:
            self._report_step(loss, update, is_recorded=is_due)

    def _record_step_time(self) -> None:
        """Tell how long this worker's own part of the step took; the launcher names those who hold the others up."""
        is_due = self._clock.record_agreed()
        # Where a model is spread over workers, waiting for neighbours is in the middle of the computing.
        if is_due and self._parts.team.num_workers > 1 and self._parts.is_elastic:
            self._clock.record_told()
            self._report(StepTime(self._progress.step + 1, self._clock.own_s))

    def _change_shares(self) -> bool:
        """Return whether batches are cut in another way from here on. Collective."""
        parts = self._balance.change(self._parts, self._progress.step, self._monitor)
        self._parts = parts or self._parts
        return parts is not None

    def _after_step(self) -> str | None:
        """Evaluate and save where it is time to, in this order; return why to stop, if there is a reason."""
        job, progress, window = self._job, self._progress, self._window
        if window.is_open:
            return None  # members do nothing together before they agree
        step, reason = progress.step, None
        evaluation = job.evaluation
        if window.passed_step(evaluation.every_steps, progress) or window.passed_epoch(
            evaluation.every_epochs, progress
        ):
            reason = self._evaluate()
        is_due = window.passed_step(job.checkpoint.every_steps, progress)
        if (is_due or self._is_best()) and self._saver.step != step:
            self._save()
        if self._comparison.is_due(step) and self._parts.team.num_workers > 1:
            self._compare()
        self._callbacks.tell_of_checkpoints(self._parts, self._progress.step)
        if self._votes.interrupt or self._is_stopping:
            return "interrupt"
        return reason or self._policy.after_step(step, is_time_up=self._votes.time > 0)

    def _after_epoch(self) -> str | None:
        progress, evaluation = self._progress, self._job.evaluation
        reason = None
        if self._window.is_open:  # it is evaluated where members agree
            progress.epoch, progress.batch = progress.epoch + 1, 0
            return None
        if evaluation.every_epochs and (progress.epoch + 1) % evaluation.every_epochs == 0:
            reason = self._evaluate()
        if self._is_best() and self._saver.step != progress.step:
            self._save()
        if self._is_stopping:
            return "interrupt"  # the epoch is not closed: resuming evaluates it again
        progress.epoch += 1
        progress.batch = 0
        return reason

    def _evaluate(self) -> str | None:
        """Measure on the test set, unless that was just done; return why to stop, if there is a reason."""
        progress, parts, test = self._progress, self._parts, self._parts.test
        if test is None and self._newest is not None:
            test = parts.test_on(self._newest)
        if test is None or progress.evaluated_at == progress.step:
            return None
        self._settle_checkpoint()
        reach("evaluate.begun")
        with self._clock.away(), self._monitor.timeline.inside(Phase.EVALUATE), ready(parts, self._callbacks) as tried:
            metrics = measure(parts, tried.model, test, self._agree_to_stop, tried.take_part)
        reach("evaluate.done")
        if metrics is None:
            return None
        for message in self._without_value.find(metrics, progress.step) if parts.team.is_first else ():
            self._monitor.emit(events.Warned(message=message))
        event = progress.describe_evaluation(metrics, progress.step, self._progress.epoch_number)
        self._monitor.emit(event)
        reason = progress.take_evaluation(metrics, progress.step, self._policy, parts.recipe.schedule)
        self._callbacks.notify("on_evaluation", event, parts, progress.step)
        return reason

    def _is_best(self) -> bool:
        """Whether the model as it is now is the best that was evaluated, and is to be kept for that."""
        return bool(self._job.checkpoint.keep_best) and self._progress.best_step == self._progress.step

    def _save(self, *, at_once: bool = False) -> None:
        """Save a checkpoint, or begin to. Collective: the first worker writes."""
        self._settle_checkpoint()
        progress = self._progress
        progress.elapsed_s = self._clock.elapsed_s
        since_s = time.perf_counter()
        with self._clock.away(), self._monitor.timeline.inside(Phase.SAVE):
            self._saver.begin(progress.step)
            reach("save.begun")
            strategy, best_step = self._parts.strategy, progress.best_step
            if (slices := self._saver.find_slices(strategy, self._parts.team)) is None:
                strategy.consolidate()
            if self._alone is not None:
                self._alone.prepare_save()
            reach("save.consolidated")
            self._compare(is_consolidated=slices is None, common=None if slices is None else slices.common)
            self.report_commit()
            if slices is not None:
                slices = slices.join(self._with_progress(State({}, slices.values)), is_saved=self._parts.team.is_first)
                self._saver.save_together(slices, self._parts, progress, since_s=since_s, at_once=at_once)
            else:
                state = strategy.state_dict()
                if self._parts.team.is_first:
                    require_finite(state, strategy.model, progress, self._saver)
                    self._saver.save(self._with_progress(state), best_step=best_step, since_s=since_s, at_once=at_once)
        if self._callbacks:  # which may change anything
            self._settle_checkpoint()

    def _settle_checkpoint(self) -> None:
        """Return when the state may change: all members have written their slices of a checkpoint. Collective."""
        if self._saver.is_open:
            with self._clock.away(), self._monitor.timeline.inside(Phase.SAVE):
                self._saver.settle()

    def _report_step(self, loss: Loss, update: Update, *, is_recorded: bool) -> None:
        """Record a step, and tell callbacks of it; those hear of every step."""
        progress = self._progress
        speed = self._clock.samples_per_second(progress.samples, is_recorded=is_recorded)
        event = progress.describe_step(loss, update, speed)
        if is_recorded:
            self._monitor.emit(event)
        self._callbacks.notify("on_step", event, self._parts, progress.step)

    def _save_now(self) -> None:
        if self._saver.step != self._progress.step:
            self._save(at_once=True)
        self.wait_for_checkpoint()

    def _vote(self) -> Votes:
        """Return whether this worker wants the run to end after the present step. Asked once in each."""
        if self._alone is None:
            self._clock.record_computed()
        wants_halt = self._should_stop() or self._should_pause()
        return Votes(interrupt=int(wants_halt), time=int(self._policy.is_time_up(self._clock.elapsed_s)))

    def _agree_to_stop(self) -> bool:
        """Return whether any worker was asked to stop. Collective; for what lasts longer than a step."""
        self._is_stopping = self._is_stopping or self._parts.team.any(self._should_stop())
        return self._is_stopping
