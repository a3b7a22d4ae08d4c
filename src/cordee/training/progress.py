"""Where a run is, how it ended, and the summary that is made of both."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import msgspec

from cordee.checkpoint import State
from cordee.compute import Loss, Metrics, Schedule, Votes
from cordee.compute.schedules import PlateauSchedule
from cordee.core import Batch, tree
from cordee.core.stopping import Patience, StopPolicy
from cordee.data import Place
from cordee.monitoring.events import Evaluation, RunStarted, Step
from cordee.monitoring.summary import Status, Summary
from cordee.strategies.strategy import Update


class Progress(msgspec.Struct):
    """Where a run is. Saved with each checkpoint; with the job it determines everything that follows."""

    step: int = 0  # optimizer steps taken
    epoch: int = 0  # epochs begun before the present one
    batch: int = 0  # batches of the present epoch already used
    samples: int = 0
    samples_lost: int = 0  # that a worker which was lost had trained on alone
    elapsed_s: float = 0.0  # over all attempts
    loss_sum: float = 0.0  # over the present epoch
    loss_count: float = 0.0
    evaluated_at: int = -1  # step of the last evaluation
    agreed_before: tuple[int, int] | None = None  # steps and epochs before members took steps alone; None: they do not
    metrics: Metrics | None = None  # what it measured
    best_step: int = -1  # of the best evaluation
    best: float | None = None  # its score
    updates_lost: int = 0  # that are in a part of the parameters only: a server was lost with the others
    residuals_lost: int = 0  # workers that were lost with what compression had left out of their gradients
    place: Place = Place()  # in data that grows
    patience: Patience = msgspec.field(default_factory=Patience)
    plateau: dict[str, float] = {}  # where a schedule is that follows a metric
    loss_scale: dict[str, float] = {}  # with fp16

    @property
    def train_loss(self) -> float | None:
        """The mean over the present epoch so far."""
        return self.loss_sum / self.loss_count if self.loss_count else None

    @property
    def epoch_number(self) -> int:
        """The present epoch, counted from 1, or the last one where none is."""
        return self.epoch + 1 if self.batch else max(1, self.epoch)

    def take_loss(self, loss: Loss) -> Votes:
        """Count what all workers computed in a step; return their votes."""
        self.samples += loss.num_samples
        self.loss_sum += loss.mean * loss.count
        self.loss_count += loss.count
        return loss.votes

    def describe_step(self, loss: Loss, update: Update, samples_per_second: float) -> Step:
        """Return the event of the step that was taken last."""
        return Step(
            step=self.step,
            epoch=self.epoch_number,
            loss=loss.mean if loss.count else None,
            accuracy=loss.accuracy,
            lr=update.lr,
            gradient_norm=update.gradient_norm,
            samples=self.samples,
            samples_lost=self.samples_lost or None,
            samples_per_second=samples_per_second,
        )

    def epochs_finished(self, num_batches: int | None) -> int:
        """How many epochs are over, each of `num_batches` (None: not known): the last may not be closed yet."""
        is_over = num_batches is not None and self.batch >= num_batches
        return self.epoch + int(is_over)

    def take_evaluation(self, metrics: Metrics, step: int, policy: StopPolicy, schedule: Schedule) -> str | None:
        """Record what was measured at `step`; return why the run should stop, if it should."""
        if isinstance(schedule, PlateauSchedule):
            schedule.load(self.plateau)
            schedule.record(metrics.get(schedule.metric))
            self.plateau = schedule.dump()
        self.metrics, self.evaluated_at = metrics, step
        score = policy.score(metrics.get, policy.best_by or policy.settings.patience_metric)
        # A run of an earlier version kept the score with its patience only.
        best = self.patience.best if self.best is None else self.best
        if not math.isnan(score) and (best is None or score > best):
            self.best, self.best_step = score, step
        reason = policy.after_evaluation(metrics.get)
        self.patience = policy.patience
        return reason

    def describe_evaluation(self, metrics: Metrics, step: int, epoch: int) -> Evaluation:
        """Return the event that tells what was measured at `step`, in `epoch`."""
        return Evaluation(
            step=step,
            epoch=epoch,
            train_loss=self.train_loss,
            test_loss=metrics.loss,
            test_accuracy=metrics.accuracy,
            test_top5_accuracy=metrics.top5_accuracy,
            metrics=dict(metrics.named),
            samples=metrics.num_samples,
            seconds=metrics.seconds,
        )


def step_of(state: State) -> int:
    """Return how many steps had been taken when `state` was made."""
    step: int = state.values["progress"]["step"]
    return step


@dataclass(frozen=True)
class Outcome:
    """How training ended. `stopped_by` is None when all steps were taken."""

    stopped_by: str | None
    metrics: Metrics | None
    samples_per_second: float | None  # None: no step was left to take
    stall_s: float  # that training stood still for checkpoints
    weights_sha256: str | None = None  # where the model was not put together


def summarise(
    run: RunStarted,
    progress: Progress,
    outcome: Outcome | None,
    *,
    started: float,
    num_batches: int | None = None,
    error: BaseException | None = None,
) -> Summary:
    """Return the summary of a run that got as far as `progress`, in epochs of `num_batches`.

    Without an `outcome` training did not end, because of `error`. Every summary is made here. Who knows more, of the
    weights, of the processes or of what was predicted, adds that to it.
    """
    status, stopped_by = _status(outcome, error)
    metrics = outcome.metrics if outcome else None
    speed = outcome.samples_per_second if outcome else None
    return Summary(
        status=status,
        name=run.name,
        strategy=run.strategy,
        workers=run.workers,
        device=run.device,
        parameters=run.parameters or 0,
        trainable_parameters=run.trainable_parameters,
        steps=progress.step,
        epochs=progress.epochs_finished(num_batches),
        samples=progress.samples,
        samples_lost=progress.samples_lost,
        wall_seconds=progress.elapsed_s,
        samples_per_second=speed,
        step_seconds=progress.samples / progress.step / speed if speed and progress.step else None,
        checkpoint_stall_seconds=outcome.stall_s if outcome else None,
        best_step=progress.best_step if progress.best_step >= 0 else None,
        train_loss=progress.train_loss if outcome else None,
        test_loss=metrics.loss if metrics else None,
        test_accuracy=metrics.accuracy if metrics else None,
        test_top5_accuracy=metrics.top5_accuracy if metrics else None,
        metrics=dict(metrics.named) if metrics else {},
        updates_lost=progress.updates_lost,
        residuals_lost=progress.residuals_lost,
        stopped_by=stopped_by,
        error=str(error) if status == "failed" else None,
        cordee_version=run.cordee_version,
        torch_version=run.torch_version,
        started=started,
        ended=time.time(),
    )


def _status(outcome: Outcome | None, error: BaseException | None) -> tuple[Status, str | None]:
    if isinstance(error, KeyboardInterrupt) or (outcome is not None and outcome.stopped_by == "interrupt"):
        return "interrupted", "interrupt"
    if outcome is None:
        return "failed", "error"
    return ("stopped" if outcome.stopped_by else "completed"), outcome.stopped_by


def add_progress(state: State, progress: Progress, newest: Batch | None) -> State:
    """Return a strategy's state with the progress of the run and the samples of growing data that were set aside."""
    tensors = dict(state.tensors)
    if newest is not None:
        for part, values in zip(newest._fields, newest, strict=True):
            tensors |= {f"stream.{name}": leaf for name, leaf in tree.named_leaves(values, part)}
    return State(tensors, {**state.values, "progress": msgspec.to_builtins(progress)})


def read_newest(state: State, example: Batch) -> Batch | None:
    """Return the samples that `add_progress` put into a state, in the form of `example`."""
    stream = state.part("stream").tensors
    if not stream:
        return None
    parts = zip(example._fields, example, strict=True)
    return Batch(*(tree.from_names(like, part, stream) for part, like in parts))
