"""The local engine: workers on this host, forked from a server that has torch imported."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import psutil

from cordee.cluster.fork_server import Exited, Report, Start, Started
from cordee.core.errors import CordeeError

GRACE_S = 2.0  # between asking a worker to end and killing it
START_TIMEOUT_S = 60.0  # for the fork server to take a request: it may still be importing torch


class LocalEngine:
    """Starts workers and tells when they end. Leaving the context ends all of them, and the fork server."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        theirs.set_inheritable(True)
        self._control = ours
        self._received = b""
        self._pids: dict[int, int] = {}  # index -> pid, of living workers
        self._watch = ProcessorWatch()
        # A session of its own: Ctrl-C in the terminal is for the launcher, which then asks the workers.
        # -P: a file in the working folder that is called like a module of Python's is not that module.
        self._server = subprocess.Popen(
            [sys.executable, "-P", "-m", "cordee.cluster.fork_server", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()

    @property
    def pids(self) -> Mapping[int, int]:
        """The living workers by index."""
        return self._pids

    def fileno(self) -> int:
        """A descriptor that is readable when `reports` has news."""
        return self._control.fileno()

    def start(
        self, index: int, target: str, argument: dict[str, Any], environment: Mapping[str, str], log: Path | None
    ) -> None:
        """Ask for worker `index`; `reports` tells its pid. Returns at once."""
        request = Start(index, target, argument, dict(environment), str(log) if log else None)
        self._control.settimeout(START_TIMEOUT_S)
        try:
            self._control.sendall(msgspec.json.encode(request) + b"\n")
        except OSError as error:
            raise CordeeError(f"the fork server (pid {self._server.pid}) is gone: {error}") from error

    def reports(self, timeout_s: float = 0.0) -> Iterator[Report]:
        """Yield what happened to workers, waiting at most `timeout_s` for the first news."""
        self._control.settimeout(max(timeout_s, 0.0001))
        try:
            chunk = self._control.recv(65536)
        except TimeoutError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            raise CordeeError(f"the fork server (pid {self._server.pid}) died; no worker can be started")
        *lines, self._received = (self._received + chunk).split(b"\n")
        for line in lines:
            report: Report = msgspec.json.decode(line, type=Report)
            if isinstance(report, Started):
                self._pids[report.index] = report.pid
            elif self._pids.get(report.index) == report.pid:
                del self._pids[report.index]
            yield report

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
        """End the fork server; it kills what it still has."""
        self._control.close()
        try:
            self._server.wait(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop(GRACE_S if error is None else 0.2)
        finally:
            self.close()


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
    if report.status >= 0:
        return f"exited with code {report.status}"
    try:
        return f"was killed by {signal.Signals(-report.status).name}"
    except ValueError:
        return f"was killed by signal {-report.status}"
