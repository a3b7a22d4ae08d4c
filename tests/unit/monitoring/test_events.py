from __future__ import annotations

import json
from pathlib import Path

import pytest
from event_table import PAGE, with_table
from hypothesis import given
from hypothesis import strategies as st

from cordee.core.errors import RunDirectoryError
from cordee.monitoring import AnyEvent, JsonlSink, Monitor, Summary, UnreadableLine, follow
from cordee.monitoring.events import EVENT_TYPES, RunEnded, RunStarted, Step, Warned, decode_event, stamp


def test_the_page_has_the_events_that_there_are() -> None:
    page = PAGE.read_text()
    assert page == with_table(page), "run python tests/unit/monitoring/event_table.py"


def test_every_event_has_its_origin() -> None:
    for kind, struct in EVENT_TYPES.items():
        assert {"time", "member"} <= set(struct.__struct_fields__), kind
        assert struct.__struct_config__.tag_field == "type"


def test_what_a_monitor_records_is_decoded(tmp_path: Path) -> None:
    with Monitor([JsonlSink(tmp_path / "events.jsonl")], member="launcher") as monitor:
        monitor.emit(RunStarted(strategy="single", workers=1, start_step=0, schema_version=1))
        monitor.emit(Step(step=1, loss=float("nan"), time=12.5, member="worker 1"))
        monitor.emit(RunEnded.of(Summary(status="completed", steps=1)))
    (started, step, ended), _ = follow(tmp_path)
    assert isinstance(started, RunStarted)
    assert (started.member, started.schema_version) == ("launcher", 1)
    assert step == Step(time=12.5, member="worker 1", step=1)
    assert isinstance(ended, RunEnded)
    assert (ended.status, ended.steps) == ("completed", 1)


def test_following_reads_only_what_is_new(tmp_path: Path) -> None:
    assert follow(tmp_path) == ([], 0)
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"time": 1.0, "type": "step", "step": 1}\n')
    events, offset = follow(tmp_path)
    assert events == [Step(time=1.0, step=1)]
    assert follow(tmp_path, offset) == ([], offset)
    with path.open("ab") as file:
        file.write(b'{"time": 2.0, "type": "warn')
    assert follow(tmp_path, offset) == ([], offset), "the line is not complete"
    with path.open("ab") as file:
        file.write(b'ing", "message": "late"}\n')
    events, end = follow(tmp_path, offset)
    assert events == [Warned(time=2.0, message="late")]
    assert end == path.stat().st_size


def test_following_does_not_read_what_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"time": 1.0, "type": "step", "step": 1}\n' * 1000)
    _, offset = follow(tmp_path)
    decoded: list[bytes] = []
    monkeypatch.setattr("cordee.monitoring.jsonl.decode_event", lambda line, _: decoded.append(line))
    follow(tmp_path, offset)
    assert decoded == []


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\xff",
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"type": "step"}',
        b'{"type": "step", "step": 1}',
        b'{"time": 1.0}',
        b'{"time": 1.0, "type": "later", "x": 1}',
        b'{"time": 1.0, "type": "step", "step": "one"}',
    ],
)
def test_a_line_that_is_no_event_is_reported(tmp_path: Path, line: bytes) -> None:
    good = b'{"time": 1.0, "type": "step", "step": 1}'
    (tmp_path / "events.jsonl").write_bytes(good + b"\n" + line + b"\n" + good + b"\n")
    (first, unreadable, last), _ = follow(tmp_path)
    assert first == last == Step(time=1.0, step=1)
    assert isinstance(unreadable, UnreadableLine)
    assert (unreadable.offset, unreadable.line) == (len(good) + 1, line)
    assert unreadable.problem


def test_a_field_of_a_later_version_is_passed_over() -> None:
    assert decode_event(b'{"time": 1.0, "type": "step", "step": 1, "later": {}}') == Step(time=1.0, step=1)


def test_a_file_that_became_shorter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(b"{}\n")
    with pytest.raises(RunDirectoryError, match="shorter"):
        follow(tmp_path, 100)


def test_a_pipe_in_the_place_of_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").mkdir()
    with pytest.raises(RunDirectoryError, match="regular"):
        follow(tmp_path)


@given(st.binary())
def test_any_bytes_are_an_event_or_reported(line: bytes) -> None:
    decode_event(line)


@pytest.mark.parametrize("event", [Step(step="1"), RunEnded(status="fine")])  # type: ignore[arg-type]
def test_what_is_no_event_is_an_error_in_tests(tmp_path: Path, event: AnyEvent) -> None:
    with Monitor([JsonlSink(tmp_path / "events.jsonl")]) as monitor, pytest.raises(AssertionError, match="Unreadable"):
        monitor.emit(event)


def test_the_first_to_emit_an_event_is_its_origin() -> None:
    event = stamp(Warned(message="x"), "worker 1")
    assert event.time > 0 and event.member == "worker 1"
    assert stamp(event, "coordinator") is event


def test_an_event_of_an_older_run_has_no_member() -> None:
    line = json.dumps({"time": 1.0, "type": "warning", "message": "x"}).encode()
    assert decode_event(line) == Warned(time=1.0, member="", message="x")
