from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordee.core.durations import format_duration, parse_duration
from cordee.core.errors import JobError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("10m", 600),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("2d", 172800),
        ("250ms", 0.25),
        ("1m500ms", 60.5),
        (" 1 H 30 M ", 5400),
        ("0s", 0),
    ],
)
def test_lengths_of_time(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("text", ["", "10", "m", "-5m", "ten minutes", "10m!", "1h30", "5 s later", "1e3s", "s10"])
def test_what_is_not_a_length_of_time_is_named(text: str) -> None:
    with pytest.raises(JobError, match=r"stop.time = .* is not a length of time"):
        parse_duration(text, "stop.time")


@given(st.integers(0, 99), st.integers(0, 59), st.integers(0, 59))
def test_parts_add_up(hours: int, minutes: int, seconds: int) -> None:
    assert parse_duration(f"{hours}h{minutes}m{seconds}s") == 3600 * hours + 60 * minutes + seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0 s"),
        (0.84, "0.8 s"),
        (42.4, "42 s"),
        (59.6, "1 m 00 s"),
        (185, "3 m 05 s"),
        (3599.7, "1 h 00 m"),
        (7440, "2 h 04 m"),
    ],
)
def test_readings(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
