"""Summing what clients return: as it comes, in one fixed tree, so that no bit depends on who came first.

A leaf of the tree is the place of a client among those that the round asked. The sum of a block of places is made of
its two halves (core/shards.py) as soon as both are there; a place whose client dropped out is left out of its sum. At
any time about as many sums are held as the tree is high.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cordee.core.errors import DataError
from cordee.core.shards import Block, halves
from cordee.strategies.federated.algorithms import RoundSum, Vectors
from cordee.strategies.federated.client import Update
from cordee.strategies.federated.privacy import clip
from cordee.strategies.federated.settings import FederatedSettings


@dataclass
class Contribution:
    """A client's part of a round, as the server takes it: weighted, in double precision."""

    difference: Tensor  # weight · difference
    buffers: Tensor  # num_samples · buffers
    summed: Vectors
    weight: float
    weighted_scale: float
    num_samples: int  # as far as they weigh
    num_clients: int = 1

    def add(self, other: Contribution) -> Contribution:
        """Return the sum; this one is overwritten."""
        self.difference.add_(other.difference)
        self.buffers.add_(other.buffers)
        for name, vector in other.summed.items():
            self.summed[name].add_(vector)
        self.weight += other.weight
        self.weighted_scale += other.weighted_scale
        self.num_samples += other.num_samples
        self.num_clients += other.num_clients
        return self

    def total(self, num_all_clients: int) -> RoundSum:
        """Return what an algorithm combines."""
        return RoundSum(
            self.difference, self.summed, self.weight, self.weighted_scale, self.num_clients, num_all_clients
        )


def check_update(update: Update, difference: Tensor, like: Tensor, like_buffers: Tensor, client: str) -> None:
    """Raise DataError for what a client must not send: another model's, not finite, or without samples or steps."""
    if difference.shape != like.shape or difference.dtype != like.dtype:
        raise DataError(
            f"client {client} sent {difference.numel()} numbers of {difference.dtype}, and the model shares "
            f"{like.numel()} of {like.dtype}: it has another model"
        )
    if update.buffers.shape != like_buffers.shape or any(v.shape != like.shape for v in update.summed.values()):
        raise DataError(f"client {client} sent buffers, or vectors of the algorithm, that are not of this model")
    if update.num_samples < 1 or update.num_steps < 1:
        raise DataError(f"client {client} says that it took {update.num_steps} steps with {update.num_samples} samples")
    # A mask of infinities, say, is sent back as it came.
    changed = torch.where(update.buffers == like_buffers, torch.zeros_like(like_buffers), update.buffers)
    for vector in (difference, changed, *update.summed.values()):
        if not bool(torch.isfinite(vector).all()):
            raise DataError(f"client {client} sent numbers that are not finite")


def contribute(
    settings: FederatedSettings, update: Update, difference: Tensor, discount: float = 1.0
) -> tuple[Contribution, float]:
    """Return a client's part of the sum, and the norm that its difference had. `difference` is decoded; overwritten.

    Norms are bounded here whatever the client did: a server need not trust it.
    """
    privacy = settings.parts.privacy
    bound = privacy.clip_norm if privacy is not None and privacy.where == "central" else settings.max_norm
    norm = clip(difference, bound or float("inf"))
    weight = settings.weight_of(update.num_samples) * discount
    num_samples = (
        update.num_samples if settings.most_samples is None else min(update.num_samples, settings.most_samples)
    )
    contribution = Contribution(
        difference=difference.to(torch.float64) * weight,
        buffers=update.buffers * num_samples,
        summed={name: vector.to(torch.float64) for name, vector in update.summed.items()},
        weight=weight,
        weighted_scale=weight * update.scale,
        num_samples=num_samples,
    )
    return contribution, norm


class SumTree:
    """The sum over the places of a round. Takes each place, or a whole block of places, once, in any order."""

    def __init__(self, num_places: int) -> None:
        self._whole = Block(0, num_places)
        self._sums: dict[Block, Contribution | None] = {}  # None: nobody of the block took part

    def take(self, place: int, contribution: Contribution | None) -> None:
        """Take what came from a place; None where its client dropped out. It may be overwritten."""
        self.take_block(Block(place, place + 1), contribution)

    def take_block(self, block: Block, total: Contribution | None) -> None:
        """Take the sum of a block of the tree."""
        path = self._path_to(block)
        assert block not in self._sums, f"{block} was taken before"
        self._sums[block] = total
        while path:
            parent = path.pop()
            left, right = halves(parent)
            if left not in self._sums or right not in self._sums:
                return
            one, other = self._sums.pop(left), self._sums.pop(right)
            self._sums[parent] = one.add(other) if one is not None and other is not None else one or other

    @property
    def num_held(self) -> int:
        """How many sums are in memory."""
        return sum(one is not None for one in self._sums.values())

    @property
    def is_complete(self) -> bool:
        return self._whole in self._sums

    def block(self, block: Block) -> Contribution | None:
        """Return the sum of a block all of whose places were taken, and no others beside it."""
        assert block in self._sums, f"{block} is not complete"
        return self._sums[block]

    def result(self) -> Contribution | None:
        """Return the sum over all places; None if nobody took part."""
        assert self.is_complete, "places are missing"
        return self._sums[self._whole]

    def _path_to(self, block: Block) -> list[Block]:
        """Return the blocks that a block is part of, the whole first."""
        path, here = [], self._whole
        while here != block:
            path.append(here)
            left, right = halves(here)
            here = left if block.stop <= left.stop else right
            assert here.first <= block.first and block.stop <= here.stop, f"{block} is no block of the tree"
        return path


def blocks_of(num_places: int, size: int) -> Sequence[Block]:
    """Return blocks of the tree of at most `size` places, a power of two, that make up all places."""
    assert size & (size - 1) == 0, "the tree is cut at powers of two"
    return [Block(first, min(first + size, num_places)) for first in range(0, num_places, size)]
