"""An agent: starts processes of a run on this host for a launcher on another, or on this one.

It is the local engine behind the secure channel. It connects to the launcher, shows its ticket, carries out numbered
commands, and reports what becomes of its processes. They end when the agent ends, when the launcher has given it up,
and when the launcher cannot be heard for long.
"""

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
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import psutil

from cordee.cluster.engine import AgentLost, CannotStart, Exited, ProcessSpec, Started, stop_processes
from cordee.cluster.engines.agent_messages import (
    AGENT,
    GIVEN_UP,
    LIMITS,
    LOG_BYTES,
    Activity,
    AgentOrder,
    AgentReport,
    AgentStatus,
    Command,
    Commands,
    Enrol,
    Enrolled,
    Leave,
    LogText,
    SignalProcess,
    StatusHeard,
    Versions,
)
from cordee.cluster.engines.fork_server import die_with_parent
from cordee.cluster.engines.local import LocalEngine
from cordee.cluster.processes import is_stopped
from cordee.communication.channel import ClientChannel, Received, RefusedError
from cordee.communication.endpoint import Speaker
from cordee.communication.keys import ClientKeys
from cordee.communication.messages import Refused
from cordee.communication.this_host import host_id
from cordee.communication.wire import Codec
from cordee.core import env
from cordee.core.errors import CommunicationError, CordeeError, JobError
from cordee.core.fault_points import identify, reach
from cordee.core.findings import Finding

log = logging.getLogger("cordee.agent")

LOOK_S = 5.0  # that a host has to reach the launcher's, when clusters are checked
CONNECT_S = 60.0  # that an agent tries to reach the launcher
LONGEST_ABSENCE_S = 30.0  # of the launcher, before an agent ends with its processes
LEAVE_S = 20.0  # that processes have to hand over, when the agent is asked to leave
MOST_UNHEARD = 256  # reports that wait for the launcher; logs are not read further meanwhile


def run_agent(order: AgentOrder, *, should_stop: Callable[[], bool] = lambda: False) -> int:
    """Be an agent until the launcher lets it go; return the exit code. `should_stop` has the run continue without it.

    Raises CordeeError if the launcher cannot be reached or refuses this agent, and when it is lost.
    """
    identify(f"agent-{order.number}")
    with tempfile.TemporaryDirectory(prefix="cordee-agent-") as folder:
        agent = _Agent(order, Path(folder))
        try:
            agent.enrol(should_stop)
            return agent.run(should_stop)
        finally:
            agent.close()


def run_agent_process(order: AgentOrder, *, should_stop: Callable[[], bool] = lambda: False) -> int:
    """Start an agent as a child process, wait for its end, return its exit code. For actors and tasks of engines.

    The order goes through the child's standard input. The agent, and what it has started, die with the calling thread.
    When `should_stop()` becomes true the agent is asked to leave, by the end of that input: signals of a scheduler,
    which may go to every process of a job, are for the calling process to decide on.
    """
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "cordee.cluster.engines.agent"],
        stdin=subprocess.PIPE,
        env=env.child_environment(),
        start_new_session=True,
    )
    try:
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(f"{os.getpid()} {order.to_text()}\n".encode())
            child.stdin.flush()
        is_told = False
        while True:
            try:
                return child.wait(timeout=0.1)
            except subprocess.TimeoutExpired:
                if not is_told and should_stop():
                    is_told = True
                    child.stdin.close()
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
        if child.stdin is not None:
            with contextlib.suppress(OSError):
                child.stdin.close()


def look_from_here(host: str, port: int) -> tuple[str, str, str]:
    """Return this host's name, its versions, and why it cannot reach `host`, if so. Run where agents would be."""
    problem = ""
    try:
        with socket.create_connection((host, port), timeout=LOOK_S):
            pass
    except OSError as error:
        problem = f"no connection to {host}: {error}"
    return socket.gethostname(), Versions.here().describe(), problem


def findings_of(looks: Iterable[tuple[str, str, str]]) -> Iterator[Finding]:
    """Say what is wrong with hosts that were looked at by `look_from_here`."""
    own = Versions.here().describe()
    for host, versions, problem in sorted(set(looks)):
        if versions != own:
            yield Finding(
                host, "problem", f"it has {versions}, this host {own}", "install the same versions everywhere"
            )
        elif problem:
            yield Finding(host, "problem", problem, "open the ports between the hosts, or set cluster.address")
        else:
            yield Finding(host, "ok", f"{versions}; reaches this host")


class _Agent:
    """One agent. The main thread has the processes; another receives what the launcher says."""

    def __init__(self, order: AgentOrder, folder: Path) -> None:
        self._order = order
        self._folder = folder
        self._engine = LocalEngine(order.preload)  # begins to import torch while this process connects
        keys = ClientKeys.new(bytes.fromhex(order.server_key))
        speaker = Speaker(run=order.run, name=f"agent-{order.number}", incarnation=time.time_ns())
        self._channel = ClientChannel(
            order.address, speaker, Codec(AGENT, LIMITS), keys, silence_s=order.failure_timeout_s
        )
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._received: deque[Received] = deque()
        self._problem: CommunicationError | None = None
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._heartbeat_s = order.failure_timeout_s / 5
        self._heard_s = self._next_s = time.monotonic()
        self._launcher_host = ""
        self._num_done = 0  # commands
        self._num_heard = 0  # reports that the launcher has taken
        self._unheard: deque[AgentReport] = deque()
        self._logs: dict[tuple[int, int], _Log] = {}
        self._is_left = False

    def enrol(self, should_stop: Callable[[], bool]) -> None:
        """Show the ticket. Raises JobError if the launcher refuses it, CommunicationError if nobody answers."""
        order = self._order
        message = Enrol(order.number, order.ticket, os.getpid(), socket.gethostname(), host_id(), Versions.here())
        deadline_s = time.monotonic() + CONNECT_S
        while True:
            try:
                reach("agent.enrol")
                reply = self._channel.request(message, timeout_s=1.0).message
                break
            except RefusedError as error:
                raise JobError(error.detail or str(error)) from error
            except CommunicationError as error:
                if time.monotonic() > deadline_s or should_stop():
                    raise CommunicationError(f"the launcher of the run cannot be reached: {error}") from error
        assert isinstance(reply, Enrolled), reply
        reach("agent.enrolled")
        self._heartbeat_s, self._launcher_host = reply.heartbeat_s, reply.host_id
        self._engine.command_line = list(reply.command_line)
        self._heard_s = time.monotonic()
        self._thread = threading.Thread(target=self._receive, name="cordee-agent", daemon=True)
        self._thread.start()

    def run(self, should_stop: Callable[[], bool]) -> int:
        """Work until the launcher says that it is enough. After `should_stop()` the processes leave, then the agent."""
        leave_by_s = math.inf
        while not self._is_left and time.monotonic() < leave_by_s:
            if leave_by_s == math.inf and should_stop():
                leave_by_s = time.monotonic() + LEAVE_S
                for started in self._engine.members():
                    self._engine.signal(started.index, "leave")
            if leave_by_s < math.inf and not self._engine.members():
                break
            wait_s = max(0.0, min(0.1, self._next_s - time.monotonic()))
            select.select([self._engine.fileno(), self._wake], [], [], wait_s)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            if self._problem is not None:
                raise self._problem
            has_news = self._take_messages()
            has_news |= self._take_reports()
            if has_news or time.monotonic() >= self._next_s:
                self._read_logs()
                self._send_status()
            silent_s = time.monotonic() - self._heard_s
            if silent_s > max(LONGEST_ABSENCE_S, 2 * self._order.failure_timeout_s):
                raise CommunicationError(
                    f"the run has ended or is out of reach: nothing was heard for {silent_s:.0f} s"
                )
        reach("agent.leave")
        stop_processes(self._engine)
        self._take_reports()
        self._read_logs()
        with contextlib.suppress(CommunicationError):
            self._send_status()
        return 0

    def close(self) -> None:
        self._is_closing.set()
        self._channel.close()
        if self._thread is not None:
            self._thread.join(timeout=1.0)
        self._engine.close()
        os.close(self._wake)

    def _receive(self) -> None:
        """Receive until the end. Runs in a thread of its own, so that processes and messages wake the same wait."""
        while not self._is_closing.is_set():
            try:
                received = self._channel.receive(1.0)
            except CommunicationError as error:
                if self._is_closing.is_set():
                    return
                self._problem = error
                received = None
            if received is not None:
                self._received.append(received)
            if received is not None or self._problem is not None:
                os.eventfd_write(self._wake, 1)
            if self._problem is not None:
                return

    def _take_messages(self) -> bool:
        has_news = False
        while self._received:
            self._heard_s = time.monotonic()
            match self._received.popleft().message:
                case Commands(first=first, commands=commands):
                    for number, content in enumerate(commands, first):
                        if number == self._num_done + 1:
                            has_news = True
                            self._num_done = number
                            self._carry_out(msgspec.json.decode(content, type=Command))
                case StatusHeard(num_heard=num_heard):
                    while self._num_heard < num_heard and self._unheard:
                        self._unheard.popleft()
                        self._num_heard += 1
                case Refused(reason=reason) as refused:
                    if reason == GIVEN_UP:
                        raise CommunicationError("the launcher has given this agent up: its processes were replaced")
                    log.warning("the launcher refused a message: %s %s", reason, refused.detail)
        return has_news

    def _carry_out(self, command: Command) -> None:
        reach("agent.command")
        match command:
            case ProcessSpec():
                self._engine.start(self._prepare(command))
            case SignalProcess(index=index, action=action):
                self._engine.signal(index, action)
            case Leave():
                self._is_left = True

    def _prepare(self, spec: ProcessSpec) -> ProcessSpec:
        """Return the order with what is different on this host: where the process logs."""
        if spec.log is None or (host_id() == self._launcher_host and Path(spec.log).parent.is_dir()):
            return spec
        path = self._folder / f"{spec.index}-{spec.incarnation}.log"
        self._logs[spec.index, spec.incarnation] = _Log(path)
        environment = {**spec.environment, **env.log_environment(path)}
        return msgspec.structs.replace(spec, environment=environment, log=str(path))

    def _take_reports(self) -> bool:
        """Take what became of the processes. What one has printed is sent before its end."""
        has_news = False
        for report in self._engine.reports():
            if isinstance(report, AgentLost):
                log.warning("%s", report.how)
            if not isinstance(report, Started | Exited | CannotStart):
                continue
            if isinstance(report, Started):
                report = msgspec.structs.replace(report, host=host_id())
            if isinstance(report, Exited) and (printed := self._logs.pop((report.index, report.incarnation), None)):
                while content := printed.read():
                    self._unheard.append(LogText(report.index, report.incarnation, content))
            self._unheard.append(report)
            has_news = True
        return has_news

    def _read_logs(self) -> None:
        for (index, incarnation), printed in self._logs.items():
            while len(self._unheard) < MOST_UNHEARD and (content := printed.read()):
                self._unheard.append(LogText(index, incarnation, content))

    def _send_status(self) -> None:
        self._next_s = time.monotonic() + self._heartbeat_s
        reports: list[bytes] = []
        size = 0
        for report in self._unheard:
            content = msgspec.json.encode(report)
            if (reports and size + len(content) > LIMITS.max_header_bytes // 2) or len(reports) == MOST_UNHEARD:
                break
            reports.append(content)
            size += len(content)
        activity = tuple(_look_at(started) for started in self._engine.members())
        reach("agent.status")
        try:
            status = AgentStatus(self._num_done, self._num_heard + 1, tuple(reports), activity)
            self._channel.send(status, timeout_s=self._heartbeat_s)
        except CommunicationError as error:  # it may come back; `run` looks how long it was silent
            log.info("%s", error)


class _Log:
    """A file that a process writes, read as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> bytes:
        """Return what is new, at most `LOG_BYTES`."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                content = file.read(LOG_BYTES)
        except OSError:
            return b""
        self._offset += len(content)
        return content


def _look_at(started: Started) -> Activity:
    processor_s = 0.0
    with contextlib.suppress(psutil.Error):
        times = psutil.Process(started.pid).cpu_times()
        processor_s = float(times.user + times.system)
    return Activity(started.index, started.incarnation, processor_s, is_stopped(started.pid))


def main() -> int:
    """Be the agent that standard input orders; return the exit code."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the launcher asks, when it is time, or who started this process
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):  # no more than the line: the end is waited for below
        line += byte
    parent, _, text = line.decode().partition(" ")
    die_with_parent(int(parent))
    is_asked = threading.Event()

    def await_end() -> None:
        while os.read(0, 1024):
            pass
        is_asked.set()

    threading.Thread(target=await_end, name="cordee-agent-input", daemon=True).start()
    try:
        return run_agent(AgentOrder.from_text(text), should_stop=is_asked.is_set)
    except CordeeError as error:
        sys.stderr.write(f"cordee agent: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
