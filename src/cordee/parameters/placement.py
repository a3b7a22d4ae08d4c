"""Where parameters go, in slices of equal bytes. Pure.

Arrays of a store come one by one: small ones go whole to the server with the fewest bytes, large ones in equal parts
to all.

A model is known as a whole: the flat vector of its parameters is cut into ranges of equal size. A server's range is
contiguous and follows the order of the model, so that the gradients of the last layers, which are there first, go to
the last server while the first ones are still computed, and the first layers come back first. A range is cut into
pieces, each pushed and pulled by itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from cordee.communication.wire import ITEM_BYTES
from cordee.core.errors import JobError
from cordee.parameters.messages import Cut

# Cuts inside a parameter are at multiples of this: vector kernels then treat every number as they would in one piece.
GRANULE = 64
# Parameters start at multiples of this in the flat vector, with gaps between: a matrix product may round differently
# on memory that does not start at a cache line, and then one worker would not give the bits of `single`.
ALIGNMENT = 16
PIECE_BYTES = 4 << 20
# Optimizers that treat every number by itself: a parameter may be split among servers. The others keep it whole.
ELEMENTWISE = frozenset({
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
})  # fmt: skip
SPLIT_BYTES = 1 << 20  # arrays above it are cut


# Arrays, one by one.


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


# A model.


@dataclass(frozen=True)
class Slice:
    """A part of one parameter: elements [first, first + length) of it, at `offset` of the flat vector."""

    name: str
    offset: int
    first: int
    length: int
    shape: tuple[int, ...]  # of the whole parameter

    @property
    def is_whole(self) -> bool:
        return self.first == 0 and self.length == math.prod(self.shape)


@dataclass(frozen=True)
class Piece:
    """A contiguous range of the flat vector on one server, with the gaps inside it."""

    index: int
    server: int
    slices: tuple[Slice, ...]

    @property
    def start(self) -> int:
        return self.slices[0].offset

    @property
    def stop(self) -> int:
        return self.slices[-1].offset + self.slices[-1].length

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """All pieces, in the order of the flat vector."""

    pieces: tuple[Piece, ...]
    num_servers: int
    dtype: torch.dtype

    @property
    def length(self) -> int:
        return self.pieces[-1].stop

    def of_server(self, server: int) -> tuple[Piece, ...]:
        return tuple(piece for piece in self.pieces if piece.server == server)


def make_layout(model: nn.Module, num_servers: int, *, can_split: bool) -> Layout:
    """Cut the trainable parameters of a model among servers. Raises JobError where that cannot be done."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        raise JobError("the model has no parameters to train")
    dtypes = {parameter.dtype for _, parameter in named}
    if len(dtypes) > 1:
        raise JobError(f"parameter servers need parameters of one type, the model has {sorted(map(str, dtypes))}")
    dtype = named[0][1].dtype
    wholes = [(name, tuple(parameter.shape)) for name, parameter in named]
    slices = cut(wholes, num_servers, can_split=can_split)
    pieces: list[Piece] = []
    for server, owned in enumerate(slices):
        for group in _group(owned, PIECE_BYTES // dtype.itemsize):
            pieces.append(Piece(len(pieces), server, tuple(group)))
    return Layout(tuple(pieces), num_servers, dtype)


def cut(parameters: Sequence[tuple[str, tuple[int, ...]]], num_servers: int, *, can_split: bool) -> list[list[Slice]]:
    """Return the slices of each server, in order. Every server gets some; sizes are as equal as cuts allow."""
    total = sum(math.prod(shape) for _, shape in parameters)
    limit = total // GRANULE if can_split else len(parameters)
    if num_servers > max(limit, 1):
        what = f"{total} numbers" if can_split else f"{len(parameters)} parameters, which this optimizer keeps whole"
        raise JobError(f"strategy.servers = {num_servers} is too many for {what}: use at most {max(limit, 1)}")
    boundaries = _even_boundaries(parameters, num_servers) if can_split else _whole_boundaries(parameters, num_servers)
    servers: list[list[Slice]] = [[] for _ in range(num_servers)]
    server, offset, base = 0, 0, 0  # offset counts numbers, base also the gaps between parameters
    for name, shape in parameters:
        length, first = math.prod(shape), 0
        while first < length or length == 0:
            while server + 1 < num_servers and offset >= boundaries[server]:
                server += 1
            room = boundaries[server] - offset if server + 1 < num_servers else length - first
            size = min(length - first, room)
            servers[server].append(Slice(name, base + first, first, size, shape))
            first += size
            offset += size
            if length == 0:
                break
        base += -(-length // ALIGNMENT) * ALIGNMENT
    return servers


def _even_boundaries(parameters: Sequence[tuple[str, tuple[int, ...]]], num_servers: int) -> list[int]:
    """Where one server's range ends and the next begins: equal sizes, cut at multiples of the granule."""
    total = sum(math.prod(shape) for _, shape in parameters)
    ends = list(itertools.accumulate(math.prod(shape) for _, shape in parameters))
    boundaries = []
    for server in range(1, num_servers):
        ideal = total * server // num_servers
        end = next(end for end in ends if end > ideal)
        start = max([0, *(other for other in ends if other <= ideal)])
        boundaries.append(min(start + round((ideal - start) / GRANULE) * GRANULE, end))
    return [*boundaries, total]


def _whole_boundaries(parameters: Sequence[tuple[str, tuple[int, ...]]], num_servers: int) -> list[int]:
    """Boundaries between parameters, as near to equal sizes as possible, none of the ranges empty."""
    ends = list(itertools.accumulate(math.prod(shape) for _, shape in parameters))
    boundaries: list[int] = []
    at = 0
    for server in range(1, num_servers):
        ideal = ends[-1] * server / num_servers
        last = len(ends) - (num_servers - server) - 1  # leave one for each that follows
        candidates = range(at, last + 1)
        best = min(candidates, key=lambda index: abs(ends[index] - ideal))
        boundaries.append(ends[best])
        at = best + 1
    return [*boundaries, ends[-1]]


def _group(slices: Sequence[Slice], limit: int) -> list[list[Slice]]:
    """Group a server's slices into pieces of about `limit` numbers; slices are not cut further."""
    groups: list[list[Slice]] = []
    size = 0
    for one in slices:
        if not groups or size + one.length > limit:
            groups.append([])
            size = 0
        groups[-1].append(one)
        size += one.length
    return groups
