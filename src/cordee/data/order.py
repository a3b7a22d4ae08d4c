"""What is a function of (seed, position): the order of an epoch, the parts of its batches, random numbers.

An epoch is a permutation of the samples drawn from (seed, epoch). Global batch b is made of the positions
from b * batch_size up to the next batch; the last one may be smaller. Every shard gets a contiguous part of
every global batch. Nothing here depends on what was read before, so any batch can be the first.

Samples that lie in blocks, which can only be read whole, are permuted in two steps: the blocks are, and then the
samples of each window of blocks that follow each other in that order. So only the blocks of one window are in use.
"""

from __future__ import annotations

import contextlib
import dataclasses
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


@dataclasses.dataclass(frozen=True)
class BlockLayout:
    """How the samples of a source lie in blocks that are read whole (row groups of a file), one after the other."""

    sizes: Tensor  # samples of each block, int64
    window: int  # samples that are shuffled among each other; a window has at least one block, whatever its size


class EpochOrder:
    """The samples of one epoch by position: shuffled from (seed, epoch), or as they are.

    With a `layout` whose blocks are more than one window, samples are shuffled window by window.
    """

    def __init__(
        self, num_samples: int, *, seed: int, epoch: int, shuffle: bool, layout: BlockLayout | None = None
    ) -> None:
        self._num_samples = num_samples
        self._seed = derive_seed(seed, "order", epoch)
        self._is_shuffled = shuffle
        self._held: Tensor | None = None
        self._windows: _Windows | None = None
        if shuffle and layout is not None and layout.window < num_samples:
            self._windows = _Windows(layout, self._seed)
        elif shuffle and num_samples <= LARGEST_HELD_ORDER:
            self._held = _permutation(num_samples, self._seed)

    def samples_at(self, positions: Tensor) -> Tensor:
        if self._windows is not None:
            return self._windows.samples_at(positions)
        if self._held is not None:
            return self._held.index_select(0, positions)
        if self._is_shuffled:
            return permute_positions(positions, self._num_samples, self._seed)
        return positions

    def blocks_after(self, position: int) -> tuple[int, list[int]] | None:
        """Return the number of the window after that of `position`, and its blocks; None if there is none."""
        return None if self._windows is None else self._windows.blocks_after(position)


class _Windows:
    """The order of samples in blocks: blocks are permuted, then the samples of each window of blocks."""

    def __init__(self, layout: BlockLayout, seed: int) -> None:
        self._seed = seed
        self._blocks = _permutation(len(layout.sizes), seed)
        self._sizes = layout.sizes.index_select(0, self._blocks)
        self._starts = (layout.sizes.cumsum(0) - layout.sizes).index_select(0, self._blocks)  # in the source
        bounds, filled = [0], 0
        for at, size in enumerate(self._sizes.tolist()):
            if filled and filled + size > layout.window:
                bounds.append(at)
                filled = 0
            filled += size
        self._bounds = [*bounds, len(self._sizes)]
        before = self._sizes.cumsum(0) - self._sizes
        self._first_positions = before[torch.tensor(bounds)]
        self._drawn: dict[int, Tensor] = {}  # the permutations of the windows used last

    def samples_at(self, positions: Tensor) -> Tensor:
        windows = torch.searchsorted(self._first_positions, positions, right=True) - 1
        samples = torch.empty_like(positions)
        for window in sorted(set(windows.tolist())):
            is_inside = windows == window
            samples[is_inside] = self._samples_in(window, positions[is_inside] - self._first_positions[window])
        return samples

    def blocks_after(self, position: int) -> tuple[int, list[int]] | None:
        after = int(torch.searchsorted(self._first_positions, position, right=True))
        if after >= len(self._first_positions):
            return None
        return after, self._blocks[self._bounds[after] : self._bounds[after + 1]].tolist()

    def _samples_in(self, window: int, places: Tensor) -> Tensor:
        first, stop = self._bounds[window], self._bounds[window + 1]
        ends = self._sizes[first:stop].cumsum(0)
        rows = self._permute(window, int(ends[-1]), places)
        block = torch.searchsorted(ends, rows, right=True)
        return self._starts[first:stop][block] + rows - (ends - self._sizes[first:stop])[block]

    def _permute(self, window: int, size: int, places: Tensor) -> Tensor:
        seed = derive_seed(self._seed, "window", window)
        if size > LARGEST_HELD_ORDER:
            return permute_positions(places, size, seed)
        if window not in self._drawn:
            if len(self._drawn) > 1:  # a batch has positions of two windows at most, unless windows are tiny
                del self._drawn[next(iter(self._drawn))]
            self._drawn[window] = _permutation(size, seed)
        return self._drawn[window].index_select(0, places)


def _permutation(length: int, seed: int) -> Tensor:
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed))


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
