"""The coordinator's journal, and the socket between it and its launcher."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from cordee.cluster.engine import Exited, Started
from cordee.cluster.journal import Journal, remove_journal
from cordee.cluster.launcher_link import LauncherLink, LauncherSpec
from cordee.cluster.launcher_messages import (
    Emit,
    FramedSocket,
    NumberedCommand,
    Show,
    Stop,
    ToCoordinator,
    ToLauncher,
    Unjournalled,
    connect,
    listen,
)
from cordee.core.errors import StorageError
from cordee.monitoring.events import Step, Warned

ONE, TWO, THREE, FOUR = (Warned(message=text, time=1.0) for text in ("one", "two", "three", "four"))


def test_the_newest_entry_is_there_for_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.sqlite"
    with Journal(path, "run") as journal:
        assert journal.load() is None
        journal.commit(b"one", b"a")
        journal.commit(b"two", b"b")
        assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}, "there are keys in it"
        with Journal(path, "run") as next_one:  # as when the first was killed: nothing was closed
            assert next_one.load() == (b"two", b"b") and next_one.num_entries == 2
    with Journal(path, "another run") as other:
        assert other.load() is None
    remove_journal(path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_journal_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.sqlite"
    path.write_bytes(b"no database, but long enough to be read as one" * 100)
    with Journal(path, "run") as journal:
        assert journal.load() is None
        journal.commit(b"state", b"")


def test_where_nothing_can_be_written_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot write .*coordinator\.sqlite"):
        Journal(tmp_path / "missing" / "coordinator.sqlite", "run")


def test_what_was_said_before_the_end_is_heard(tmp_path: Path) -> None:
    folder = tmp_path / ("deep" * 40)  # longer than the address of a socket may be
    folder.mkdir()
    said = [NumberedCommand(1, Emit(Step(step=3, loss=float("inf"), time=1.0))), Show(4, None)]
    with listen(folder) as listener:
        theirs = FramedSocket(connect(folder), ToCoordinator)
        ours = FramedSocket(listener.accept()[0], ToLauncher)
        for report in (Started(0, 1, 11), Exited(0, 1, 11, -9), Stop()):
            ours.send(report)
        assert list(theirs.receive()) == [Started(0, 1, 11), Exited(0, 1, 11, -9), Stop()]
        assert list(theirs.receive()) == []
        for message in said:
            theirs.send(message)
        theirs.close()
        heard = []
        with pytest.raises(EOFError):
            for message in ours.receive():
                heard.append(message)
        assert heard == said
        ours.close()


def test_a_message_that_was_cut_off_is_not_heard() -> None:
    left, right = socket.socketpair()
    post = FramedSocket(right, ToLauncher)
    left.sendall(b"\x40\x00\x00\x00only the beginning")
    left.close()
    with pytest.raises(EOFError):
        assert list(post.receive()) == []
    post.close()


def order_in(folder: Path, run_dir: Path) -> LauncherSpec:
    return LauncherSpec(folder=str(folder), run_dir=str(run_dir), run_id="run", alive_every_s=60.0)


def heard_by(listener: socket.socket, link: LauncherLink) -> list[object]:
    """Return what a launcher hears of a coordinator until it is gone."""
    link.close()
    post = FramedSocket(listener.accept()[0], ToLauncher)
    heard = []
    with pytest.raises(EOFError):
        for message in post.receive():
            heard.append(message)
    post.close()
    return heard


def test_a_coordinator_that_comes_back_sends_its_last_errands_again(tmp_path: Path) -> None:
    with listen(tmp_path) as listener:
        first = LauncherLink(order_in(tmp_path, tmp_path))
        assert first.restored is None
        first.emit(ONE)
        first.commit(b"state 1")
        first.emit(TWO)
        first.commit(b"state 2")
        first.emit(THREE)  # never written down: it did not happen
        emitted = [NumberedCommand(1, Emit(ONE)), NumberedCommand(2, Emit(TWO))]
        assert heard_by(listener, first) == emitted
        second = LauncherLink(order_in(tmp_path, tmp_path))
        assert second.restored == b"state 2"
        second.emit(FOUR)
        second.commit(b"state 3")
        assert heard_by(listener, second) == [emitted[1], NumberedCommand(3, Emit(FOUR))]


def test_without_a_journal_it_says_so_and_goes_on(tmp_path: Path) -> None:
    with listen(tmp_path) as listener:
        link = LauncherLink(order_in(tmp_path, tmp_path / "missing"))
        link.emit(ONE)
        link.commit(b"state")
        unjournalled, command = heard_by(listener, link)
    assert isinstance(unjournalled, Unjournalled) and "coordinator.sqlite" in unjournalled.problem
    assert command == NumberedCommand(1, Emit(ONE))
