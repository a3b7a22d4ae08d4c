"""Data made up on the spot: any shape, any size, in the memory of a few samples, and learnable.

A sample is a function of its index, so nothing is stored and every worker sees the same data. What it
contains follows from the arguments alone, not from the job's seed.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from cordee.core.batch import Batch
from cordee.core.errors import JobError
from cordee.core.seeds import derive_seed
from cordee.data.order import hash_positions
from cordee.data.source import Source, Splits

_BANK_VALUES = 1 << 20  # noise patterns are picked from a bank of about 4 MB
_NOISE = 1.0  # deviation of the noise; that of the classes' patterns is 1 as well
_STEPS = 3  # by how much the tokens of a sequence can go up
_SLIP_PERCENT = 5  # tokens that do not follow the rule


def synthetic(
    shape: tuple[int, ...] = (1, 28, 28),
    num_classes: int = 10,
    size: int = 10_000,
    test_size: int = 1_000,
    kind: Literal["classes", "tokens"] = "classes",
) -> Splits:
    """Made-up data to try a model, a machine or a strategy with.

    "classes": inputs of `shape` are the pattern of their class plus noise, mean 0 and deviation about 1.
    "tokens": inputs are (length,) tokens, `shape = [length]`, from a vocabulary of `num_classes`; in each
    sequence tokens go up by its own step of 1 to 3, but for one in twenty; targets are the next tokens.
    `test_size = 0` makes no test set.
    """
    if not shape or any(length < 1 for length in shape):
        raise JobError(f"data.shape = {list(shape)} must be one or more lengths of at least 1")
    if num_classes < 2 or size < 1 or test_size < 0:
        raise JobError(
            f"data.num_classes = {num_classes}, size = {size}, test_size = {test_size}: "
            "at least 2 classes, 1 sample and 0 test samples"
        )
    if kind == "tokens" and len(shape) != 1:
        raise JobError(f"data.shape = {list(shape)}: kind = 'tokens' makes sequences, give one length: [128]")
    make = SyntheticTokens if kind == "tokens" else SyntheticClasses

    def split(first: int, num_samples: int) -> Source:
        return make(shape, num_classes, first, num_samples)

    # Test samples come before the training samples, so that `size` does not change them.
    test = split(0, test_size) if test_size else None
    return Splits(split(test_size, size), test, shape, num_classes, name="synthetic")


class SyntheticClasses:
    """Patterns of classes plus noise."""

    def __init__(self, shape: tuple[int, ...], num_classes: int, first_sample: int, num_samples: int) -> None:
        self.num_samples: int | None = num_samples
        self.input_shape = shape
        self._num_classes = num_classes
        self._first_sample = first_sample
        self._seed = derive_seed("synthetic", num_classes, *shape)
        num_values = math.prod(shape)
        generator = torch.Generator().manual_seed(self._seed)
        # With many classes of large samples a pattern is the sum of two, so that only about 2√classes are held.
        num_patterns = min(num_classes, max(math.isqrt(num_classes - 1) + 1, _BANK_VALUES // num_values))
        self._patterns = torch.randn((num_patterns, num_values), generator=generator)
        self._more_patterns = torch.randn((-(-num_classes // num_patterns), num_values), generator=generator)
        self._more_patterns[0] = 0.0
        bank_rows = min(1024, max(16, _BANK_VALUES // num_values))
        self._bank = torch.randn((bank_rows, num_values), generator=generator)

    def gather(self, indices: Tensor) -> Batch:
        drawn = hash_positions(indices + self._first_sample, self._seed)
        targets = drawn % self._num_classes
        # Two rows of the bank per sample, of deviation 0.7 each: as many noises as pairs of rows.
        rows = len(self._bank)
        inputs = self._bank.index_select(0, (drawn >> 20) % rows)
        inputs.add_(self._bank.index_select(0, (drawn >> 40) % rows))
        inputs.mul_(_NOISE / math.sqrt(2))
        inputs.add_(self._patterns.index_select(0, targets % len(self._patterns)))
        if len(self._more_patterns) > 1:
            inputs.add_(self._more_patterns.index_select(0, targets // len(self._patterns)))
        inputs.mul_(1 / math.hypot(1, _NOISE))
        return Batch(inputs.view(-1, *self.input_shape), targets)

    def first(self, num_samples: int) -> SyntheticClasses:
        count = min(num_samples, self.num_samples or 0)
        return SyntheticClasses(self.input_shape, self._num_classes, self._first_sample, count)


class SyntheticTokens:
    """Sequences in which a token is the one before plus the sequence's own step."""

    def __init__(self, shape: tuple[int, ...], num_classes: int, first_sample: int, num_samples: int) -> None:
        self.num_samples: int | None = num_samples
        self.input_shape = shape
        self._num_tokens = num_classes
        self._first_sample = first_sample
        self._seed = derive_seed("synthetic tokens", num_classes, *shape)

    def gather(self, indices: Tensor) -> Batch:
        (length,) = self.input_shape
        samples = indices + self._first_sample
        drawn = hash_positions(samples, self._seed).unsqueeze(1)
        places = torch.arange(length + 1)
        step = 1 + (drawn >> 32) % _STEPS
        tokens = (drawn + step * places) % self._num_tokens
        slips = hash_positions(samples.unsqueeze(1) * (length + 1) + places, self._seed + 1)
        tokens = torch.where(slips % 100 < _SLIP_PERCENT, (slips >> 20) % self._num_tokens, tokens)
        return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def first(self, num_samples: int) -> SyntheticTokens:
        count = min(num_samples, self.num_samples or 0)
        return SyntheticTokens(self.input_shape, self._num_tokens, self._first_sample, count)
