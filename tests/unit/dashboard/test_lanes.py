"""What members did when, in columns, in memory that does not grow with the run."""

from __future__ import annotations

from typing import Any

import pytest

from cordee.dashboard.lanes import Lane, Lanes
from cordee.monitoring.timeline import Line

MS = 1000  # microseconds


def line(at: list[int], *, origin_s: float = 100.0, pid: int = 1, **columns: Any) -> Line:
    rows = {name: [0] * len(at) for name in ("step", "data", "compute", "exchange", "wait", "evaluate", "save")}
    rows |= {"steps": [1] * len(at), "at": at}
    return Line(member="worker-0", pid=pid, host="h", origin_us=round(origin_s * 1e6), **{**rows, **columns})


def second_of(moment: float) -> float:
    return max(moment - 100.0, 0.0)


def test_columns_have_the_shares_of_what_was_done_in_them() -> None:
    lane = Lane()
    lane.take(line([0, 1000 * MS], compute=[1000 * MS, 250 * MS], wait=[0, 750 * MS]), second_of)
    part = lane.part(0, 2, 2)
    assert (part["compute"], part["wait"], part["data"]) == ([100, 25], [0, 75], [0, 0])


@pytest.mark.parametrize("num_bins", [4, 64])
def test_a_run_longer_than_the_bins_keeps_its_sums(num_bins: int) -> None:
    lane = Lane(num_bins)
    for second in range(100):
        lane.take(line([0], origin_s=100 + second, compute=[500 * MS], exchange=[250 * MS]), second_of)
    part = lane.part(0, 100, 1)
    assert (part["compute"], part["exchange"]) == ([pytest.approx(50, abs=15)], [pytest.approx(25, abs=8)])


def test_processor_and_traffic_are_of_the_time_between_two_lines_of_one_process() -> None:
    lane = Lane()
    lane.take(line([], until=1_000 * MS, cpu_us=700_000, memory_bytes=10, sent_bytes=900), second_of)
    lane.take(line([], until=2_000 * MS, cpu_us=1_200_000, memory_bytes=30, sent_bytes=1900), second_of)
    part = lane.part(1.0, 2.0, 1)
    assert (part["cpu"], part["sent"]) == ([0.5], [1000.0])
    # A process that takes the place of the last one counts from its own beginning.
    lane.take(line([], pid=2, until=3_000 * MS, cpu_us=100, memory_bytes=20, sent_bytes=5), second_of)
    assert lane.part(2.1, 3.0, 1)["cpu"] == [None]
    assert lane.part(0, 4, 1)["memory"] == [30.0]


def test_the_ages_of_gradients_are_of_the_worker_and_not_of_the_server() -> None:
    lanes = Lanes()
    for second, ages in enumerate([(2, 2, 2), (2, 6, 5)]):
        server = line([], origin_s=100, until=second * 1000 * MS, ages={"worker-3": ages})
        lanes.take("server 0", [server], second_of)
    members = lanes.part(0, 2, 2)["members"]
    assert (members["worker 3"]["age"], members["worker 3"]["highest_age"]) == ([1.0, 3.0], [2.0, 5.0])
    assert lanes.part(0, 4, 1)["members"]["worker 3"]["age"] == [2.0]
    assert "age" not in members["server 0"]


def test_times_that_make_no_sense_are_kept_inside() -> None:
    lane = Lane()
    lane.take(line([2**60], compute=[2**60]), second_of)
    lane.take(line([0], origin_s=-1e9, compute=[MS]), second_of)
    assert len(lane.part(0, 1e9, 10)["compute"]) == 10


def test_an_answer_has_no_more_cells_than_a_browser_draws() -> None:
    lanes = Lanes()
    for member in range(1000):
        lanes.take(f"worker-{member}", [line([0], compute=[MS])], second_of)
    part = lanes.part(0, 1, 1200)
    assert part["columns"] * 1000 <= 24_000
    assert {len(each["compute"]) for each in part["members"].values()} == {part["columns"]}
