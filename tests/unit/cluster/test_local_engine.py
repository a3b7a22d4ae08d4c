"""Workers forked from a server: how they start, how they end, and that nothing of them stays."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from cordee.cluster.engine import AgentLost, CannotStart, Exited, ProcessSpec, Report, Started
from cordee.cluster.engines import open_engine
from cordee.cluster.engines.local import LocalEngine
from cordee.cluster.processes import ProcessorWatch, describe_status
from cordee.core.errors import CordeeError
from warm_launch import StartingPopen

pytestmark = [pytest.mark.timeout(100), pytest.mark.usefixtures("warm_processes")]
HERE = str(Path(__file__).parent)


@contextlib.contextmanager
def new_engine() -> Iterator[LocalEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", HERE)  # where `forked` is
        opened = open_engine()
        engine = opened.__enter__()
    with contextlib.ExitStack() as stack:
        stack.push(opened)
        assert isinstance(engine, LocalEngine)
        yield engine


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    """One for all tests that leave it as it was: importing torch takes seconds."""
    with new_engine() as engine:
        yield engine


def order(
    index: int, target: str, argument: dict[str, object], *, log: Path | None = None, **more: object
) -> ProcessSpec:
    return ProcessSpec.new(index, target, argument, log=str(log) if log else None, **more)


def wait_until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def exits(engine: LocalEngine, count: int, timeout_s: float = 60.0) -> dict[int, Exited]:
    """Return the next `count` exits by index."""
    found: dict[int, Exited] = {}
    deadline = time.monotonic() + timeout_s
    while len(found) < count:
        assert time.monotonic() < deadline, f"only {found} ended"
        found |= {report.index: report for report in engine.reports(0.05) if isinstance(report, Exited)}
    return found


def test_a_worker_has_its_environment_its_log_and_its_exit_code(engine: LocalEngine, tmp_path: Path) -> None:
    file, log = tmp_path / "out", tmp_path / "log"
    log.write_text("before\n")
    argument = {"file": str(file), "code": 7}
    spec = order(3, "forked:write_environment", argument, environment={"TEST_MARK": "here"}, log=log)
    engine.start(spec)
    engine.start(spec)  # the same order: one process
    reports = []
    wait_until(lambda: reports.extend(engine.reports(0.05)) or len(reports) == 2)
    assert isinstance(reports[0], Started) and isinstance(reports[1], Exited)
    assert reports[0].index == reports[1].index == 3
    assert reports[0].pid == reports[1].pid
    assert reports[1].describe() == "exited with code 7"
    mark, parent = file.read_text().split()
    assert mark == "here" and int(parent) == os.getpid()
    assert log.read_text() == "before\nto the log\nerrors too\n"
    assert "TEST_MARK" not in os.environ


def test_how_workers_end(engine: LocalEngine, tmp_path: Path) -> None:
    logs = [tmp_path / f"log-{index}" for index in range(5)]
    engine.start(order(0, "forked:raise_error", {}, log=logs[0]))
    engine.start(order(1, "forked:leave", {"code": 0}, log=logs[1]))
    engine.start(order(2, "forked:leave", {"code": 5}, log=logs[2]))
    engine.start(order(3, "forked:leave", {"code": "why it leaves"}, log=logs[3]))
    engine.start(order(4, "forked:no_such_function", {}, log=logs[4]))
    found = exits(engine, 5)
    assert [found[index].status for index in range(5)] == [1, 0, 5, 1, 1]
    assert "ValueError: on purpose" in logs[0].read_text()
    assert logs[3].read_text() == "why it leaves\n"
    assert "no_such_function" in logs[4].read_text()
    assert not engine.members()


def test_signals_are_told_apart(engine: LocalEngine, tmp_path: Path) -> None:
    for index in range(2):
        engine.start(order(index, "forked:sleep", {"file": str(tmp_path / str(index))}, log=tmp_path / "log"))
    wait_until(lambda: list(engine.reports()) or ((tmp_path / "0").exists() and (tmp_path / "1").exists()))
    wait_until(lambda: list(engine.reports()) or len(engine.members()) == 2)
    engine.signal(0, "kill")
    engine.signal(1, "leave")
    found = exits(engine, 2)
    assert found[0].describe() == "was killed by SIGKILL"
    assert found[1].describe() == "was killed by SIGTERM"
    engine.signal(0, "kill")  # it is gone, which is no error
    assert Exited(0, 1, 1, -200).describe() == "was killed by signal 200"


def test_leaving_the_context_ends_the_stubborn_too(tmp_path: Path) -> None:
    with new_engine() as engine:
        for index, target in enumerate(("sleep", "sleep_stubbornly")):
            engine.start(order(index, f"forked:{target}", {"file": str(tmp_path / str(index))}, log=tmp_path / "log"))
        wait_until(lambda: list(engine.reports()) or ((tmp_path / "0").exists() and (tmp_path / "1").exists()))
        wait_until(lambda: list(engine.reports()) or len(engine.members()) == 2)
        pids = [*(one.pid for one in engine.members()), engine.server_pid]
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_is_working_tells_the_busy_from_the_stopped(engine: LocalEngine, tmp_path: Path) -> None:
    engine.start(order(0, "forked:spin", {"file": str(tmp_path / "0")}, log=tmp_path / "log"))
    wait_until(lambda: list(engine.reports()) or ((tmp_path / "0").exists() and engine.members()))
    watch, pid = ProcessorWatch(), engine.members()[0].pid
    watch.is_working(pid)
    wait_until(lambda: watch.is_working(pid))
    engine.signal(0, "freeze")
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    assert not watch.is_working(pid)
    engine.signal(0, "kill")
    exits(engine, 1)


def test_a_worker_that_ends_well_ends_like_a_program(engine: LocalEngine, tmp_path: Path) -> None:
    engine.start(order(0, "forked:end_like_a_program", {"folder": str(tmp_path)}, log=tmp_path / "log"))
    assert exits(engine, 1)[0].status == 0
    assert (tmp_path / "thread").exists() and (tmp_path / "exit").exists()


def test_forks_do_not_share_random_numbers(engine: LocalEngine, tmp_path: Path) -> None:
    for index in range(2):
        engine.start(order(index, "forked:draw", {"file": str(tmp_path / str(index))}, log=tmp_path / "log"))
    exits(engine, 2)
    one, other = ((tmp_path / str(index)).read_text().split() for index in range(2))
    assert one[0] != other[0] and one[1] != other[1]


def starts(engine: LocalEngine, count: int, lost: list[AgentLost]) -> dict[int, Started]:
    """Return the next `count` starts by index, and the fork servers that are `lost`. Nothing may end meanwhile."""
    found: dict[int, Started] = {}

    def are_all_there() -> bool:
        reports = list(engine.reports(0.05))
        assert not any(isinstance(report, Exited) for report in reports), reports
        lost.extend(report for report in reports if isinstance(report, AgentLost))
        found.update({report.index: report for report in reports if isinstance(report, Started)})
        return len(found) >= count

    wait_until(are_all_there)
    return found


def test_workers_outlive_their_fork_server_and_another_takes_its_place(tmp_path: Path) -> None:
    lost: list[AgentLost] = []
    with new_engine() as engine:
        servers = [engine.server_pid]
        os.kill(servers[0], signal.SIGKILL)  # while it still imports torch
        engine.start(order(0, "forked:sleep", {"file": str(tmp_path / "0")}, log=tmp_path / "log"))
        first = starts(engine, 1, lost)[0].pid
        for stop_first in (False, True):
            servers.append(engine.server_pid)
            if stop_first:
                os.kill(engine.server_pid, signal.SIGSTOP)
            os.kill(engine.server_pid, signal.SIGKILL)
            wait_until(lambda: lost.extend(engine.reports(0.05)) or engine.server_pid not in servers)  # type: ignore[arg-type]
        engine.start(order(1, "forked:sleep", {"file": str(tmp_path / "1")}, log=tmp_path / "log"))
        starts(engine, 1, lost)
        assert psutil.Process(first).ppid() == os.getpid() and engine.members()[0].pid == first
        engine.signal(0, "leave")  # forked by one that is long dead
        assert exits(engine, 1)[0].describe() == "was killed by SIGTERM"
        assert [one.pid for one in lost] == servers
        assert (
            lost[0].how == "the fork server was killed by SIGKILL: processes that run continue, and another is started"
        )


def test_a_fork_server_that_is_stopped_is_replaced_when_it_is_needed(tmp_path: Path) -> None:
    with new_engine() as engine:
        stopped = engine.server_pid
        os.kill(stopped, signal.SIGSTOP)
        engine.start(order(0, "forked:leave", {"code": 3}, log=tmp_path / "log"))
        assert exits(engine, 1)[0].status == 3
        assert engine.server_pid != stopped and not psutil.pid_exists(stopped)


def test_a_fork_server_that_cannot_start_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; os._exit(3)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with open_engine() as engine, pytest.raises(CordeeError, match="fork server exited with code 3"):
        engine.start(order(0, "forked:leave", {}))
        wait_until(lambda: list(engine.reports(0.05)) and False)


def test_a_fork_server_that_dies_again_and_again_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; os.kill(os.getpid(), 9)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with open_engine() as engine, pytest.raises(CordeeError, match="killed by SIGKILL, the 5th time"):
        engine.start(order(0, "forked:leave", {}))
        wait_until(lambda: list(engine.reports(0.05)) and False)


def test_what_a_dead_worker_leaves_behind_is_ended_with_the_engine(tmp_path: Path) -> None:
    with new_engine() as engine:
        engine.start(order(0, "forked:leave_a_child", {"file": str(tmp_path / "child")}, log=tmp_path / "log"))
        assert exits(engine, 1)[0].status == 0
        child = int((tmp_path / "child").read_text())
    assert not psutil.pid_exists(child)


def test_nothing_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    launcher = (
        "import sys, time\n"
        "from cordee.cluster.engine import ProcessSpec\n"
        "from cordee.cluster.engines import open_engine\n"
        "with open_engine() as engine:\n"
        f"    engine.start(ProcessSpec.new(0, 'forked:sleep', {{'file': {str(tmp_path / 'here')!r}}}))\n"
        "    time.sleep(300)\n"
    )
    process = StartingPopen([sys.executable, "-c", launcher], env={**os.environ, "PYTHONPATH": HERE})
    try:
        wait_until(lambda: (tmp_path / "here").exists())
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) == 2
    finally:
        process.kill()
        process.wait(10)
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive


def test_files_in_the_working_folder_shadow_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("select", "msgspec", "torch", "queue"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the wrong file')\n")
    monkeypatch.chdir(tmp_path)
    with new_engine() as engine:
        engine.start(order(0, "forked:leave", {"code": 0}, log=tmp_path / "log"))
        assert exits(engine, 1)[0].status == 0


def test_a_process_that_cannot_be_forked_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, errno\ndef fork():\n    raise OSError(errno.EAGAIN, 'no more processes')\nos.fork = fork\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found: list[Report] = []
    with open_engine() as engine:
        spec = order(4, "forked:leave", {})
        engine.start(spec)
        wait_until(lambda: found.extend(engine.reports(0.05)) or found)
    assert found == [CannotStart(4, spec.incarnation, "[Errno 11] no more processes")]


def test_what_there_is_room_for(engine: LocalEngine) -> None:
    assert engine.capacity().num_slots >= 1 and not engine.capacity().may_grow


def test_a_working_folder_that_was_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch itself would end with "Cannot load libtorch_cpu.so" there."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(CordeeError, match="working folder of this process was removed"):
        LocalEngine()


def test_the_end_by_a_bus_error_says_what_it_comes_from() -> None:
    assert "was cut short" in describe_status(-signal.SIGBUS)
    assert describe_status(-signal.SIGKILL) == "was killed by SIGKILL"
