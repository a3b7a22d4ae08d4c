"""The local engine: workers on this host, forked from a server that has torch imported."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from cordee.cluster.engine import (
    GRACE_S,
    SIGNALS,
    Action,
    AgentLost,
    CannotStart,
    Capacity,
    Exited,
    ProcessSpec,
    Report,
    Started,
)
from cordee.cluster.engines.fork_server import Fork, Forked, adopt_orphans
from cordee.cluster.processes import describe_status, is_stopped
from cordee.core import env
from cordee.core.errors import CordeeError

FROZEN_S = 2.0  # that a fork server may be stopped while a process is asked of it
SILENT_S = 5.0  # that a process may take to say that it was forked, once its fork server is dead
MOST_DEATHS = 5  # of fork servers, one after the other, while the same process is asked for


class LocalEngine:
    """The `Engine` of this host. Processes are children of the one that made it.

    A fork server that dies is replaced: processes continue, and what was asked of it and not done is asked of the next.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        """`preload` are modules that processes will use: imported once, before anything is forked."""
        self._living: dict[int, Started] = {}  # by index
        self._processes: dict[int, Started] = {}  # by pidfd, those that were not waited for
        self._unanswered: dict[tuple[int, int], ProcessSpec] = {}  # by index and incarnation
        self._asked: dict[int, int] = {}  # index -> the newest incarnation
        self._num_deaths = 0  # since a process was last started
        self._frozen_since_s = self._dead_since_s = math.inf
        self._poll = select.epoll()
        self._adoption = contextlib.ExitStack()
        self._adoption.enter_context(_adopting())
        self._sessions: set[int] = set()
        self._preload = tuple(preload)
        self._environment = env.child_environment()  # of every fork server, whatever the launcher changes meanwhile
        self.command_line = [os.fsencode(argument) for argument in sys.argv]  # that processes find in `sys.argv`
        self._serve()

    def _serve(self) -> None:
        self._server = _ForkServer(self._environment, self._preload)
        self._sessions.add(self._server.pid)
        self._poll.register(self._server.control.fileno(), select.EPOLLIN)
        self._dead_since_s = self._frozen_since_s = math.inf
        for spec in self._unanswered.values():
            self._server.ask(Fork(spec, self.command_line))

    def capacity(self) -> Capacity:
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return Capacity({socket.gethostname(): num_cores})

    def describe(self) -> str:
        return ""

    def members(self) -> Sequence[Started]:
        return list(self._living.values())

    @property
    def server_pid(self) -> int:
        """The present fork server."""
        return self._server.pid

    def fileno(self) -> int:
        return self._poll.fileno()

    def start(self, spec: ProcessSpec) -> None:
        if self._asked.get(spec.index) == spec.incarnation:
            return
        self._asked[spec.index] = spec.incarnation
        self._unanswered[spec.index, spec.incarnation] = spec
        self._server.ask(Fork(spec, self.command_line))

    def reports(self, timeout_s: float = 0.0) -> Iterator[Report]:
        self._server.flush()
        ready = {descriptor for descriptor, _ in self._poll.poll(max(timeout_s, 0.0))}
        found: list[Report] = []
        is_over = False
        if self._server.control.fileno() in ready:
            found, is_over = self._read()
        exits = [self._reap(descriptor) for descriptor in ready if descriptor in self._processes]
        if exits:
            self._reap_strays()
        return iter([*found, *exits, *self._check_server(is_over)])

    def _read(self) -> tuple[list[Report], bool]:
        """Return which processes were started, and whether that is all that the fork server will ever say."""
        answers, is_over = self._server.receive()
        found: list[Report] = []
        for answer in answers:
            spec = self._unanswered.pop((answer.index, answer.incarnation), None)
            if spec is None:
                continue  # said before
            if answer.problem:
                found.append(CannotStart(answer.index, answer.incarnation, answer.problem))
                continue
            self._num_deaths = 0
            started = Started(answer.index, answer.incarnation, answer.pid)
            found.append(started)
            try:
                descriptor = os.pidfd_open(answer.pid)
            except ProcessLookupError:  # somebody else waits for the children of this process
                found.append(Exited(answer.index, answer.incarnation, answer.pid, -signal.SIGKILL))
                continue
            self._living[answer.index] = self._processes[descriptor] = started
            self._poll.register(descriptor, select.EPOLLIN)
        return found, is_over

    def _reap(self, descriptor: int) -> Exited:
        started = self._processes.pop(descriptor)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        if self._living.get(started.index) == started:
            del self._living[started.index]
        try:
            status = os.waitstatus_to_exitcode(os.waitpid(started.pid, 0)[1])
        except ChildProcessError:  # somebody else has waited for it, and knows
            status = -signal.SIGKILL
        return Exited(started.index, started.incarnation, started.pid, status)

    def _reap_strays(self, *, kill: bool = False) -> None:
        """Wait for what workers have left behind when they died, and has ended; with `kill`, end it first."""
        known = {self._server.pid, *(started.pid for started in self._processes.values())}
        for child in psutil.Process().children():
            with contextlib.suppress(OSError, psutil.Error):
                if child.pid in known or os.getsid(child.pid) not in self._sessions:
                    continue
                if kill:
                    os.kill(child.pid, signal.SIGKILL)
                if kill or child.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(child.pid, 0)

    def _check_server(self, is_over: bool) -> list[AgentLost]:
        """Replace a fork server that is dead, and kill one that is stopped while it is needed."""
        now_s = time.monotonic()
        if not is_over and self._server.process.poll() is None:
            is_frozen = bool(self._unanswered) and is_stopped(self._server.pid)
            self._frozen_since_s = min(self._frozen_since_s, now_s) if is_frozen else math.inf
            if now_s - self._frozen_since_s > FROZEN_S:
                self._server.process.kill()
            return []
        if not is_over:  # it is dead, but what it forked last has not said so
            self._dead_since_s = min(self._dead_since_s, now_s)
            if now_s - self._dead_since_s > SILENT_S:
                self._reap_strays(kill=True)
            return []
        lost = self._server
        self._poll.unregister(lost.control.fileno())
        how = f"the fork server {describe_status(lost.close())}"
        if lost.process.returncode >= 0:
            raise CordeeError(f"{how}: no process can be started; what it said is above")
        self._num_deaths += 1
        if self._unanswered and self._num_deaths >= MOST_DEATHS:
            raise CordeeError(f"{how}, the {self._num_deaths}th time before it had started a process")
        self._serve()
        return [AgentLost(lost.pid, f"{how}: processes that run continue, and another is started")]

    def signal(self, index: int, action: Action) -> None:
        if index in self._living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._living[index].pid, SIGNALS[action])

    def close(self) -> None:
        self._server.process.kill()
        deadline = time.monotonic() + GRACE_S
        while not self._read()[1] and time.monotonic() < deadline:  # one may just have been forked
            select.select([self._server.control], [], [], 0.1)
        self._server.close()
        for descriptor, started in list(self._processes.items()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(started.pid, signal.SIGKILL)
            self._reap(descriptor)
        self._reap_strays(kill=True)
        self._poll.close()
        self._adoption.close()


class _ForkServer:
    """The process of a fork server, and this end of the socket to it."""

    def __init__(self, environment: Mapping[str, str], preload: Sequence[str]) -> None:
        try:
            Path.cwd()
        except FileNotFoundError:  # torch would end the fork server: "oneMKL FATAL ERROR: Cannot load libtorch_cpu.so"
            raise CordeeError(
                "the working folder of this process was removed: start the run again, in a folder that stays"
            ) from None
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
