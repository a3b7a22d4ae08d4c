"""Where arrays go: small ones whole to the server with the fewest bytes, large ones in equal parts to all. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from cordee.communication.buffers import ITEM_BYTES
from cordee.parameters.messages import Cut

SPLIT_BYTES = 1 << 20  # arrays above it are cut


def place(kind: str, shape: Sequence[int], loads: Sequence[int]) -> tuple[Cut, ...]:
    """Return the parts of a new array, in the order of its elements, given the bytes that each server has.

    Parts end at rows (the first dimension) where there are at least as many rows as servers.
    """
    length = prod(shape)
    by_load = sorted(range(len(loads)), key=lambda server: (loads[server], server))
    if length * ITEM_BYTES[kind] <= SPLIT_BYTES or len(loads) == 1:
        return (Cut(by_load[0], 0, length),)
    unit = length // shape[0] if is_cut_at_rows(shape, len(loads)) else 1
    num_units = length // unit
    edges = [num_units * part // len(loads) * unit for part in range(len(loads) + 1)]
    # The largest parts to the servers with the fewest bytes.
    order = sorted(range(len(loads)), key=lambda part: (edges[part] - edges[part + 1], part))
    server_of = dict(zip(order, by_load, strict=True))
    return tuple(Cut(server_of[part], edges[part], edges[part + 1]) for part in range(len(loads)))


def is_cut_at_rows(shape: Sequence[int], num_parts: int) -> bool:
    """Whether the parts of an array of this shape are whole rows."""
    return num_parts == 1 or (len(shape) > 0 and shape[0] >= num_parts)


def part_shape(shape: Sequence[int], cut: Cut, num_parts: int) -> tuple[int, ...]:
    """Return the shape of a part: rows where it consists of rows, else flat."""
    if num_parts == 1:
        return tuple(shape)
    if not is_cut_at_rows(shape, num_parts):
        return (cut.stop - cut.start,)
    row = prod(shape[1:])
    return ((cut.stop - cut.start) // row, *shape[1:])
