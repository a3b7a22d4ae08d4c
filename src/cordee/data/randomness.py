"""Random numbers as a function of (seed, position), and the generators that a user's Dataset may draw from."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

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
