"""Workers that train one client together: each computes a share of every batch, and all take the same step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from cordee.communication.exchange import find_lost_peer
from cordee.compute import Loss
from cordee.core import Batch
from cordee.strategies.federated.flat import FlatModel


class TeamBrokenError(Exception):
    """A worker of the team is lost, which no server is told of: the round is trained again."""


class ClientTeam:
    """One worker's place among those of the default group. Alone nothing is exchanged, and all is as without a team."""

    def __init__(self, index: int = 0, num_workers: int = 1) -> None:
        self.index, self.num_workers = index, num_workers

    @property
    def seed_parts(self) -> tuple[int | str, ...]:
        """What the random numbers of a step follow from, beside the step: shares of a batch draw others."""
        return ("worker", self.index) if self.num_workers > 1 else ()

    def share(self, batch: Batch) -> Batch:
        """Return this worker's share of a batch; it may be empty. Local."""
        return batch if self.num_workers == 1 else batch.cut(self.num_workers)[self.index]

    def sum_step(self, flat: FlatModel, loss: Loss) -> Loss:
        """Add up the gradients of all shares, in place; return the loss of the whole batch. Collective.

        Raises TeamBrokenError if a worker is lost.
        """
        if self.num_workers == 1:
            return loss
        own = [loss.mean * loss.count if loss.count else 0.0, loss.count, float(loss.num_samples), *flat.used()]
        numbers = torch.tensor(own, dtype=torch.float64)
        with naming_lost():
            dist.all_reduce(flat.gradients)
            dist.all_reduce(numbers)
        loss_sum, count, num_samples, *used = numbers.tolist()
        flat.note_used(used)
        return Loss(loss_sum / count if count else 0.0, count, num_samples=int(num_samples))

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over the workers: of running statistics, which each has of its own shares. Collective."""
        if self.num_workers == 1 or not values.numel():
            return values
        total = values.clone()
        with naming_lost():
            dist.all_reduce(total)
        return total / self.num_workers


@contextlib.contextmanager
def naming_lost() -> Iterator[None]:
    """Inside, the loss of a worker of the team is raised as TeamBrokenError, and not as that of a server."""
    try:
        yield
    except Exception as error:
        if find_lost_peer(error) is None:
            raise
        raise TeamBrokenError(str(error)) from error
