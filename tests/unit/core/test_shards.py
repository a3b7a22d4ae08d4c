"""Logical shards: every worker's are blocks of one tree."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cordee.core.shards import Block, Shards, add_up, share_shards, whole_blocks


@given(st.integers(1, 40), st.data())
def test_the_order_of_a_sum_does_not_depend_on_who_holds_what(total: int, data: st.DataObject) -> None:
    num_workers = data.draw(st.integers(1, total))
    values = [10.0 ** data.draw(st.integers(-18, 18)) for _ in range(total)]

    def value(block: Block) -> float | None:
        return values[block.first] if block.stop - block.first == 1 else None

    known: dict[Block, float] = {}
    held: list[int] = []
    for worker in range(num_workers):
        shards = share_shards(total, worker, num_workers)
        blocks = whole_blocks(shards)
        held += [shard for block in blocks for shard in range(*block)]
        known |= {block: add_up(block, value, float.__add__) for block in blocks}
    assert held == list(range(total))
    together = add_up(Block(0, total), known.get, float.__add__)
    assert together == add_up(Block(0, total), value, float.__add__)


def test_the_largest_blocks_are_found() -> None:
    assert whole_blocks(Shards(0, 3, 8)) == [Block(0, 2), Block(2, 3)]
    assert whole_blocks(Shards(3, 6, 8)) == [Block(3, 4), Block(4, 6)]
    assert whole_blocks(Shards(0, 8, 8)) == [Block(0, 8)]
    assert whole_blocks(Shards(4, 6, 6)) == [Block(4, 6)]
