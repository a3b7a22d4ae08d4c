"""The logical shards of a batch: cut and added up in one way, whoever computes them.

In reproducible mode a batch is always cut into the same shards. Workers only decide who computes which, so
neither a shard's gradient nor the order in which the shards are added depends on how many workers there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

DEFAULT_NUM_SHARDS = 8

T = TypeVar("T")


class Block(NamedTuple):
    """Shards [first, stop) that are added up among themselves before anything else: a node of the tree."""

    first: int
    stop: int


class Shards(NamedTuple):
    """The shards [first, stop) of `total` that one worker computes."""

    first: int
    stop: int
    total: int

    @property
    def num_held(self) -> int:
        return self.stop - self.first


def share_shards(total: int, worker_index: int, num_workers: int) -> Shards:
    """Return the shards of one worker: contiguous, and as many as the others have but for one."""
    return Shards(*shard_part(total, worker_index, num_workers), total)


def shard_part(length: int, shard: int, num_shards: int) -> tuple[int, int]:
    """Return the part [start, stop) of `length` things that belongs to `shard`."""
    size, extra = divmod(length, num_shards)
    start = shard * size + min(shard, extra)
    return start, start + size + (shard < extra)


def share_by_speed(total: int, speeds: Sequence[float]) -> list[int]:
    """Return how many of `total` things each gets, in proportion to the speeds, and one at least."""
    assert total >= len(speeds) and min(speeds) > 0, (total, speeds)
    exact = [(total - len(speeds)) * speed / sum(speeds) for speed in speeds]  # beside the one that each has
    shares = [1 + int(share) for share in exact]
    by_fraction = sorted(range(len(exact)), key=lambda place: (int(exact[place]) - exact[place], place))
    for place in by_fraction[: total - sum(shares)]:
        shares[place] += 1
    return shares


def whole_blocks(shards: Shards) -> list[Block]:
    """Return the largest blocks of the tree that lie within a worker's shards, in order."""

    def find(block: Block) -> Iterator[Block]:
        if shards.first <= block.first and block.stop <= shards.stop:
            yield block
        elif block.first < shards.stop and shards.first < block.stop:
            for half in halves(block):
                yield from find(half)

    return list(find(Block(0, shards.total)))


def halves(block: Block) -> tuple[Block, Block]:
    """Return the two blocks that a block of several shards is the sum of."""
    size = block.stop - block.first
    assert size > 1, block
    middle = block.first + (1 << ((size - 1).bit_length() - 1))
    return Block(block.first, middle), Block(middle, block.stop)


def add_up(block: Block, leaf: Callable[[Block], T | None], add: Callable[[T, T], T]) -> T:
    """Return the sum of a block in the order of the tree; `leaf` knows the value of a block or says None."""
    known = leaf(block)
    if known is not None:
        return known
    left, right = halves(block)
    first = add_up(left, leaf, add)
    return add(first, add_up(right, leaf, add))


def sum_shards(
    values: Sequence[float], shards: Shards, sum_team: Callable[[Sequence[float]], list[float]] = list
) -> list[float]:
    """Return the sums over all shards, in the order of the tree, of equally many numbers for each.

    `values` are those of the own shards, one shard after the other. `sum_team` sums over the members that have the
    other shards, and is collective if they are several.
    """
    width = len(values) // shards.num_held
    table = [0.0] * (width * shards.total)
    table[width * shards.first : width * shards.stop] = values
    table = sum_team(table)  # one member has each number and the others zero: exact
    return add_up(
        Block(0, shards.total),
        lambda block: table[width * block.first :][:width] if block.stop - block.first == 1 else None,
        lambda one, other: [a + b for a, b in zip(one, other, strict=True)],
    )
