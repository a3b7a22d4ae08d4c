"""When a served run reports, evaluates, saves and ends: pure decisions over the steps of its ledger.

A step of the ledger is an exchange: `push_every` steps of the job.
"""

from __future__ import annotations

from dataclasses import dataclass

from cordee.core import Job
from cordee.core.stopping import StopPolicy
from cordee.data.order import count_batches
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

    @property
    def push_every(self) -> int:
        return self.settings.push_every

    @property
    def batch_size(self) -> int:
        """Samples of a step of the ledger."""
        return min(self.job.training.batch_size * self.push_every, self.num_samples)

    @property
    def steps_per_epoch(self) -> int:
        return count_batches(self.num_samples, self.batch_size)

    @property
    def num_steps(self) -> int:
        """Steps of the ledger: all epochs, or enough for the job's steps."""
        limit = self.job.stop.steps
        if self.job.training.steps is None:
            assert self.job.training.num_epochs is not None
            num_steps = self.job.training.num_epochs * self.steps_per_epoch
        else:
            num_steps = -(-self.total_steps // self.push_every)
        return num_steps if limit is None else min(num_steps, -(-limit // self.push_every))

    @property
    def is_cut_short(self) -> bool:
        """Whether `stop.steps` ends the run before its last step."""
        return self.job.stop.steps is not None and self.steps_after(self.num_steps) < self.total_steps

    @property
    def clip_norm(self) -> float:
        """The norm that the servers clip to, once they have the gradient of a whole step."""
        return self.settings.clip_norm if self.settings.is_in_step else 0.0

    @property
    def max_staleness(self) -> int | None:
        return self.settings.max_staleness

    @property
    def drop_late_s(self) -> float:
        return self.settings.drop_late

    @property
    def min_workers(self) -> int:
        """With fewer, nothing is handed out."""
        return self.job.cluster.min_workers

    @property
    def failure_timeout_s(self) -> float:
        return self.job.cluster.failure_timeout_s

    @property
    def report_every(self) -> int:
        return max(1, self.job.monitoring.every_steps // self.push_every)

    @property
    def has_verdicts(self) -> bool:
        """Whether an evaluation may end the run: training then waits for it."""
        stop = self.job.stop
        return stop.accuracy is not None or stop.loss is not None or stop.patience is not None

    def first_step(self, epoch: int, batch: int) -> int:
        """Return the step of the ledger that comes after `batch` batches of an epoch of the job."""
        return epoch * self.steps_per_epoch + -(-batch // self.push_every)

    def steps_after(self, step: int) -> int:
        """Return how many steps of the job are taken after `step` steps of the ledger."""
        epoch, rest = divmod(step, self.steps_per_epoch)
        per_epoch = count_batches(self.num_samples, self.job.training.batch_size)
        return min(epoch * per_epoch + min(rest * self.push_every, per_epoch), self.total_steps)

    def place_after(self, step: int) -> tuple[int, int]:
        """Return the epoch, and the batches used of it, after `step` steps of the ledger."""
        epoch, rest = divmod(step, self.steps_per_epoch)
        return epoch, rest * self.push_every

    def epoch_of(self, step: int) -> int:
        return step // self.steps_per_epoch

    def is_first_of_epoch(self, step: int) -> bool:
        return step % self.steps_per_epoch == 0

    def evaluates(self, step: int, *, is_last: bool = False) -> bool:
        """Whether the model is measured after `step` steps of the ledger."""
        evaluation = self.job.evaluation
        ends_epoch = step % self.steps_per_epoch == 0
        by_epoch = ends_epoch and evaluation.every_epochs and self.epoch_of(step) % evaluation.every_epochs == 0
        return is_last or (step > 0 and bool(by_epoch)) or self._crosses(step, evaluation.every_steps)

    def saves(self, step: int, *, is_last: bool = False) -> bool:
        return is_last or self._crosses(step, self.job.checkpoint.every_steps)

    def next_barrier(self, step: int) -> int:
        """Return the next step of the ledger after which everybody pauses for a snapshot."""
        for candidate in range(step + 1, self.num_steps):
            if self.evaluates(candidate) or self.saves(candidate):
                return candidate
        return self.num_steps

    def _crosses(self, step: int, every: int) -> bool:
        if not every or step <= 0:
            return False
        return self.steps_after(step) // every > self.steps_after(step - 1) // every
