"""Logs of several members in one stream, and what cannot be stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from cordee.core.errors import RunDirectoryError
from cordee.monitoring.merged_logs import Logs
from cordee.tools.run_control import stop_run


def write(run: Path, name: str, text: str) -> None:
    (run / "logs").mkdir(parents=True, exist_ok=True)
    with (run / "logs" / f"{name}.log").open("a") as file:
        file.write(text)


def test_lines_of_all_members_are_in_the_order_of_their_times(tmp_path: Path) -> None:
    write(
        tmp_path,
        "worker-0",
        "2026-11-18 10:00:01,000 INFO    a: first\nTraceback\n2026-11-18 10:00:03,000 INFO    a: third\n",
    )
    write(
        tmp_path, "worker-1", "2026-11-18 10:00:02,000 INFO    b: second\n2026-11-18 10:00:04,000 INFO    b: not fini"
    )
    logs = Logs(tmp_path)
    lines = logs.new_lines()
    assert [(line.member, line.text.rpartition(" ")[2]) for line in lines] == [
        ("worker-0", "first"),
        ("worker-0", "Traceback"),  # belongs to the line before
        ("worker-1", "second"),
        ("worker-0", "third"),
    ]
    assert logs.new_lines() == []
    write(tmp_path, "worker-1", "shed\n")
    assert [line.text.rpartition(" ")[2] for line in logs.new_lines()] == ["finished"]


@pytest.mark.parametrize("member", ["worker-1", "worker 1", "1"])
def test_one_member(tmp_path: Path, member: str) -> None:
    write(tmp_path, "worker-0", "zero\n")
    write(tmp_path, "worker-1", "one\n")
    write(tmp_path, "launcher", "launcher\n")
    assert [line.text for line in Logs(tmp_path, member).new_lines()] == ["one"]


def test_a_member_that_is_not_there(tmp_path: Path) -> None:
    write(tmp_path, "worker-0", "zero\n")
    with pytest.raises(RunDirectoryError, match="no log of '7': there are worker-0"):
        Logs(tmp_path, "7").new_lines()


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    write(tmp_path, "worker-0", "\x1b[2Jcleared\x07\tü\n")
    (line,) = Logs(tmp_path).new_lines()
    assert line.text == "\N{REPLACEMENT CHARACTER}[2Jcleared\N{REPLACEMENT CHARACTER}\tü"


def test_what_is_not_under_way_cannot_be_stopped(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        stop_run(tmp_path, wait_s=0, say=print)
    (tmp_path / "job.toml").write_text("name = 'x'")
    with pytest.raises(RunDirectoryError, match="is not under way: it is died"):
        stop_run(tmp_path, wait_s=0, say=print)
