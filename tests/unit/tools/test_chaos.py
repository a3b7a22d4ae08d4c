"""Throughput from the events of a run: by time, not by report, and what is done again counts once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cordee.monitoring import AnyEvent
from cordee.monitoring.events import Step, Warned
from cordee.tools.chaos import Seen, samples_per_second


def steps(*reports: tuple[float, int]) -> list[AnyEvent]:
    return [Step(step=samples, time=at, samples=samples) for at, samples in reports]


def test_spans_are_cut_out_of_the_time_between_reports() -> None:
    events = [*steps((100.0, 0), (110.0, 1000)), Warned(message="x", time=111.0), *steps((120.0, 4000))]
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


def test_a_clock_that_is_behind_counts_as_the_one_before() -> None:
    events = steps((10.0, 0), (20.0, 1000), (19.9, 1001), (30.0, 2001))
    assert samples_per_second(events, [(10.0, 30.0)]) == pytest.approx(2001 / 20)


def test_every_look_reads_what_is_new(tmp_path: Path) -> None:
    seen = Seen(tmp_path)
    assert seen.refresh().samples == 0
    lines = [
        {"type": "coordinator_started", "pid": 7},
        {"type": "worker_started", "worker": 0, "pid": 8, "host": "h", "role": "server"},
        {"type": "worker_started", "worker": 0, "pid": 9, "host": "h", "role": "worker"},
        {"type": "step", "step": 1, "samples": 32},
        {"type": "later"},
        {"type": "worker_started", "worker": 0, "pid": 10, "host": "h", "role": "worker"},
        {"type": "commit", "step": 1, "samples": 16, "epoch": 0, "batch": 1},
        {"type": "recovery", "lost": [0], "seconds": 0.5},
    ]
    with (tmp_path / "events.jsonl").open("a") as file:
        for at, line in enumerate(lines, 1):
            file.write(json.dumps({**line, "time": float(at)}) + "\n")
            file.flush()
            seen.refresh()
    assert (seen.coordinator, seen.workers, seen.samples, seen.last_step_time) == (7, {0: 10}, 32, 8.0)
    assert len(seen.events) == len(lines) - 1
