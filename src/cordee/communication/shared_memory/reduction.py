"""Adding up the members' buffers, in member order, with torch's own kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum

import torch
from torch import Tensor


class Reduction(IntEnum):
    """The reductions done in shared memory; the values go into signatures."""

    SUM = 1
    AVG = 2
    PRODUCT = 3
    MIN = 4
    MAX = 5
    BAND = 6
    BOR = 7
    BXOR = 8


_BINARY: dict[Reduction, Callable[..., Tensor]] = {
    Reduction.SUM: torch.add,
    Reduction.AVG: torch.add,
    Reduction.PRODUCT: torch.mul,
    Reduction.MIN: torch.minimum,
    Reduction.MAX: torch.maximum,
    Reduction.BAND: torch.bitwise_and,
    Reduction.BOR: torch.bitwise_or,
    Reduction.BXOR: torch.bitwise_xor,
}
_HALF = (torch.float16, torch.bfloat16)
_FLOATING = (torch.float32, torch.float64, *_HALF)
_INTEGER = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)


def is_supported(reduction: Reduction, dtype: torch.dtype) -> bool:
    """Whether `reduce_into` can do it; an average of integers has no agreed meaning, as with gloo."""
    if reduction in (Reduction.BAND, Reduction.BOR, Reduction.BXOR):
        return dtype in _INTEGER
    if reduction is Reduction.AVG:
        return dtype in _FLOATING
    return dtype in _FLOATING or dtype in _INTEGER


def reduce_into(out: Tensor, parts: Sequence[Tensor], reduction: Reduction) -> None:
    """Write the reduction of `parts`, taken in order, to `out`, which may be one of the first two.

    The order is fixed, so that members that reduce the same parts get the same bits. 16-bit floats are added in
    32 bits and rounded once.
    """
    if out.dtype in _HALF and (len(parts) > 2 or reduction is Reduction.AVG):
        total = parts[0].to(torch.float32, copy=True)
        _fold(total, total, parts[1:], reduction)
        out.copy_(total.div_(len(parts)) if reduction is Reduction.AVG else total)
        return
    _fold(out, parts[0], parts[1:], reduction)
    if reduction is Reduction.AVG:
        out.div_(len(parts))


def _fold(out: Tensor, first: Tensor, rest: Sequence[Tensor], reduction: Reduction) -> None:
    binary = _BINARY[reduction]
    if not rest:
        if out is not first:
            out.copy_(first)
        return
    binary(first, rest[0], out=out)
    for part in rest[1:]:
        binary(out, part, out=out)
