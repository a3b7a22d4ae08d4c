"""Recording phases, reading them back, the trace of them, and what is said of them."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cordee.core.blocked_time import BLOCKED, WAITED
from cordee.core.errors import RunDirectoryError, StorageError
from cordee.core.passes import PASSES, PassKind, is_sampled, sampled_around
from cordee.monitoring.diagnosis import Crowd, add_up, diagnose_phases, diagnose_queue, find_crowd
from cordee.monitoring.events import Fault, WorkerLost, WorkerStarted
from cordee.monitoring.timeline import (
    FOLDER,
    Line,
    Phase,
    Timeline,
    TimelineFolder,
    follow_member,
    list_members,
)
from cordee.monitoring.trace import make_trace, write_trace


def require_nested(trace: list[dict[str, Any]]) -> int:
    """Fail unless slices of each track are one after the other or one inside the other; return how many there are."""
    by_track: dict[int, list[dict[str, Any]]] = {}
    for event in trace:
        if event["ph"] == "X":
            by_track.setdefault(event["tid"], []).append(event)
    for slices in by_track.values():
        open_until: list[int] = []
        for one in sorted(slices, key=lambda one: (one["ts"], -one["dur"])):
            while open_until and open_until[-1] <= one["ts"]:
                open_until.pop()
            assert not open_until or one["ts"] + one["dur"] <= open_until[-1], one
            open_until.append(one["ts"] + one["dur"])
    return sum(len(slices) for slices in by_track.values())


def record(work: Any) -> list[Line]:
    lines: list[Line] = []
    timeline = Timeline("worker-0", lines.append)
    try:
        timeline.enter("training")
        work(timeline)
    finally:
        timeline.close()
    return lines


def test_every_moment_of_training_is_in_one_phase() -> None:
    def work(timeline: Timeline) -> None:
        for step in range(1, 4):
            timeline.switch(Phase.DATA)
            time.sleep(0.02)
            timeline.switch(Phase.COMPUTE)
            time.sleep(0.01)
            with BLOCKED:
                time.sleep(0.02)
                WAITED.add(0.015)
            timeline.end_step(step)
        with timeline.inside(Phase.EVALUATE), BLOCKED:
            time.sleep(0.03)

    lines = record(work)
    totals = add_up(lines)
    assert totals[Phase.DATA] == pytest.approx(60_000, rel=0.5)
    assert totals[Phase.WAIT] == pytest.approx(45_000, rel=0.02), "what was waited is not exchange"
    assert 10_000 <= totals[Phase.EXCHANGE] <= 30_000
    assert 30_000 <= totals[Phase.EVALUATE] <= 60_000, "communication in an evaluation is the evaluation's"
    assert [state for line in lines for _, state in line.states] == ["training", "ended"]
    steps = [step for line in lines for step, num in zip(line.step, line.steps, strict=True) if num]
    assert steps == [1, 2, 3]
    ends = [at + sum(column[i] for column in line.phases) for line in lines for i, at in enumerate(line.at)]
    begins = [at for line in lines for at in line.at]
    for end, begin in zip(ends, begins[1:], strict=False):
        assert 0 <= begin - end < 1000, "rows leave no gap and do not overlap"


def test_short_steps_share_a_row() -> None:
    def work(timeline: Timeline) -> None:
        timeline.switch(Phase.COMPUTE)
        for step in range(1, 1001):
            timeline.end_step(step)

    lines = record(work)
    assert sum(sum(line.steps) for line in lines) == 1000
    assert sum(line.num_rows for line in lines) < 100


def test_what_another_thread_communicates_does_not_hold_training_up() -> None:
    def work(timeline: Timeline) -> None:
        def communicate() -> None:
            with BLOCKED:
                time.sleep(0.05)

        timeline.switch(Phase.COMPUTE)
        other = threading.Thread(target=communicate)
        other.start()
        other.join()
        timeline.end_step(1)

    assert add_up(record(work))[Phase.EXCHANGE] == 0


def test_nothing_is_counted_after_the_end_or_without_a_writer() -> None:
    record(lambda timeline: None)
    before = BLOCKED.ns
    with BLOCKED:
        time.sleep(0.001)
    assert BLOCKED.ns == before
    idle = Timeline()
    idle.switch(Phase.COMPUTE)
    idle.end_step(1)
    idle.enter("training")
    idle.close()


def test_a_disk_that_refuses_ends_the_record_and_not_the_training() -> None:
    def refuse(line: Line) -> None:
        raise StorageError("no space left on device")

    timeline = Timeline("worker-0", refuse)
    timeline.enter("training")
    timeline.switch(Phase.COMPUTE)
    timeline.end_step(1)
    timeline.close()


def test_nested_blocks_count_once() -> None:
    def work(timeline: Timeline) -> None:
        timeline.switch(Phase.COMPUTE)
        with BLOCKED, BLOCKED:
            time.sleep(0.02)
        timeline.end_step(1)

    assert 20_000 <= add_up(record(work))[Phase.EXCHANGE] < 39_000


def line(
    at: list[int], *, steps: int = 1, origin_us: int = 1_000_000, member: str = "worker-0", **columns: int
) -> Line:
    values = {phase.name.lower(): [columns.get(phase.name.lower(), 0)] * len(at) for phase in Phase}
    places: dict[str, Any] = {"step": list(range(1, len(at) + 1)), "steps": [1] * len(at), "at": at}
    return Line(member="worker-0", pid=1, host="h", origin_us=1_000_000, **places, **values)


def test_files_are_read_as_they_grow_and_damage_is_passed_over(tmp_path: Path) -> None:
    folder = TimelineFolder(tmp_path)
    folder.write("worker-10", line([0], compute=5))
    folder.write("worker-2", line([0], compute=5))
    assert list_members(tmp_path) == ["worker-2", "worker-10"]
    lines, offset = follow_member(tmp_path, "worker-2")
    assert len(lines) == 1 and follow_member(tmp_path, "worker-2", offset) == ([], offset)
    with (tmp_path / FOLDER / "worker-2.jsonl").open("ab") as file:
        file.write(b'not json\n{"member": 3}\n')
    folder.write("worker-2", line([9], compute=7))
    with (tmp_path / FOLDER / "worker-2.jsonl").open("ab") as file:
        file.write(b'{"member": "wor')
    more, _ = follow_member(tmp_path, "worker-2", offset)
    assert [one.at for one in more] == [[9]]


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "worker-0.jsonl").symlink_to("/etc/hostname")
    with pytest.raises(RunDirectoryError, match="link"):
        follow_member(tmp_path, "worker-0")
    with pytest.raises(StorageError):
        TimelineFolder(tmp_path).write("worker-0", line([0]))


def test_a_trace_is_strictly_nested_even_where_rows_overlap() -> None:
    overlapping = [line([0, 50, 60], data=30, compute=40, wait=20, exchange=10), line([150], evaluate=500)]
    trace = list(make_trace({"worker-0": overlapping, "worker-1": [line([0], compute=5)]}, []))
    assert require_nested(trace) == 3 * 5 + 2 + 2
    names = {event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    assert names == {"worker-0", "worker-1"}


def test_passes_of_sampled_steps_are_recorded_and_on_a_track_of_their_own() -> None:
    def work(timeline: Timeline) -> None:
        for step in range(1, 13):
            timeline.switch(Phase.COMPUTE)
            if PASSES.is_on:
                begin_ns = time.perf_counter_ns()
                PASSES.add(PassKind.FORWARD, 1, step, begin_ns)
                PASSES.add(PassKind.BACKWARD, 1, step, begin_ns)
            timeline.end_step(step)

    lines = record(work)
    assert [passes.step for line in lines for passes in line.passes] == [*range(2, 10), 10]  # 1: it had begun before
    assert all(passes.microbatch == [passes.step] * 2 for line in lines for passes in line.passes)
    assert not PASSES.is_on, "a process that records nothing more pays for nothing"
    trace = list(make_trace({"worker-0": lines}, []))
    assert require_nested([event for event in trace if event["tid"] == 2]) == 2 * 9
    assert {event["args"]["name"] for event in trace if event["name"] == "thread_name"} == {
        "worker-0",
        "worker-0 passes",
    }


@pytest.mark.parametrize(
    ("step", "expected"), [(1, True), (9, True), (10, True), (11, False), (300, True), (310, False)]
)
def test_which_steps_are_sampled(step: int, expected: bool) -> None:
    assert is_sampled(step) is expected


def test_the_steps_that_are_not_sampled_are_known_without_looking_at_each() -> None:
    for step in [*range(1, 1200), 99_999, 100_000, 100_001]:
        last, following = sampled_around(step)
        assert last <= step < following
        assert is_sampled(last)
        assert is_sampled(following)
        assert not any(map(is_sampled, range(last + 1, min(following, last + 200))))


def test_steps_that_are_taken_again_are_sampled_again() -> None:
    def work(timeline: Timeline) -> None:
        timeline.switch(Phase.COMPUTE)
        for step in (8, 9, 10, 19, 8, 9, 10):
            if PASSES.is_on:
                PASSES.add(PassKind.FORWARD, 0, 0, time.perf_counter_ns())
            timeline.end_step(step)

    assert [passes.step for line in record(work) for passes in line.passes] == [9, 10, 8, 9, 10]


def test_a_wait_outside_of_communication_is_not_counted_to_the_next_one() -> None:
    def work(timeline: Timeline) -> None:
        timeline.switch(Phase.DATA)
        WAITED.add(10.0)  # of another thread
        timeline.switch(Phase.COMPUTE)
        with BLOCKED:
            time.sleep(0.02)
        timeline.end_step(1)

    totals = add_up(record(work))
    assert totals[Phase.WAIT] == 0
    assert totals[Phase.EXCHANGE] >= 20_000


def test_the_trace_has_what_happened_to_a_member() -> None:
    found = [
        Fault(time=1.4, fault="kill", target="worker 0"),
        WorkerLost(time=1.5, worker=0, step=1, reason="was killed", role="worker"),
        WorkerStarted(time=1.7, worker=0, pid=7, host="h", role="worker"),
    ]
    marks = [(e["name"], e["ts"]) for e in make_trace({"worker-0": [line([0], compute=5)]}, found) if e["ph"] == "i"]
    assert marks == [("fault: kill", 400_000), ("lost", 500_000), ("rejoined", 700_000)]


def test_a_frozen_member_is_marked_since_it_was_heard_last() -> None:
    lost = WorkerLost(time=3.5, worker=0, step=1, reason="is frozen: no sign of life for 2.0 s", role="worker")
    marks = [(e["name"], e["ts"]) for e in make_trace({"worker-0": [line([0], compute=5)]}, [lost]) if e["ph"] == "i"]
    assert marks == [("frozen", 500_000), ("lost", 2_500_000)]


def test_the_check_of_nesting_can_fail() -> None:
    one = {"ph": "X", "tid": 1, "ts": 0, "dur": 10}
    with pytest.raises(AssertionError):
        require_nested([one, {**one, "ts": 5}])


def test_clocks_of_other_hosts_are_set_right_in_the_trace() -> None:
    late = Line(**{**{name: getattr(line([0], compute=5), name) for name in Line.__struct_fields__}, "offset_us": 700})
    trace = list(make_trace({"worker-0": [line([0], compute=5)], "worker-1": [late]}, []))
    begins = {event["tid"]: event["ts"] for event in trace if event["ph"] == "X"}
    assert begins == {1: 0, 2: 700}


def test_a_trace_names_losses_and_is_refused_without_rows(tmp_path: Path) -> None:
    lost = WorkerLost(worker=0, step=1, reason="was killed", role="worker", time=1.5)
    (mark,) = [e for e in make_trace({"worker-0": [line([0], compute=5)]}, [lost]) if e["name"] == "lost"]
    assert mark["ts"] == 500_000
    with pytest.raises(RunDirectoryError, match="no timeline"):
        write_trace(tmp_path, tmp_path / "trace.json.gz")
    TimelineFolder(tmp_path).write("worker-0", line([0], compute=5))
    assert write_trace(tmp_path, tmp_path / "trace.json.gz") == (1, 1)
    content = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    assert require_nested(content["traceEvents"]) == 2


def phases(**shares: float) -> list[int]:
    return [round(shares.get(phase.name.lower(), 0.0) * 10_000_000) for phase in Phase]


def test_who_trained_alone_for_a_while_is_not_blamed() -> None:
    alone = [4 * each for each in phases(compute=0.9, wait=0.1)]
    said = diagnose_phases({"worker-0": alone, "worker-1": phases(compute=0.6, wait=0.4)})
    assert said == "the workers wait 40 % of the time for each other: their steps differ in length"


def test_stages_that_wait_for_each_other_need_other_advice_than_copies() -> None:
    totals = {"worker-0": phases(compute=0.6, wait=0.4), "worker-1": phases(compute=0.65, wait=0.35)}
    assert "strategy.microbatches" in diagnose_phases(totals, has_stages=True)


def test_workers_without_a_core_each_are_not_told_that_their_steps_differ() -> None:
    totals = {f"worker-{n}": phases(compute=0.6, wait=0.4) for n in range(4)}
    places = {"worker 0": ("b", 8), **{f"worker {n}": ("a", 2) for n in (1, 2, 3)}}
    crowd = find_crowd(places)
    assert crowd == ("a", 3, 2)
    assert diagnose_phases(totals, crowd=crowd) == (
        "the workers wait up to 40 % of the time for each other: 3 workers share 2 cores of a; "
        "lower strategy.workers, or add hosts"
    )
    assert find_crowd({"worker 0": ("a", 2), "worker 1": ("a", 2)}) is None
    assert find_crowd({"worker 0": ("a", 0), "worker 1": ("a", 0)}) is None, "an old timeline does not say"
    assert record(lambda timeline: None)[-1].cores == len(os.sched_getaffinity(0))


def test_who_has_no_core_is_named_before_what_phases_say() -> None:
    queued = {"worker 0": (100_000, 5_000_000), "worker 1": (3_000_000, 5_000_000), "worker 2": (9, 10)}
    assert diagnose_queue(queued, None) == (
        "worker 1 waits for a core 60 % of the time: "
        "its cores are taken by other programs or data.processes, or training.threads is too high"
    )
    assert diagnose_queue(queued, Crowd("a", 3, 2)) == (
        "worker 1 waits for a core 60 % of the time: 3 workers share 2 cores of a; lower strategy.workers, or add hosts"
    )
    assert diagnose_queue({"worker 0": (900_000, 5_000_000)}, None) == ""
    assert diagnose_queue({}, None) == ""


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="the kernel does not count it")
def test_the_time_without_a_core_is_recorded() -> None:
    """Two threads of one process on one core: each waits for it about half of the time."""
    allowed = os.sched_getaffinity(0)
    is_over = threading.Event()

    def compute() -> None:
        content = bytes(1 << 20)
        while not is_over.is_set():
            hashlib.sha256(content)  # without the interpreter's lock

    def work(timeline: Timeline) -> None:
        end_s = time.monotonic() + 0.3
        while time.monotonic() < end_s:
            hashlib.sha256(bytes(1 << 20))
        timeline.note()

    other = threading.Thread(target=compute)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        other.start()
        lines = record(work)
    finally:
        is_over.set()
        other.join()
        os.sched_setaffinity(0, allowed)
    assert lines[-1].queued_us - lines[0].queued_us > 20_000


@pytest.mark.parametrize(
    ("totals", "said"),
    [
        ({}, ""),
        ({"worker-0": phases(compute=1.0)}, ""),
        (
            {"worker-3": phases(data=0.38, compute=0.62), "worker-0": phases(wait=0.38, compute=0.62)},
            "worker 3 waits for its data 38 % of the time: raise data.processes",
        ),
        (
            {"worker-0": phases(compute=0.5, wait=0.5), "worker-1": phases(compute=1.0)},
            "worker 0 waits 50 % of the time for worker 1, which computes longer",
        ),
        (
            {"worker-0": phases(compute=0.6, wait=0.4), "worker-1": phases(compute=0.65, wait=0.35)},
            "the workers wait 40 % of the time for each other: their steps differ in length",
        ),
        (
            {"worker-0": phases(compute=0.2, exchange=0.5, wait=0.3), "worker-1": phases(exchange=0.7, wait=0.3)},
            "worker 1 exchanges 70 % of the time: raise training.batch_size, or see docs/how-to/slow-links.md",
        ),
        (
            {"worker-0": phases(compute=0.5, exchange=0.5)},
            "worker 0 exchanges 50 % of the time: raise training.batch_size, or see docs/how-to/slow-links.md",
        ),
        (
            {"worker-0": phases(compute=0.5, evaluate=0.5)},
            "worker 0 spends 50 % of the time in evaluate: raise evaluation.every_steps",
        ),
        ({"worker-0": [1000, 0, 0, 0, 0, 0]}, ""),
    ],
)
def test_diagnosis(totals: dict[str, list[int]], said: str) -> None:
    assert diagnose_phases(totals) == said
