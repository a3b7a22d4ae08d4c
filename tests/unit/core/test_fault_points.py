"""Fault points: a fault happens once, to the process and at the visit it was asked for, and nothing happens unasked."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from cordee.core import fault_points
from cordee.core.errors import CommunicationError
from cordee.core.fault_points import Fault, ask_for, happened, reach, visits

SOURCES = Path(__file__).parents[3] / "src" / "cordee"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(fault_points, "_folder", tmp_path)
    monkeypatch.setattr(fault_points, "_process", "worker-1")
    monkeypatch.setattr(fault_points, "POINTS", {"here": "", "there": ""})
    return tmp_path


@pytest.mark.parametrize("name", ["*", "worker-12", "worker-*", "worker-1*", "server-0.2", "server-0*", "fork-server"])
def test_names_that_processes_have(name: str) -> None:
    assert fault_points.is_process(name)


@pytest.mark.parametrize("name", ["frog", "worker", "worker-", "worker-x", "server-0.", "evaluator-0", "frog*", ""])
def test_names_that_no_process_has(name: str) -> None:
    assert not fault_points.is_process(name)


def test_nothing_happens_unasked(tmp_path: Path) -> None:
    reach("a point that nobody knows")
    assert list(tmp_path.iterdir()) == []


def test_messages_are_lost_where_a_test_asks_and_the_same_ones_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_points, "_process", "")
    monkeypatch.setattr(fault_points, "_lost_share", 0.0)
    monkeypatch.setattr(fault_points, "_draws", None)
    assert not any(fault_points.loses_message() for _ in range(100))
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr(fault_points.env, "lost_messages", lambda: 0.3)
    lost = []
    for _ in range(2):
        fault_points.identify("worker-1")
        lost.append([fault_points.loses_message() for _ in range(1000)])
    assert lost[0] == lost[1]
    assert 150 < sum(lost[0]) < 250, "two thirds of 30 %, the others are late"


def test_the_error_comes_at_the_visit_it_was_asked_for_and_once(folder: Path) -> None:
    ask_for(folder, [Fault("here", "worker-1", "error", visit=2)])
    reach("here")
    reach("there")
    assert happened(folder) == []
    with pytest.raises(CommunicationError, match="fault point here"):
        reach("here")
    reach("here")
    assert len(happened(folder)) == 1
    assert visits(folder) == [(p, "worker-1") for p in ("here", "there", "here", "here")]


def test_other_processes_are_left_alone_and_a_star_is_any(folder: Path) -> None:
    ask_for(folder, [Fault("here", "worker-0", "error"), Fault("there", "worker-*", "error")])
    reach("here")
    with pytest.raises(OSError, match="there"):
        reach("there", OSError)


def test_a_replacement_counts_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask_for(folder, [Fault("here", "worker-1", "error", visit=2)])
    child = os.fork()
    if child == 0:
        reach("here")
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(CommunicationError):
        reach("here")


@pytest.mark.parametrize(("action", "number"), [("kill", signal.SIGKILL), ("freeze", signal.SIGSTOP)])
def test_signals_are_real(folder: Path, action: fault_points.Action, number: signal.Signals) -> None:
    ask_for(folder, [Fault("here", "worker-1", action)])
    child = os.fork()
    if child == 0:
        reach("here")
        os._exit(0)
    _, status = os.waitpid(child, os.WUNTRACED)
    if action == "kill":
        assert os.WTERMSIG(status) == number
        return
    assert os.WSTOPSIG(status) == number
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_the_table_lists_what_the_sources_reach() -> None:
    """A name may end with the kind of a message, `reach("server.received", of=message)`, or be given to a helper."""
    texts = [path.read_text() for path in SOURCES.rglob("*.py") if path.name != "fault_points.py"]
    names = {name for text in texts for name in re.findall(r"\breach\(\s*\"([^\"]+)\"", text)}
    beginnings = tuple(name for text in texts for name in re.findall(r"\breach\(\s*f\"([^\"{]+)\{", text))
    of_messages = {name for text in texts for name in re.findall(r"\breach\(\"([^\"]+)\"[^)]*\bof=", text)}
    beginnings += tuple(f"{name}." for name in of_messages)
    names -= of_messages
    listed = set(fault_points.POINTS)
    assert names <= listed
    calls = [line for text in texts for line in text.splitlines() if re.search(r"\b(reach|_request|_take)\(", line)]
    passed_on = {name for line in calls for name in re.findall(r"\"([a-z_]+\.[a-z_]+)\"", line)}
    assert {name for name in listed - names - passed_on if not name.startswith(beginnings)} == set()
    assert [start for start in beginnings if not any(name.startswith(start) for name in listed)] == []
