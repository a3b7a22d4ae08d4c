"""The events file: valid JSON on every line, whatever happened to the process or the disk."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cordee.core.errors import RunDirectoryError, StorageError
from cordee.monitoring import AnyEvent, JsonlSink, Monitor, read_events, read_lines
from cordee.monitoring.events import Checkpoint, Step, Warned
from cordee.monitoring.files import to_json

WHOLE = b'{"time":1.0,"type":"step","step":1}\n'


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line, parse_constant=_refuse) for line in path.read_text().splitlines()]


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def test_an_event_is_one_line_with_time_type_and_fields(tmp_path):
    with Monitor([JsonlSink(tmp_path / "e.jsonl")]) as monitor:
        monitor.emit(Step(step=3, loss=0.5, accuracy=None))
    (event,) = lines_of(tmp_path / "e.jsonl")
    assert set(event) == {"type", *Step.__struct_fields__}
    assert event["type"] == "step"
    assert event["accuracy"] is None


def test_a_line_is_in_the_file_before_emit_returns(tmp_path):
    sink = JsonlSink(tmp_path / "e.jsonl")
    sink.emit(Step(time=1.0, step=1))
    assert len(lines_of(tmp_path / "e.jsonl")) == 1
    sink.close()
    sink.close()


def test_numbers_that_are_none_become_null(tmp_path):
    sink = JsonlSink(tmp_path / "e.jsonl")
    sink.emit(Step(time=1.0, step=1, loss=math.nan, lr=math.inf, accuracy=-math.inf))
    sink.close()
    (event,) = lines_of(tmp_path / "e.jsonl")
    assert event["loss"] is event["lr"] is event["accuracy"] is None


def test_values_of_other_libraries_are_written_as_plain_ones(tmp_path):
    fields = {
        "tensor": torch.tensor(0.5),
        "not_a_number": torch.tensor(math.nan),
        "numpy": np.float32(0.25),
        "array": np.arange(3),
        "path": Path("runs/x"),
        "bytes_in_a_name": "caf\udce9",
        "line": "one\ntwo",
    }
    (tmp_path / "e.jsonl").write_bytes(to_json({"type": "step", **fields}))
    (event,) = lines_of(tmp_path / "e.jsonl")
    assert event["tensor"] == 0.5
    assert event["not_a_number"] is None
    assert event["numpy"] == 0.25
    assert event["path"] == "runs/x"
    assert event["line"] == "one\ntwo"
    assert event["bytes_in_a_name"] == "caf\\udce9"


def test_an_event_may_have_values_of_other_libraries(tmp_path):
    sink = JsonlSink(tmp_path / "e.jsonl")
    sink.emit(Step(time=1.0, step=1, loss=torch.tensor(0.5), accuracy=np.float32(0.25)))
    sink.emit(Checkpoint(time=1.0, step=1, path=Path("runs/caf\udce9"), seconds=0.5, stall_s=0.1))
    sink.close()
    step, saved = lines_of(tmp_path / "e.jsonl")
    assert (step["loss"], step["accuracy"]) == (0.5, 0.25)
    assert saved["path"] == "runs/caf\\udce9"


@pytest.mark.parametrize(
    ("tail", "kept"),
    [
        (b'{"time":2.0,"ty', 1),  # torn: taken away
        (b'{"time":2.0,"type":"step"}', 2),  # whole, only its end is missing: kept
        (b"\0" * 100, 1),  # what some file systems leave after a power cut
        (b'{"text":"' + b"x" * 200_000, 1),  # longer than one read
        (b"12", 1),
    ],
)
def test_an_incomplete_last_line_is_repaired_before_the_next(tmp_path, tail, kept):
    path = tmp_path / "e.jsonl"
    path.write_bytes(WHOLE + tail)
    sink = JsonlSink(path)
    sink.emit(Step(time=3.0, step=1))
    sink.close()
    events = lines_of(path)
    assert len(events) == kept + 1
    assert events[-1]["time"] == 3.0


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 2 * len(WHOLE)))
def test_a_file_cut_anywhere_gives_whole_lines_after_reopening(tmp_path, cut):
    path = tmp_path / "e.jsonl"
    path.write_bytes((WHOLE + WHOLE)[:cut])
    sink = JsonlSink(path)
    sink.emit(Step(time=3.0, step=1))
    sink.close()
    assert len(lines_of(path)) == (cut + 1) // len(WHOLE) + 1  # all but the newline is enough


def test_reading_passes_over_a_line_that_is_being_written(tmp_path):
    path = tmp_path / "e.jsonl"
    path.write_bytes(WHOLE * 3 + b'{"time":2.0,"ty')
    assert [event["step"] for event in read_events(path)] == [1, 1, 1]
    assert len(list(read_events(path, tail_bytes=len(WHOLE) + 20))) == 1
    assert len(list(read_events(path, tail_bytes=10**6))) == 3


def test_a_file_that_cannot_be_opened_is_a_storage_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="not a directory"):
        JsonlSink(tmp_path / "file" / "e.jsonl")


def test_a_full_disk_ends_the_file_with_a_whole_line_and_one_warning(small_disk, fill):
    class Console:
        def __init__(self) -> None:
            self.warnings: list[str] = []

        def emit(self, event: AnyEvent) -> None:
            if isinstance(event, Warned) and "space" in event.message:
                self.warnings.append(event.message)

        def close(self) -> None:
            pass

    path, console = small_disk / "e.jsonl", Console()
    with Monitor([JsonlSink(path), console]) as monitor:
        for step in range(10):
            monitor.emit(Step(step=step))
        fill(small_disk)
        for _ in range(10, 500):
            monitor.emit(Warned(message="x" * 100))
    (warning,) = console.warnings
    assert str(path) in warning
    assert "no space left on device" in warning
    assert len(lines_of(path)) >= 10
    assert path.read_bytes().endswith(b"\n")


def test_a_line_written_in_part_is_taken_back(tmp_path, monkeypatch):
    path = tmp_path / "e.jsonl"
    sink = JsonlSink(path)
    sink.emit(Step(time=1.0, step=1))
    real_write = os.write
    calls = []

    def write_ten_bytes_then_fail(descriptor: int, data: bytes) -> int:
        calls.append(data)
        if len(calls) == 1:
            return real_write(descriptor, data[:10])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_ten_bytes_then_fail)
        with pytest.raises(StorageError, match="training continues"):
            sink.emit(Step(time=2.0, step=2))
    sink.close()
    assert [event["step"] for event in lines_of(path)] == [1]


def test_a_deeply_nested_line_is_passed_over(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text("[" * 200_000 + "]" * 200_000 + '\n{"type": "step"}\n')
    assert list(read_events(path)) == [{"type": "step"}]


def test_lines_that_are_no_events_are_kept_apart(tmp_path):
    path = tmp_path / "events.jsonl"
    event = {"time": 1.0, "type": "step", "step": 1}
    path.write_bytes(WHOLE + b"\0\0\n" + b'{"step":1}\n' + WHOLE)
    assert read_lines(path) == ([event, None, None, event], False)
    path.write_bytes(WHOLE + WHOLE[:-5])
    assert read_lines(path) == ([event], True)
    path.write_bytes(b"")
    assert read_lines(path) == ([], False)
    assert list(read_events(path)) == []


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "events.jsonl")
    for read in (read_events, read_lines):
        with pytest.raises(RunDirectoryError, match="not a regular file"):
            list(read(tmp_path / "events.jsonl"))
