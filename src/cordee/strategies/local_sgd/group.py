"""A local worker that is a team itself: workers that sum their gradients in every step, and with nobody else.

A group takes the steps that one worker with the shares of all its members would take. Where workers agree, each member
takes part for itself, with the items of its own share. So a group counts for all its items, and a member that is lost
takes only its own count along. A group that has lost a member does not come together again in this team: for the rest
of the window each of its members trains alone, from where the group was.
"""

from __future__ import annotations

import itertools
import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from cordee.checkpoint import load_optimizer_state, optimizer_state, share_state
from cordee.cluster import Team
from cordee.communication.exchange import GradientExchange, find_lost_peer
from cordee.strategies.split import form_groups

log = logging.getLogger("cordee.worker")


def cut_groups(num_workers: int, size: int) -> list[list[int]]:
    """Return who is in which group: neighbours in number, at most `size`, in groups of about the same size. Pure."""
    num_groups = -(-num_workers // size)
    starts = [num_workers * number // num_groups for number in range(num_groups + 1)]
    return [list(range(start, stop)) for start, stop in itertools.pairwise(starts)]


class Group:
    """The members of this worker's group in one team."""

    def __init__(self, team: Team, size: int, model: nn.Module, optimizer: Optimizer, nominal_count: int) -> None:
        """Collective over the team."""
        rosters = cut_groups(team.num_workers, size)
        self.nominal_count = nominal_count  # that members divide the sums of their gradients by
        self._model, self._optimizer = model, optimizer
        self._size = next(len(roster) for roster in rosters if team.worker_index in roster)
        self._process_group = form_groups(rosters, team.worker_index)
        self._exchange = GradientExchange(list(model.parameters()), 1, self._process_group)
        self._has_begun = False
        self.is_whole = self._size > 1  # False: this worker trains alone

    def sum_gradients(self, count: float) -> float:
        """Replace each gradient by the mean over the items of the group; return how many those are.

        Collective over the group. `count` are this worker's items. If a member is lost the gradients become the mean
        over this worker's own items.
        """
        try:
            if not self._has_begun:
                self._share_optimizer()
                self._has_begun = True
            (total,) = self._exchange.reduce([count], count_at=0, nominal_count=self.nominal_count)
        except Exception as error:
            if (lost := find_lost_peer(error)) is None:
                raise
            log.warning("the group of this worker is broken, and it trains on alone: %s", lost)
            self.is_whole = False
            own = [p.grad for p in self._model.parameters() if p.grad is not None]
            if own and count:
                torch._foreach_mul_(own, self.nominal_count / count)
            return count
        return total

    def _share_optimizer(self) -> None:
        """Give all members the first one's optimizer state: those of another team, or of none, have others."""
        own = optimizer_state(self._optimizer, self._model)
        shared = share_state(own, group=self._process_group)
        if dist.get_rank(self._process_group) != 0:
            load_optimizer_state(self._optimizer, self._model, shared)


def check_groups(workers: int, size: int) -> str | None:
    """Return why so many workers cannot be groups of this size, if they cannot. Pure."""
    if size > workers:
        return f"more than strategy.workers = {workers}: set workers_per_group to at most {workers}"
    if workers % size:
        return f"no divisor of strategy.workers = {workers}: groups of other sizes would have other shares of a batch"
    return None
