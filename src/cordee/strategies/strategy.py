"""What every way of training together has in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from cordee.checkpoint import State
from cordee.cluster import Team
from cordee.compute import Loss, OptimizerRecipe, Votes
from cordee.core import Batch, Job
from cordee.core.errors import JobError


@dataclass(frozen=True)
class Requirements:
    """What a strategy needs before it is started."""

    num_workers: int
    num_data_shards: int  # parts a batch is cut into; workers that split a model between them share a part

    # Whether a batch may be computed in parts, by several workers or one after the other, accumulation aside.
    cuts_batches: bool = True

    def data_shard(self, worker_index: int) -> int:
        """Return which part of each batch a worker computes. Neighbours in number share one."""
        return worker_index * self.num_data_shards // self.num_workers


def require_samples(job: Job, number: int, kind: str = "workers") -> None:
    """Raise JobError if a batch has fewer samples than there are workers, or replicas of the model."""
    if job.training.batch_size < number:
        raise JobError(
            f"training.batch_size = {job.training.batch_size} has no sample for each of {number} {kind}: "
            f"set batch_size to at least {number}, or use fewer {kind}"
        )


@dataclass(frozen=True)
class Update:
    """What an optimizer step did."""

    lr: float
    gradient_norm: float | None = None  # measured only where it is clipped
    warning: str | None = None  # what the user should know, said once


class Strategy(Protocol):
    """One row of the strategy table: who has which data and parameters, and when they agree.

    A launcher calls `requirements` and `check`; the trainer calls `setup` once, and again with each team that is
    formed again, then `forward_backward` and `update` in turn. From `setup` on all are collective: every member
    of the team calls them in the same order.
    """

    model: nn.Module  # as this worker evaluates it

    def requirements(self, job: Job) -> Requirements:
        """Return what the job needs; raises JobError if the strategy cannot run it. Pure."""

    def check(self, model: nn.Module, recipe: OptimizerRecipe, example: Batch) -> None:
        """Raise a CordeeError if the model or the optimizer cannot be trained this way. Local; before workers start."""

    def setup(self, model: nn.Module, recipe: OptimizerRecipe, team: Team, example: Batch) -> None:
        """Take the model over and make the optimizer. `example` is a batch of the data, of two samples at most."""

    def forward_backward(self, microbatches: Sequence[Batch], *, measure: bool, vote: Callable[[], Votes]) -> Loss:
        """Compute the gradient of the mean loss over the whole batch, of which this worker has a share.

        Returns the loss of the whole batch and the sum of all workers' votes, each asked for at the end of its
        own computing; `measure` asks for accuracy as well.
        """

    def update(self, step: int) -> Update:
        """Agree with the others and take optimizer step `step`."""

    def skip(self, step: int) -> Update:
        """Leave out optimizer step `step`, for which no worker had anything to count. Local.

        Weights and optimizer state, its counters included, stay as they are; gradients are dropped.
        """

    def consolidate(self) -> None:
        """Make `model` what the team as a whole has learnt, before it is evaluated or saved."""

    def state_dict(self) -> State:
        """Return everything that training continues from; independent of how many workers there are.

        Complete on the first worker; what the others get they must not use.
        """

    def load_state_dict(self, state: State) -> None:
        """Continue from `state`, which any strategy may have made."""
