"""What a member says it is doing, in one 64-bit word, so that ranks that disagree are told so instead of hanging.

bits 0–5 operation · 6–9 reduction · 10–15 element type · 16–27 root · 28–62 elements
"""

from __future__ import annotations

from enum import IntEnum

import torch


class Operation(IntEnum):
    ALL_REDUCE = 1
    BROADCAST = 2
    ALL_GATHER = 3
    REDUCE = 4
    REDUCE_SCATTER = 5
    GATHER = 6
    SCATTER = 7
    ALL_TO_ALL = 8
    BARRIER = 9


_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.bool,
)  # fmt: skip
DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES, start=1)}  # 0: raw bytes
_REDUCTIONS = ("", "sum", "average", "product", "minimum", "maximum", "bitwise and", "bitwise or", "bitwise xor")
_COUNT_MASK = (1 << 35) - 1


def sign(operation: Operation, *, reduction: int = 0, dtype_code: int = 0, root: int = 0, count: int = 0) -> int:
    """Return the word for an operation; counts beyond 2**35 are told apart only by their low bits."""
    return operation | reduction << 6 | dtype_code << 10 | (root & 0xFFF) << 16 | (count & _COUNT_MASK) << 28


def describe(signature: int) -> str:
    """Return the words for a signature, for an error message."""
    try:
        name = Operation(signature & 0x3F).name.lower()
    except ValueError:
        return "nothing yet"
    reduction, dtype_code = signature >> 6 & 0xF, signature >> 10 & 0x3F
    root, count = signature >> 16 & 0xFFF, signature >> 28
    if name == "barrier":
        return "barrier"
    kind = str(_DTYPES[dtype_code - 1]).removeprefix("torch.") if 0 < dtype_code <= len(_DTYPES) else "bytes"
    text = f"{name}({count} × {kind}"
    if 0 < reduction < len(_REDUCTIONS):
        text += f", {_REDUCTIONS[reduction]}"
    if name in ("broadcast", "reduce", "gather", "scatter"):
        text += f", root {root}"
    return text + ")"
