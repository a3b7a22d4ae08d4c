"""The training loop. It knows `Strategy`, never a strategy by name."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import torch

from cordee import checkpoint
from cordee.checkpoint import Digest, State
from cordee.cluster.messages import FirstStep, StepTime, TeamReport
from cordee.compute import NO_VOTES, Loss, Votes, evaluate, find_unsound
from cordee.core import Batch
from cordee.core.errors import DataError, StorageError, TrainingError
from cordee.core.fault_points import reach
from cordee.core.seeds import derive_seed
from cordee.core.shards import sum_shards
from cordee.core.stopping import StopPolicy
from cordee.data.online import OnlineStream, Taken, newest
from cordee.monitoring import Monitor, events
from cordee.training.checkpointer import Checkpointer, find_not_finite
from cordee.training.components import Components
from cordee.training.online_data import NextAction, agree_on_action
from cordee.training.progress import Outcome, Progress
from cordee.training.shares import Balance, cut

PACE_EVERY_S = 0.02  # at most so often a worker tells how long its own computing takes: about 0.2 % of the time
LOOK_EVERY_S = 0.05  # for data that keeps arriving


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
        self._agreed_s: float | None = None  # when this worker last had what the others computed, on its own clock
        self._own_s = 0.0  # what it computed since took
        self._next_pace_s = 0.0
        self._balance = Balance.of(parts)
        self._policy = StopPolicy(parts.job.stop)
        self._comparison = checkpoint.Comparison()
        self._compared: Digest | None = None  # the last that was compared
        self._saver = Checkpointer(checkpoints, parts.job.checkpoint, monitor)
        self._votes = NO_VOTES  # of all workers, in the last step
        self._is_stopping = False  # agreed on by all workers
        self._newest: Batch | None = None  # samples of growing data that were set aside
        self._progress = Progress()
        self._base_elapsed_s = 0.0
        self._started_s = time.perf_counter()
        self._away_s = 0.0  # spent evaluating and saving since `run` was called
        self._training_s = 0.0  # spent in earlier calls of `run` but that
        self._start_samples = 0
        self._window = (0, self._started_s)  # samples and time at the last step event

    @property
    def progress(self) -> Progress:
        return self._progress

    def enter(self, parts: Components, state: State | None) -> None:
        """Continue as a member of another team from `state`, which stays as it is, or begin. Collective."""
        self._parts = parts
        if state is not None:
            self.resume(state)
        self._votes, self._is_stopping, self.is_stepping, self._is_new_team = NO_VOTES, False, False, True
        self._agreed_s, self._balance = None, Balance.of(parts)
        reach("enter.resumed")
        self._comparison.begin()
        self._compare()
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
        self._policy.patience = self._progress.patience

    def wait_for_checkpoint(self) -> None:
        """Wait until no checkpoint is being written."""
        self._saver.wait()

    def state(self) -> State:
        """Return all that another worker needs to be where this one is."""
        return self._with_progress(self._parts.strategy.state_dict())

    def _with_progress(self, state: State) -> State:
        tensors = dict(state.tensors)
        if self._newest is not None:
            tensors |= {"stream.inputs": self._newest.inputs, "stream.targets": self._newest.targets}
        return State(tensors, {**state.values, "progress": msgspec.to_builtins(self._progress)})

    def _compare(self, *, is_consolidated: bool = False) -> None:
        """Compare a digest of all that this worker continues from with the others'. Collective.

        Raises TrainingError, on every member, if members that should have the same do not.
        """
        team = self._parts.team
        reach("compare.begun")
        digest = partial(self._digest, is_consolidated)
        self._compared = self._comparison.compare(self._progress.step, digest, team.gather_rows, team.numbers)
        reach("compare.done")

    def _digest(self, is_consolidated: bool) -> Digest:
        model = self._parts.strategy.model
        if self._parts.is_elastic:
            return checkpoint.digest_state(self.state(), checkpoint.buffer_names(model))
        # Each worker has a part of the optimizer, but when it is about to save the whole model.
        weights = checkpoint.model_state(model) if is_consolidated else {}
        state = self._with_progress(State.join(model=State(weights, {})))
        return checkpoint.digest_state(state, checkpoint.buffer_names(model) if is_consolidated else ())

    def report_commit(self) -> None:
        """Record where this worker is and what it was compared by, for `cordee doctor --run`. Local."""
        progress = self._progress
        assert self._compared is not None
        self._monitor.emit(
            events.Commit(
                step=progress.step,
                epoch=progress.epoch,
                batch=progress.batch,
                samples=progress.samples,
                generation=self._parts.team.generation,
                digest=self._compared.describe(),
            )
        )

    def resume(self, state: State) -> None:
        """Continue from a checkpoint, in the middle of an epoch where it was made there."""
        before = self._progress.samples
        self._progress = msgspec.convert(state.values["progress"], Progress)
        self._policy.patience = self._progress.patience
        self._start_samples += self._progress.samples - before
        stream = state.part("stream").tensors
        self._newest = Batch(stream["inputs"], stream["targets"]) if stream else None
        self._parts.strategy.load_state_dict(state)
        self._saver.step = self._progress.step

    def run(self, is_end: Callable[[], bool] = lambda: True) -> Outcome | None:
        """Train to the end. Raises TrainingError when training cannot continue; nothing saved before is lost.

        When a member of the team asked for a halt after a step, `is_end` says whether the run ends there. If it
        does not, None is returned, and a later call continues. Raises StorageError when the weights it ended
        with could not be saved.
        """
        progress = self._progress
        self._base_elapsed_s = progress.elapsed_s
        self._started_s = time.perf_counter()
        self._window = (progress.samples, self._started_s)
        try:
            stopped_by = self._why_stopped_before()
            if stopped_by is None and not self._is_done():
                stopped_by = self._after_step() if progress.step else None  # what a lost team left undone
                stopped_by = stopped_by or (self._train_online() if self._parts.is_online else self._train())
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
            if self._saver.step != progress.step:
                self._save(at_once=True)
            with self._away():
                self.wait_for_checkpoint()
            if self._saver.problem is not None:
                raise StorageError(self._weights_lost()) from self._saver.problem
        finally:
            progress.elapsed_s = self._elapsed_s()
            self._training_s += time.perf_counter() - self._started_s - self._away_s
            self._away_s = 0.0
        trained = progress.samples - self._start_samples
        speed = trained / self._training_s if trained else None
        return Outcome(stopped_by, progress.metrics, speed, self._saver.stall_s)

    def _why_stopped_before(self) -> str | None:
        """Return why a resumed run had ended already: continuing would give other weights than it ended with."""
        progress = self._progress
        if progress.step == 0:
            return None
        if progress.metrics is not None and progress.evaluated_at == progress.step:
            reason = self._policy.stop_reason(progress.metrics.loss, progress.metrics.accuracy)
            if reason is not None:
                return reason
        return self._policy.after_step(progress.step, is_time_up=self._policy.is_time_up(self._base_elapsed_s))

    def _train(self) -> str | None:
        progress = self._progress
        while not self._is_done():
            self._parts.strategy.model.train()
            if progress.batch == 0:
                progress.loss_sum, progress.loss_count = 0.0, 0
            is_exhausted = False
            with contextlib.closing(self._parts.train.batches(progress.epoch, progress.batch)) as batches:
                for batch in batches:
                    self._take_step(batch)
                    if (reason := self._after_step()) is not None:
                        return reason
                    if self._is_done() or self._change_shares():
                        break
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
        return None

    def _train_online(self) -> str | None:
        """Train on what arrives until it ends, or there is a reason to stop."""
        progress = self._progress
        with contextlib.closing(self._parts.open_stream(progress.place)) as stream:
            while not self._is_done():
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
        since_s, idle_s = time.perf_counter(), self._job.stop.idle_s
        with self._away():
            while True:
                waited_s = time.perf_counter() - since_s
                found = agree_on_action(
                    stream,
                    self._parts.team,
                    wants_halt=self._should_stop() or self._should_pause(),
                    is_time_up=self._policy.is_time_up(self._elapsed_s()),
                    is_idle=idle_s is not None and waited_s >= idle_s,
                )
                if found.action != "wait":
                    return found
                time.sleep(LOOK_EVERY_S)

    def _take_step(self, batch: Batch, taken: Taken | None = None) -> None:
        progress, strategy, monitoring = self._progress, self._parts.strategy, self._job.monitoring
        measure = progress.step % monitoring.every_steps == 0
        self._seed_step(progress.step)
        self.is_stepping = True
        reach("step.begun")
        loss = strategy.forward_backward(cut(batch, self._parts), measure=measure, vote=self._vote)
        self._record_step_time()
        self._balance.record(self._own_s, batch.num_samples)
        if not math.isfinite(loss.mean):
            advice = self._blame_sample(batch)
            how = f"is {loss.mean}"
            raise TrainingError(self._not_finite("the loss", how, progress.step + 1, progress.epoch + 1, advice))
        # A batch in which every label is ignored says nothing: optimizers would still decay weights and count a step.
        update = strategy.update(progress.step) if loss.count else strategy.skip(progress.step)
        progress.step += 1
        self.is_stepping = False
        progress.batch += 1
        if taken is not None:
            progress.place = taken.place
            self._newest = newest(self._newest, taken.aside, self._job.data.holdout_size)
        progress.samples += loss.num_samples
        progress.loss_sum += loss.mean * loss.count
        progress.loss_count += loss.count
        self._votes = loss.votes
        self._monitor.progress(step=progress.step, loss=loss.mean)
        reach("step.taken")
        if self._is_new_team:
            self._is_new_team = False
            if self._parts.team.is_first:
                self._report(FirstStep(progress.step))
        if update.warning and self._parts.team.is_first:  # all workers would say the same
            self._monitor.emit(events.Warned(message=update.warning))
        if measure:
            self._report_step(loss, update.lr, update.gradient_norm)

    def _record_step_time(self) -> None:
        """Tell how long this worker's own part of the step took; the launcher names those who hold the others up."""
        now_s = time.perf_counter()
        is_known, self._agreed_s = self._agreed_s is not None, now_s - self._away_s
        # Where a model is spread over workers, waiting for neighbours is in the middle of the computing.
        if is_known and now_s >= self._next_pace_s and self._parts.team.num_workers > 1 and self._parts.is_elastic:
            self._next_pace_s = now_s + PACE_EVERY_S
            self._report(StepTime(self._progress.step + 1, self._own_s))

    def _change_shares(self) -> bool:
        """Return whether batches are cut in another way from here on. Collective."""
        parts = self._balance.change(self._parts, self._progress.step, self._monitor)
        self._parts = parts or self._parts
        return parts is not None

    def _after_step(self) -> str | None:
        """Evaluate and save where it is time to, in this order; return why to stop, if there is a reason."""
        job, step = self._job, self._progress.step
        reason = None
        if job.evaluation.every_steps and step % job.evaluation.every_steps == 0:
            reason = self._evaluate()
        is_due = job.checkpoint.every_steps and step % job.checkpoint.every_steps == 0
        if (is_due or self._is_best()) and self._saver.step != step:
            self._save()
        if self._comparison.is_due(step) and self._parts.team.num_workers > 1:
            self._compare()
        if self._votes.interrupt or self._is_stopping:
            return "interrupt"
        return reason or self._policy.after_step(step, is_time_up=self._votes.time > 0)

    def _after_epoch(self) -> str | None:
        progress, evaluation = self._progress, self._job.evaluation
        reason = None
        if evaluation.every_epochs and (progress.epoch + 1) % evaluation.every_epochs == 0:
            reason = self._evaluate()
        if self._is_best() and self._saver.step != progress.step:
            self._save()
        if self._is_stopping:
            return "interrupt"  # the epoch is not closed: resuming evaluates it again
        progress.epoch += 1
        progress.batch = 0
        return reason

    def _is_done(self) -> bool:
        total, epochs = self._parts.total_steps, self._job.training.num_epochs
        if total is not None and self._progress.step >= total:
            return self._job.training.steps is not None or self._progress.epoch >= (epochs or 0)
        return epochs is not None and self._progress.epoch >= epochs

    def _evaluate(self) -> str | None:
        """Measure on the test set, unless that was just done; return why to stop, if there is a reason."""
        progress, parts = self._progress, self._parts
        test = parts.test
        if test is None and self._newest is not None:
            test = parts.test_on(self._newest)
        if test is None or progress.evaluated_at == progress.step:
            return None
        reach("evaluate.begun")
        with self._away(), contextlib.closing(test.batches(0)) as batches:
            parts.strategy.consolidate()
            metrics = evaluate(
                parts.strategy.model,
                batches,
                parts.computation,
                num_classes=parts.splits.num_classes,
                should_stop=self._agree_to_stop,
                num_parts=parts.test_shards.num_held,
                combine=lambda values: sum_shards(values, parts.test_shards, parts.team.sum),
            )
        reach("evaluate.done")
        if metrics is None:
            return None
        self._monitor.emit(progress.describe_evaluation(metrics, progress.step, self._epoch_number()))
        return progress.take_evaluation(metrics, progress.step, self._policy)

    def _is_best(self) -> bool:
        """Whether the model as it is now is the best that was evaluated, and is to be kept for that."""
        return self._job.checkpoint.keep_best and self._progress.best_step == self._progress.step

    def _save(self, *, at_once: bool = False) -> None:
        """Save a checkpoint, or begin to. Collective: the first worker writes."""
        progress = self._progress
        progress.elapsed_s = self._elapsed_s()
        since_s = time.perf_counter()
        with self._away():
            self._saver.begin(progress.step)
            reach("save.begun")
            self._parts.strategy.consolidate()
            reach("save.consolidated")
            self._compare(is_consolidated=True)
            self.report_commit()
            state = self._parts.strategy.state_dict()
            if not self._parts.team.is_first:
                return
            self._refuse_not_finite(state)
            best_step = progress.best_step
            self._saver.save(self._with_progress(state), best_step=best_step, since_s=since_s, at_once=at_once)

    def _weights_lost(self) -> str:
        kept = self._saver.last()
        start = f"continues after {kept}" if kept else "starts again"
        return (
            f"step {self._progress.step} was reached, but its weights could not be saved: {self._saver.problem}. "
            f"Free some space, then --resume {start}"
        )

    def _report_step(self, loss: Loss, lr: float, gradient_norm: float | None) -> None:
        progress = self._progress
        samples, since_s = self._window
        now_s = time.perf_counter()
        self._window = (progress.samples, now_s)
        self._monitor.emit(
            events.Step(
                step=progress.step,
                epoch=self._epoch_number(),
                loss=loss.mean if loss.count else None,
                accuracy=loss.accuracy,
                lr=lr,
                gradient_norm=gradient_norm,
                samples=progress.samples,
                samples_per_second=(progress.samples - samples) / (now_s - since_s),
            )
        )

    def _seed_step(self, step: int) -> None:
        # In reproducible mode shards derive their own streams from this one (strategies/shards.py).
        place = () if self._job.training.reproducible else (self._parts.shards.first,)
        seed = derive_seed(self._job.seed, "step", step, *place)
        torch.default_generator.manual_seed(seed)
        if self._parts.computation.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _vote(self) -> Votes:
        """Return whether this worker wants the run to end after the present step. Asked once in each."""
        self._own_s = time.perf_counter() - self._away_s - (self._agreed_s or 0.0)
        wants_halt = self._should_stop() or self._should_pause()
        return Votes(interrupt=int(wants_halt), time=int(self._policy.is_time_up(self._elapsed_s())))

    def _agree_to_stop(self) -> bool:
        """Return whether any worker was asked to stop. Collective; for what lasts longer than a step."""
        self._is_stopping = self._is_stopping or self._parts.team.any(self._should_stop())
        return self._is_stopping

    def _elapsed_s(self) -> float:
        return self._base_elapsed_s + time.perf_counter() - self._started_s

    @contextlib.contextmanager
    def _away(self) -> Iterator[None]:
        """Keep the time spent inside out of the training throughput."""
        started = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - started
            self._away_s += spent
            self._window = (self._window[0], self._window[1] + spent)

    def _epoch_number(self) -> int:
        """Return the present epoch, counted from 1, or the last one where none is."""
        return self._progress.epoch + 1 if self._progress.batch else max(1, self._progress.epoch)

    def _refuse_not_finite(self, state: State) -> None:
        name = find_not_finite(state, [name for name, _ in self._parts.strategy.model.named_parameters()])
        if name is not None:
            how = "has values that are not finite"
            raise TrainingError(self._not_finite(f"'{name}'", how, self._progress.step, self._epoch_number()))

    def _blame_sample(self, batch: Batch) -> str | None:
        """Return which sample of the batch, on which worker, has values that are not finite. Collective."""
        found = find_unsound(batch)
        code = -1
        if found is not None:
            numbers = self._parts.train.sample_numbers(self._progress.epoch, self._progress.batch)
            row, part = found
            code = 2 * (row if numbers is None else numbers[row]) + int(part == "target")
        codes = self._parts.team.gather(code)
        worker = next((index for index, code in enumerate(codes) if code >= 0), None)
        if worker is None:
            return None
        part = "target" if codes[worker] % 2 else "input"
        is_numbered = self._parts.splits.train.num_samples is not None
        place = "the training set" if is_numbered else f"the share of worker {worker} in this batch"
        return (
            f"The {part} of sample {codes[worker] // 2} of {place}, which worker {worker} computed, has a value that "
            "is infinite or not a number: remove or fix such samples"
        )

    def _not_finite(self, what: str, how: str, step: int, epoch: int, advice: str | None = None) -> str:
        last = f"the last checkpoint is {kept}" if (kept := self._saver.last()) else "there is no checkpoint yet"
        usual = "Lower optimizer.lr, add a warm-up (schedule.warmup_steps), or set training.clip_norm = 1.0"
        return f"{what} {how} at step {step} (epoch {epoch}); {last}. {advice or usual}"
