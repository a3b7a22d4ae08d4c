"""What a dispatched run says of itself: when it starts, and in its summary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from cordee import checkpoint
from cordee.monitoring import AnyEvent, Summary
from cordee.runs.dispatched.facts import RunFacts
from cordee.runs.dispatched.plan import RunPlan
from cordee.runs.dispatched.state import Outcome, RunState
from cordee.training import progress as training
from cordee.training.progress import Progress


class Summariser:
    """Tells of one run; `emit` takes an event for its file."""

    def __init__(
        self,
        run_dir: Path,
        plan: RunPlan,
        facts: RunFacts,
        progress: Progress,
        state: RunState,
        emit: Callable[[AnyEvent], None],
    ) -> None:
        self._run_dir = run_dir
        self._plan = plan
        self._facts = facts
        self._progress = progress
        self._state = state
        self._emit = emit

    def announce(self) -> None:
        """Tell that the run starts."""
        place = {"run_dir": str(self._run_dir), "start_step": self._progress.step}
        self._emit(msgspec.structs.replace(self._facts.description, servers=self._plan.settings.servers, **place))

    def summarise_ended(self) -> Summary | None:
        """Return the summary of a resumed run that had ended already: continuing would give other weights."""
        plan, progress = self._plan, self._progress
        reason = None
        is_measured = progress.metrics is not None and progress.evaluated_at == progress.step
        if progress.metrics is not None and is_measured:
            reason = plan.policy.stop_reason(progress.metrics.get)
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
        trained = self._progress.samples - self._state.samples_before
        return self._sum_up(outcome, trained / training_s if trained and training_s else None)

    def _sum_up(self, outcome: Outcome, samples_per_second: float | None) -> Summary:
        plan, progress, state = self._plan, self._progress, self._state
        is_measured = progress.evaluated_at == progress.step
        ended = training.Outcome(
            stopped_by=outcome.stopped_by or ("steps" if plan.is_ended_by_steps else None),
            metrics=outcome.metrics if is_measured else None,
            samples_per_second=samples_per_second,
            stall_s=outcome.stall_s,
        )
        summary = training.summarise(
            self._facts.description,
            progress,
            ended,
            started=state.started,
            num_batches=-(-plan.num_samples // plan.job.training.batch_size),
        )
        return msgspec.structs.replace(
            summary,
            weights_sha256=outcome.weights_sha256 or None,
            peak_memory_bytes=state.peak_memory_bytes or None,
            recoveries=state.losses.num_recoveries,
            staleness={str(age): count for age, count in enumerate(outcome.ages) if count} or None,
        )
