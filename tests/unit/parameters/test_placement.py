"""Where arrays go."""

from __future__ import annotations

from itertools import pairwise
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from cordee.communication.wire import ITEM_BYTES
from cordee.parameters.placement import SPLIT_BYTES, is_cut_at_rows, part_shape, place


@given(
    st.sampled_from(sorted(ITEM_BYTES)),
    st.lists(st.integers(0, 700), max_size=3),
    st.lists(st.integers(0, 1 << 30), min_size=1, max_size=9),
)
def test_the_parts_of_an_array_are_all_of_it_once(kind: str, shape: list[int], loads: list[int]) -> None:
    cuts = place(kind, shape, loads)
    assert cuts[0].start == 0 and cuts[-1].stop == prod(shape)
    assert all(before.stop == after.start for before, after in pairwise(cuts))
    assert len({cut.server for cut in cuts}) == len(cuts)
    assert sum(prod(part_shape(shape, cut, len(cuts))) for cut in cuts) == prod(shape)
    sizes = [cut.stop - cut.start for cut in cuts]
    row = prod(shape[1:]) if len(cuts) > 1 and is_cut_at_rows(shape, len(cuts)) else 1
    assert max(sizes) - min(sizes) <= row, "parts differ by one row at most"


def test_small_arrays_go_where_the_bytes_are_fewest() -> None:
    assert [cut.server for cut in place("float32", (10,), [300, 20, 100])] == [1]
    assert [cut.server for cut in place("float32", (SPLIT_BYTES // 4,), [0, 0])] == [0]
    assert [cut.server for cut in place("float32", (SPLIT_BYTES // 4 + 1,), [9, 0])] == [0, 1]
    uneven = place("float64", (3, 1 << 17), [9, 0])
    assert [(cut.server, cut.stop - cut.start) for cut in uneven] == [(0, 1 << 17), (1, 2 << 17)]
