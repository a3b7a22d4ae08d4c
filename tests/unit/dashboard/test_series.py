"""Curves in as many points as a screen has columns: no extreme is lost, and none is made up."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordee.dashboard.series import Curve


def curve_of(values: list[float]) -> Curve:
    curve = Curve()
    for place, value in enumerate(values):
        curve.append(float(place), value)
    return curve


@given(
    st.lists(st.integers(-1000, 1000), min_size=1, max_size=600),
    st.integers(1, 40),
    st.integers(0, 599),
    st.integers(0, 599),
)
def test_the_extremes_of_a_part_are_those_of_its_values(values: list[int], columns: int, one: int, other: int) -> None:
    begin, end = sorted((one, other))
    shown = [value for place, value in enumerate(values) if begin <= place <= end]
    part = curve_of([float(value) for value in values]).part(begin, end, columns)
    assert (
        len(part.x)
        == len(part.low)
        == len(part.high)
        <= max(2 * columns, len(shown) if len(shown) <= 2 * columns else 0)
    )
    assert part.x == sorted(part.x)
    assert all(low <= high for low, high in zip(part.low, part.high, strict=True))
    if shown:
        assert (min(part.low), max(part.high)) == (min(shown), max(shown))
    else:
        assert part.x == []


def test_a_spike_of_one_point_in_a_million_is_seen() -> None:
    values = [0.0] * 200_000
    values[123_457] = 9.0
    part = curve_of(values).part(0, 200_000, 500)
    assert part.high.count(9.0) == 1
    assert part.x[part.high.index(9.0)] == pytest.approx(123_457, abs=400)


def test_what_is_no_number_is_left_out_and_time_does_not_go_back() -> None:
    curve = Curve()
    for at, value in [(1.0, 1.0), (2.0, math.nan), (3.0, None), (2.5, 2.0), (0.5, 3.0)]:
        curve.append(at, value)
    assert curve.part(0, 10, 100).x == [1.0, 2.5, 2.5]
