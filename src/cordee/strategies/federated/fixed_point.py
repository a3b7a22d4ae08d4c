"""Updates as whole numbers, so that their sum is exact and does not depend on the order of adding.

A number x becomes round(x / step) in a word of 32 or 64 bits. The step is a power of two, so a sum of steps is exact as
a floating-point number. The sum of as many clients as were named before cannot leave the range of a word.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np

from cordee.core.errors import TrainingError

Words: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class FixedPoint(msgspec.Struct, frozen=True, kw_only=True):
    """How updates are written as whole numbers. All clients of a round have the same one."""

    largest: float  # absolute value that may be sent
    bits: int  # of one number, with its sign
    num_clients: int  # of whom the sum is

    def __post_init__(self) -> None:
        if not (math.isfinite(self.largest) and self.largest > 0):
            raise TrainingError(f"the range of secure aggregation is {self.largest}: it must be a number above 0")
        if not 2 <= self.bits <= 40 or not 1 <= self.num_clients <= 2**20:
            raise TrainingError(
                f"numbers of {self.bits} bits of {self.num_clients} clients cannot be added: at most 40 bits, and "
                f"{2**20} clients"
            )

    @property
    def word_bits(self) -> Literal[32, 64]:
        """Of a word that holds the largest sum."""
        return 32 if self.num_clients * 2 ** (self.bits - 1) < 2**31 else 64

    @property
    def step(self) -> float:
        """The distance of two neighbouring values: the smallest power of two with which `largest` has `bits` bits."""
        return float(2.0 ** math.ceil(math.log2(self.largest) - math.log2(2 ** (self.bits - 1) - 1)))

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(f"uint{self.word_bits}")

    def encode(self, values: np.ndarray[Any, Any], what: str = "the update") -> Words:
        """Return the words of `values`. Raises TrainingError for a value that is not a number or beyond the range.

        Nothing is cut to the range: a value that was changed on the way would make the sum wrong without a word.
        """
        exact = np.asarray(values, dtype=np.float64).reshape(-1)
        largest = float(np.max(np.abs(exact), initial=0.0))  # NaN if any is
        if not math.isfinite(largest):
            raise TrainingError(f"{what} has values that are not numbers: nothing was sent")
        if largest > self.largest:
            raise TrainingError(
                f"{what} has a value of {largest:.4g}, and strategy.secure.range = {self.largest:g}: nothing was sent. "
                "Set a larger range, or bound the norm of updates (strategy.max_norm, or clip_norm of strategy.privacy)"
            )
        signed = np.rint(exact / self.step).astype(f"int{self.word_bits}")
        return signed.view(self.dtype)

    def decode(self, words: Words) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return the values of a sum of encoded values."""
        return words.view(f"int{self.word_bits}").astype(np.float64) * self.step
