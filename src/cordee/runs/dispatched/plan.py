"""When a dispatched run reports, evaluates, saves and ends: pure decisions over the steps of its ledger.

A step of the job is a global batch. A step of the ledger is an exchange: up to `push_every` steps of the job.
"""

from __future__ import annotations

from dataclasses import dataclass

from cordee.compute.schedules import PlateauSchedule, Schedule, constant
from cordee.core import Job
from cordee.core.stopping import StopPolicy
from cordee.data import Exchanges
from cordee.strategies.parameter_server.settings import ParameterServerSettings


@dataclass(frozen=True)
class RunPlan:
    """The steps of a run, and what happens after each."""

    job: Job
    settings: ParameterServerSettings
    num_samples: int
    total_steps: int  # of the job
    policy: StopPolicy
    counts_classes: bool
    start: int = 0  # steps of the job that were taken before
    dtype: str = "float32"  # of the parameters
    schedule: Schedule = constant()  # noqa: RUF009 - a function

    @property
    def exchanges(self) -> Exchanges:
        """The steps of the ledger, up to the last step of the job or `stop.steps`."""
        limit, training = self.job.stop.steps, self.job.training
        last = self.total_steps if limit is None else min(self.total_steps, limit)
        return Exchanges(self.num_samples, training.batch_size, last, self.start, self.settings.push_every)

    @property
    def num_steps(self) -> int:
        """Steps of the ledger."""
        return self.exchanges.num_steps

    @property
    def is_at_end(self) -> bool:
        """Whether there is nothing to do."""
        return self.start >= self.exchanges.last

    @property
    def is_ended_by_steps(self) -> bool:
        """Whether the run ends where `stop.steps` says, which may be its last step."""
        limit = self.job.stop.steps
        return limit is not None and limit <= self.total_steps

    @property
    def clip_norm(self) -> float:
        """The norm that the servers clip to, once they have the gradient of a whole step."""
        return self.settings.clip_norm if self.settings.is_synchronous else 0.0

    @property
    def max_staleness(self) -> int | None:
        return self.settings.max_staleness

    @property
    def drop_late_s(self) -> float:
        return self.settings.drop_late

    @property
    def failure_timeout_s(self) -> float:
        return self.job.cluster.failure_timeout_s

    @property
    def evaluation_may_stop(self) -> bool:
        """Whether an evaluation may end the run, or change the rate: training then waits for it."""
        stop = self.job.stop
        if isinstance(self.schedule, PlateauSchedule):
            return True  # the rates that follow depend on it
        return any(goal is not None for goal in (stop.accuracy, stop.loss, stop.patience)) or bool(stop.metrics)

    def steps_before(self, step: int) -> int:
        """Return how many steps of the job are taken before `step` of the ledger."""
        return self.exchanges.batches_before(step)

    def place_before(self, step: int) -> tuple[int, int]:
        """Return the epoch, and the batches used of it, before `step` of the ledger."""
        return divmod(self.steps_before(step), self.exchanges.batches_per_epoch)

    def epoch_of(self, step: int) -> int:
        return self.exchanges.samples(step)[0]

    def is_first_of_epoch(self, step: int) -> bool:
        return self.exchanges.samples(step)[1] == 0

    def reports(self, step: int) -> bool:
        """Whether there is an event for `step` of the ledger."""
        return is_due(*self.exchanges.batches(step), self.job.monitoring.every_steps)

    def evaluates(self, step: int, *, is_last: bool = False) -> bool:
        """Whether the model is measured after `step` steps of the ledger."""
        evaluation = self.job.evaluation
        epoch, batch = self.place_before(step)
        by_epoch = batch == 0 and evaluation.every_epochs and epoch % evaluation.every_epochs == 0
        return is_last or (step > 0 and bool(by_epoch)) or self._crosses(step, evaluation.every_steps)

    def saves(self, step: int, *, is_last: bool = False) -> bool:
        return is_last or self._crosses(step, self.job.checkpoint.every_steps)

    def saves_residuals(self, step: int, *, is_last: bool = False) -> bool:
        """Whether what compression left out may have to be saved after `step` steps of the ledger."""
        if self.settings.compression == "none":
            return False
        may_be_best = self.job.checkpoint.keep_best and self.evaluates(step, is_last=is_last)
        return self.saves(step, is_last=is_last) or bool(may_be_best)

    def next_barrier(self, step: int) -> int:
        """Return the next step of the ledger after which everybody pauses for a snapshot."""
        for candidate in range(step + 1, self.num_steps):
            if self.evaluates(candidate) or self.saves(candidate):
                return candidate
        return self.num_steps

    def _crosses(self, step: int, every: int) -> bool:
        if not every or step <= 0:
            return False
        return self.steps_before(step) // every > self.steps_before(step - 1) // every


def is_due(start: int, stop: int, every: int) -> bool:
    """Whether a multiple of `every` is among the steps [start, stop)."""
    return -(-start // every) * every < stop
