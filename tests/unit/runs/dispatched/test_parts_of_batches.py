"""How a unit of several batches is cut into its part of each."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cordee.core.shards import shard_part
from cordee.runs.dispatched.worker import cut_like


def test_the_only_unit_of_an_exchange_is_cut_between_the_batches() -> None:
    assert cut_like(60, 107, [20, 20, 7]) == [(60, 80), (80, 100), (100, 107)]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(1, 5), st.integers(0, 100))
def test_units_together_have_each_sample_once(sizes: list[int], num_shares: int, first: int) -> None:
    seen = []
    for share in range(num_shares):
        start, stop = shard_part(sum(sizes), share, num_shares)
        for begin, end in cut_like(first + start, first + stop, sizes):
            seen += range(begin, end)
    assert seen == list(range(first, first + sum(sizes)))
