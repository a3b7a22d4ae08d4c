"""What a served run says of itself: when it starts, and in its summary."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from cordee import checkpoint
from cordee.monitoring import AnyEvent, Summary, events
from cordee.monitoring.summary import Status
from cordee.runs.dispatched.facts import RunFacts
from cordee.runs.dispatched.plan import RunPlan
from cordee.runs.dispatched.state import Outcome, RunState
from cordee.training.progress import Progress
from cordee.version import __version__


class Summariser:
    """Tells of one run; `emit` takes an event for its file."""

    def __init__(
        self,
        run_dir: Path,
        plan: RunPlan,
        facts: RunFacts,
        progress: Progress,
        memory: RunState,
        emit: Callable[[AnyEvent], None],
    ) -> None:
        self._run_dir = run_dir
        self._plan = plan
        self._facts = facts
        self._progress = progress
        self._memory = memory
        self._emit = emit

    def announce(self) -> None:
        """Tell that the run starts."""
        place = {"run_dir": str(self._run_dir), "start_step": self._progress.step}
        self._emit(msgspec.structs.replace(self._facts.description, servers=self._plan.settings.servers, **place))

    def summarise_ended(self) -> Summary | None:
        """Return the summary of a resumed run that had ended already: going on would give other weights."""
        plan, progress = self._plan, self._progress
        reason = None
        is_measured = progress.metrics is not None and progress.evaluated_at == progress.step
        if progress.metrics is not None and is_measured:
            reason = plan.policy.verdict(progress.metrics.loss, progress.metrics.accuracy)
        if progress.step and plan.policy.is_time_up(progress.elapsed_s):
            reason = reason or "time"
        if reason is None and not (plan.is_at_end and (is_measured or not self._facts.has_test)):
            return None
        loaded = checkpoint.load_newest(self._run_dir / "checkpoints")
        assert loaded is not None
        outcome = Outcome(stopped_by=reason, metrics=progress.metrics)
        outcome.weights_sha256 = checkpoint.weights_sha256(loaded.state.part("model").tensors)
        self.announce()
        return self._sum_up(outcome, None)

    def summarise(self, outcome: Outcome, training_s: float | None) -> Summary:
        """Return the summary of a run that ended as `outcome` says, after so many seconds of training."""
        trained = self._progress.samples - self._memory.samples_before
        summary = self._sum_up(outcome, trained / training_s if trained and training_s else None)
        if summary.staleness:
            self._emit(events.Staleness(ages=summary.staleness))
        return summary

    def _sum_up(self, outcome: Outcome, samples_per_second: float | None) -> Summary:
        job, progress, described = self._plan.job, self._progress, self._facts.description
        metrics = outcome.metrics if outcome.metrics and progress.evaluated_at == progress.step else None
        stopped_by = outcome.stopped_by or ("steps" if self._plan.is_cut_short else None)
        status: Status = "interrupted" if stopped_by == "interrupt" else "stopped" if stopped_by else "completed"
        ages = {str(age): count for age, count in enumerate(outcome.ages) if count}
        return Summary(
            status=status,
            name=job.name,
            strategy=job.strategy.name,
            workers=job.strategy.workers,
            device=described.device,
            parameters=described.parameters or 0,
            trainable_parameters=described.trainable_parameters,
            steps=progress.step,
            epochs=progress.epochs_finished(-(-self._plan.num_samples // job.training.batch_size)),
            samples=progress.samples,
            wall_seconds=progress.elapsed_s,
            samples_per_second=samples_per_second,
            checkpoint_stall_seconds=outcome.stall_s,
            best_step=progress.best_step if progress.best_step >= 0 else None,
            step_seconds=progress.samples / progress.step / samples_per_second if samples_per_second else None,
            peak_memory_bytes=self._memory.peak_memory_bytes or None,
            train_loss=progress.train_loss,
            test_loss=metrics.loss if metrics else None,
            test_accuracy=metrics.accuracy if metrics else None,
            test_top5_accuracy=metrics.top5_accuracy if metrics else None,
            weights_sha256=outcome.weights_sha256 or None,
            recoveries=self._memory.losses.num_recoveries,
            updates_lost=progress.updates_lost,
            staleness=ages or None,
            stopped_by=stopped_by,
            cordee_version=__version__,
            torch_version=str(torch.__version__),
            started=self._memory.started,
            ended=time.time(),
        )
