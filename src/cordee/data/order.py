"""What is a function of (seed, position): the order of an epoch, the parts of its batches, random numbers.

An epoch is a permutation of the samples drawn from (seed, epoch). Global batch b is made of the positions
from b * batch_size up to the next batch; the last one may be smaller. Every shard gets a contiguous part of
every global batch. Nothing here depends on what was read before, so any batch can be the first.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from cordee.core.seeds import derive_seed
from cordee.core.shards import Shards, shard_part

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


# Random numbers that are a function of (seed, position), for a whole tensor of positions at once.
#
# A generator has to be stepped to the n-th number; a hash gives it directly. That is what makes a crop or a
# synthetic sample the same in any batch, on any shard and after any resume.


def hash_positions(positions: Tensor, seed: int) -> Tensor:
    """Return for each int64 position a number from 0 to 2**63 - 1 that depends on it and on `seed` only."""
    mixed = positions + _signed(seed * _GOLDEN + _GOLDEN)
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(0x94D049BB133111EB)
    return (mixed ^ _shifted(mixed, 31)) & 0x7FFF_FFFF_FFFF_FFFF


def permute_positions(positions: Tensor, num_samples: int, seed: int) -> Tensor:
    """Return for each position in [0, num_samples) another one: a bijection, in memory of `positions` only.

    A Feistel network of four rounds on the next power of four, walked until it lands inside the range.
    """
    half_bits = max(1, ((num_samples - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    result = _feistel(positions, half_bits, mask, seed)
    while bool((outside := result >= num_samples).any()):
        result = torch.where(outside, _feistel(result, half_bits, mask, seed), result)
    return result


_GOLDEN = 0x9E3779B97F4A7C15  # the constants are those of splitmix64 (Steele, Lea, Flood 2014)
_NUM_ROUNDS = 4


def _feistel(values: Tensor, half_bits: int, mask: int, seed: int) -> Tensor:
    left, right = values >> half_bits, values & mask
    for step in range(_NUM_ROUNDS):
        left, right = right, left ^ (hash_positions(right, seed + step) & mask)
    return (left << half_bits) | right


def _shifted(values: Tensor, bits: int) -> Tensor:
    return (values >> bits) & ((1 << (64 - bits)) - 1)  # torch shifts int64 with the sign; this is without


def _signed(value: int) -> int:
    value &= 0xFFFF_FFFF_FFFF_FFFF
    return value - (1 << 64) if value >> 63 else value


# The generators that a user's Dataset may draw from: Python's `random`, NumPy's and torch's.
#
# They belong to the whole process, so a thread that reads ahead would disturb the model's dropout, and dropout
# the reading. Therefore samples are read in the calling thread, each with generators seeded for it, and the
# generators are put back after; or they are read in processes of their own, which have their own generators.


@contextlib.contextmanager
def preserved_generators() -> Iterator[None]:
    """Put the process's generators back at the end, whatever was drawn from them inside."""
    of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)


def seed_generators(seed: int) -> None:
    """Seed all three (8 µs). torch's generator directly: `torch.manual_seed` visits all devices."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)
    torch.default_generator.manual_seed(seed)
