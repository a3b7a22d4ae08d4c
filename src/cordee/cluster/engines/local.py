"""The local engine: workers on this host, forked from a server that has torch imported."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import psutil

from cordee.cluster.engines.fork_server import Exited, Fork, Forked, Report, Start, Started, adopt_orphans
from cordee.core import env
from cordee.core.errors import CordeeError

GRACE_S = 2.0  # between asking a worker to end and killing it
FROZEN_S = 2.0  # that a fork server may be stopped while a process is asked of it
SILENT_S = 5.0  # that a process may take to say that it was forked, once its fork server is dead
MOST_DEATHS = 5  # of fork servers, one after the other, while the same process is asked for

log = logging.getLogger("cordee.engine")


class LocalEngine:
    """Starts workers and tells when they end. Leaving the context ends all of them, and the fork server.

    Workers are children of this process. A fork server that dies is replaced: they continue, and what was asked of
    it and not done is asked of the next. `on_lost` is then called with its pid and what happened.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        """`preload` are modules that processes will use: imported once, before anything is forked."""
        self.on_lost: Callable[[int, str], None] = lambda pid, how: log.warning("%s (pid %d)", how, pid)
        self._pids: dict[int, int] = {}  # index -> pid, of living workers
        self._processes: dict[int, tuple[int, int]] = {}  # pidfd -> index and pid, of those that were not waited for
        self._unanswered: dict[int, Start] = {}
        self._num_asked = 0
        self._num_deaths = 0  # since a process was last started
        self._frozen_since_s = self._dead_since_s = math.inf
        self._watch = ProcessorWatch()
        self._poll = select.epoll()
        self._adoption = contextlib.ExitStack()
        self._adoption.enter_context(_adopting())
        self._sessions: set[int] = set()
        self._preload = tuple(preload)
        self._environment = env.child_environment()  # of every fork server, whatever the launcher changes meanwhile
        self._command_line = [os.fsencode(argument) for argument in sys.argv]
        self._serve()

    def _serve(self) -> None:
        self._server = _ForkServer(self._environment, self._preload)
        self._sessions.add(self._server.pid)
        self._poll.register(self._server.control.fileno(), select.EPOLLIN)
        self._dead_since_s = self._frozen_since_s = math.inf
        for number, start in self._unanswered.items():
            self._server.ask(Fork(number, start, self._command_line))

    @property
    def pids(self) -> Mapping[int, int]:
        """The living workers by index."""
        return self._pids

    @property
    def server_pid(self) -> int:
        """The present fork server."""
        return self._server.pid

    def fileno(self) -> int:
        """A descriptor that is readable when `reports` has news."""
        return self._poll.fileno()

    def start(
        self, index: int, target: str, argument: dict[str, Any], environment: Mapping[str, str], log: Path | None
    ) -> None:
        """Ask for worker `index`; `reports` tells its pid. Returns at once."""
        start = Start(index, target, argument, dict(environment), str(log) if log else None)
        self._num_asked += 1
        self._unanswered[self._num_asked] = start
        self._server.ask(Fork(self._num_asked, start, self._command_line))

    def reports(self, timeout_s: float = 0.0) -> Iterator[Report]:
        """Return what happened to workers, waiting at most `timeout_s` for the first news.

        Raises CordeeError if no fork server can be kept alive.
        """
        self._server.flush()
        ready = {descriptor for descriptor, _ in self._poll.poll(max(timeout_s, 0.0))}
        found: list[Report] = []
        is_over = False
        if self._server.control.fileno() in ready:
            found, is_over = self._read()
        exits = [self._bury(descriptor) for descriptor in ready if descriptor in self._processes]
        if exits:
            self._bury_strays()
        self._check_server(is_over)
        return iter([*found, *exits])

    def _read(self) -> tuple[list[Report], bool]:
        """Return which processes were started, and whether that is all that the fork server will ever say."""
        answers, is_over = self._server.receive()
        found: list[Report] = []
        for answer in answers:
            start = self._unanswered.pop(answer.number, None)
            if start is None:
                continue  # said before
            self._num_deaths = 0
            found.append(Started(start.index, answer.pid))
            try:
                descriptor = os.pidfd_open(answer.pid)
            except ProcessLookupError:  # somebody else waits for the children of this process
                found.append(Exited(start.index, answer.pid, -signal.SIGKILL))
                continue
            self._pids[start.index] = answer.pid
            self._processes[descriptor] = start.index, answer.pid
            self._poll.register(descriptor, select.EPOLLIN)
        return found, is_over

    def _bury(self, descriptor: int) -> Exited:
        index, pid = self._processes.pop(descriptor)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        if self._pids.get(index) == pid:
            del self._pids[index]
        try:
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        except ChildProcessError:  # somebody else has waited for it, and knows
            status = -signal.SIGKILL
        return Exited(index, pid, status)

    def _bury_strays(self, *, kill: bool = False) -> None:
        """Wait for what workers have left behind when they died, and has ended; with `kill`, end it first."""
        known = {self._server.pid, *(pid for _, pid in self._processes.values())}
        for child in psutil.Process().children():
            with contextlib.suppress(OSError, psutil.Error):
                if child.pid in known or os.getsid(child.pid) not in self._sessions:
                    continue
                if kill:
                    os.kill(child.pid, signal.SIGKILL)
                if kill or child.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(child.pid, 0)

    def _check_server(self, is_over: bool) -> None:
        """Replace a fork server that is dead, and kill one that is stopped while it is needed."""
        now_s = time.monotonic()
        if not is_over and self._server.process.poll() is None:
            is_frozen = bool(self._unanswered) and is_stopped(self._server.pid)
            self._frozen_since_s = min(self._frozen_since_s, now_s) if is_frozen else math.inf
            if now_s - self._frozen_since_s > FROZEN_S:
                self._server.process.kill()
            return
        if not is_over:  # it is dead, but what it forked last has not said so
            self._dead_since_s = min(self._dead_since_s, now_s)
            if now_s - self._dead_since_s > SILENT_S:
                self._bury_strays(kill=True)
            return
        lost = self._server
        self._poll.unregister(lost.control.fileno())
        how = f"the fork server {describe_status(lost.close())}"
        if lost.process.returncode >= 0:
            raise CordeeError(f"{how}: no process can be started; what it said is above")
        self._num_deaths += 1
        if self._unanswered and self._num_deaths >= MOST_DEATHS:
            raise CordeeError(f"{how}, the {self._num_deaths}th time before it had started a process")
        self._serve()
        self.on_lost(lost.pid, f"{how}: processes that run continue, and another is started")

    def is_working(self, index: int) -> bool:
        """Whether a worker has had processor time since this was last asked of it. A stopped one has not."""
        return index in self._pids and self._watch.is_working(self._pids[index])

    def is_stopped(self, index: int) -> bool:
        """Whether a worker was stopped by a signal, and does not run until another."""
        return index in self._pids and is_stopped(self._pids[index])

    def signal(self, index: int, number: signal.Signals) -> None:
        """Send a signal to a worker that may have ended."""
        if index in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[index], number)

    def stop(self, grace_s: float = GRACE_S) -> None:
        """End all workers: SIGTERM, then SIGKILL for those still there after `grace_s`."""
        for index in list(self._pids):
            self.signal(index, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        with contextlib.suppress(CordeeError):
            while self._pids and time.monotonic() < deadline:
                list(self.reports(timeout_s=0.05))
            for index in list(self._pids):
                self.signal(index, signal.SIGKILL)
            deadline = time.monotonic() + grace_s
            while self._pids and time.monotonic() < deadline:
                list(self.reports(timeout_s=0.05))

    def close(self) -> None:
        """End the fork server and whatever there still is of workers."""
        self._server.process.kill()
        deadline = time.monotonic() + GRACE_S
        while not self._read()[1] and time.monotonic() < deadline:  # one may just have been forked
            select.select([self._server.control], [], [], 0.1)
        self._server.close()
        for descriptor, (_, pid) in list(self._processes.items()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self._bury(descriptor)
        self._bury_strays(kill=True)
        self._poll.close()
        self._adoption.close()

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop(GRACE_S if error is None else 0.2)
        finally:
            self.close()


class _ForkServer:
    """The process of a fork server, and this end of the socket to it."""

    def __init__(self, environment: Mapping[str, str], preload: Sequence[str]) -> None:
        self.control, theirs = socket.socketpair()
        theirs.set_inheritable(True)
        # A session of its own: Ctrl-C in the terminal is for the launcher, which then asks the workers.
        # -P: a file in the working folder that is called like a module of Python's is not that module.
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cordee.cluster.engines.fork_server", str(theirs.fileno()), *preload],
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        theirs.close()
        self.control.setblocking(False)
        self._received = b""
        self._unsent = bytearray()

    @property
    def pid(self) -> int:
        return self.process.pid

    def ask(self, request: Fork) -> None:
        self._unsent += msgspec.json.encode(request) + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what the socket has room for. A fork server that is gone is noticed by `receive`."""
        try:
            while self._unsent:
                del self._unsent[: self.control.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()

    def receive(self) -> tuple[list[Forked], bool]:
        """Return what has come in, and whether nothing more can come."""
        is_over = False
        try:
            while chunk := self.control.recv(65536):
                self._received += chunk
            is_over = True
        except BlockingIOError:
            pass
        except OSError:
            is_over = True
        *lines, self._received = self._received.split(b"\n")
        return [msgspec.json.decode(line, type=Forked) for line in lines], is_over

    def close(self) -> int:
        """End it; return how it ended."""
        self.control.close()
        self.process.kill()
        return self.process.wait()


_lock = threading.Lock()
_num_adopting, _did_adopt = 0, False


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Have this process be the parent of descendants whose own parent has ended, and be able to wait for them."""
    global _num_adopting, _did_adopt
    with _lock:
        did_adopt = adopt_orphans(True)
        _did_adopt = did_adopt if _num_adopting == 0 else _did_adopt
        _num_adopting += 1
    previous = None
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        previous = signal.signal(
            signal.SIGCHLD, signal.SIG_DFL
        )  # ignored, it would have the kernel forget how they end
    try:
        yield
    finally:
        if previous is not None:
            signal.signal(signal.SIGCHLD, previous)
        with _lock:
            _num_adopting -= 1
            adopt_orphans(_num_adopting > 0 or _did_adopt)


def is_alive(pid: int) -> bool:
    """Whether there is such a process; one that has ended and was not buried is none."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def is_stopped(pid: int) -> bool:
    """Whether a process does not run until it gets a signal, or not any more."""
    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return False
    return status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE)


class ProcessorWatch:
    """Tells processes that are busy from those that are stopped."""

    def __init__(self) -> None:
        self._processor_s: dict[int, float] = {}  # what each had used when last asked

    def is_working(self, pid: int) -> bool:
        """Whether a process has had processor time since this was last asked of it. A stopped one has not."""
        try:
            if is_stopped(pid):
                return False
            times = psutil.Process(pid).cpu_times()
        except psutil.Error:
            return False
        used_s = float(times.user + times.system)
        before_s = self._processor_s.get(pid, 0.0)
        self._processor_s[pid] = used_s
        return used_s > before_s


def describe_exit(report: Exited) -> str:
    """Return how a worker ended, in words."""
    return describe_status(report.status)


def describe_status(status: int) -> str:
    """Return what an exit code, or minus the number of a signal, means, in words."""
    if status >= 0:
        return f"exited with code {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
