"""How far the clock of another host is from the coordinator's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cordee.cluster.member_link import measure_offset


@given(ahead_ms=st.integers(-10_000, 10_000), there_ms=st.integers(0, 500), back_ms=st.integers(0, 500))
def test_the_true_offset_is_within_the_error_however_long_each_way_takes(
    ahead_ms: int, there_ms: int, back_ms: int
) -> None:
    sent_s = 1_000.0
    read_s = sent_s + there_ms / 1000 + ahead_ms / 1000
    offset_us, error_us = measure_offset(sent_s, read_s, sent_s + (there_ms + back_ms) / 1000)
    assert abs(offset_us - ahead_ms * 1000) <= error_us + 1
    assert error_us <= (there_ms + back_ms) * 500 + 1
