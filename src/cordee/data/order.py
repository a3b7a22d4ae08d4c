"""Which sample stands where in an epoch, and which part of each batch belongs to which shard.

An epoch is a permutation of the samples drawn from (seed, epoch). Global batch b is made of the positions
from b * batch_size up to the next batch; the last one may be smaller. Every shard gets a contiguous part of
every global batch. Nothing here depends on what was read before, so any batch can be the first.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from cordee.core.seeds import derive_seed
from cordee.core.shards import Shards, shard_part
from cordee.data.randomness import permute_positions

# Above this a permutation held in memory costs more than 128 MB; it is then computed position by position.
LARGEST_HELD_ORDER = 1 << 24


class EpochOrder:
    """The samples of one epoch by position: shuffled from (seed, epoch), or as they are."""

    def __init__(self, num_samples: int, *, seed: int, epoch: int, shuffle: bool) -> None:
        self._num_samples = num_samples
        self._seed = derive_seed(seed, "order", epoch)
        self._is_shuffled = shuffle
        self._held: Tensor | None = None
        if shuffle and num_samples <= LARGEST_HELD_ORDER:
            self._held = torch.randperm(num_samples, generator=torch.Generator().manual_seed(self._seed))

    def samples_at(self, positions: Tensor) -> Tensor:
        if self._held is not None:
            return self._held.index_select(0, positions)
        if self._is_shuffled:
            return permute_positions(positions, self._num_samples, self._seed)
        return positions


def count_batches(num_samples: int, batch_size: int) -> int:
    """Return the number of global batches of an epoch, the last uneven one included."""
    return -(-num_samples // batch_size)


def batch_part(batch: int, *, batch_size: int, num_samples: int | None, shards: Shards) -> tuple[int, int]:
    """Return the positions [start, stop) of the epoch that some shards have of a global batch.

    Parts of one batch follow each other in the order of the shards and differ by at most one in size.
    """
    first = batch * batch_size
    length = batch_size if num_samples is None else min(batch_size, max(0, num_samples - first))
    start, stop = part_of(length, shards)
    return first + start, first + stop


def part_of(length: int, shards: Shards) -> tuple[int, int]:
    """Return the part [start, stop) of `length` things that belongs to `shards`."""
    return shard_part(length, shards.first, shards.total)[0], shard_part(length, shards.stop - 1, shards.total)[1]


def positions_of(parts: list[tuple[int, int]]) -> Tensor:
    """Return the positions of several parts, one after the other."""
    if parts and all(before[1] == after[0] for before, after in itertools.pairwise(parts)):
        return torch.arange(parts[0][0], parts[-1][1])
    return torch.cat([torch.arange(start, stop) for start, stop in parts])
