"""Throughput from the events of a run: by time, not by report, and what is done again counts once."""

from __future__ import annotations

from typing import Any

import pytest

from cordee.tools.chaos import samples_per_second


def steps(*reports: tuple[float, int]) -> list[dict[str, Any]]:
    return [{"type": "step", "time": at, "samples": samples} for at, samples in reports]


def test_spans_are_cut_out_of_the_time_between_reports() -> None:
    events = [*steps((100.0, 0), (110.0, 1000)), {"type": "warning", "time": 111.0}, *steps((120.0, 4000))]
    assert samples_per_second(events, [(100.0, 110.0)]) == pytest.approx(100.0)
    assert samples_per_second(events, [(105.0, 115.0)]) == pytest.approx(200.0)
    assert samples_per_second(events, [(100.0, 105.0), (115.0, 120.0)]) == pytest.approx(200.0)


def test_what_is_done_again_counts_once_and_a_standstill_counts_as_one() -> None:
    events = steps((0.0, 0), (10.0, 1000), (12.0, 500), (20.0, 1000), (30.0, 2000))
    assert samples_per_second(events, [(0.0, 10.0)]) == pytest.approx(100.0)
    assert samples_per_second(events, [(10.0, 30.0)]) == pytest.approx(50.0)
    assert samples_per_second(events, [(30.0, 40.0)]) == 0.0


def test_without_a_step_there_is_no_speed() -> None:
    assert samples_per_second([], [(0.0, 1.0)]) == 0.0
