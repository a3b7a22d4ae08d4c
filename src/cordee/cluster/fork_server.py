"""A process with torch already imported that forks workers on request, so that one is up in milliseconds.

Run as `python -m cordee.cluster.fork_server FD` by the local engine, with one end of a socket pair as FD. Both
sides speak one JSON object per line: `Start` in; `Started` and `Exited` out. It has no threads and never uses
torch itself, which is what makes forking it safe. It ends, and takes its workers with it, when the other end
closes: with the launcher gone, however it went, there is nobody to work for.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import os
import select
import signal
import socket
import sys
import threading
import traceback
from typing import Any

import msgspec

PRELOADED = (
    "torch",
    "torch.distributed",
    "cordee.worker",
    "cordee.team_run.coordinator",
    "cordee.own_loop",
    "cordee.served.coordinator",
    "cordee.served.worker",
    "cordee.served.server",
    "cordee.served.evaluator",
    "cordee.communication.shared_memory.backend",
)


class Start(msgspec.Struct, frozen=True, tag=True):
    """Fork a process, in its own environment, that calls `target` ("module:function") with `argument`."""

    index: int
    target: str
    argument: dict[str, Any]
    environment: dict[str, str]
    log: str | None  # file for its output; None keeps the launcher's terminal


class Started(msgspec.Struct, frozen=True, tag=True):
    index: int
    pid: int


class Exited(msgspec.Struct, frozen=True, tag=True):
    index: int
    pid: int
    status: int  # as a shell shows it: the exit code, or minus the signal


Report = Started | Exited


def serve(control: socket.socket) -> None:
    """Answer requests until the launcher hangs up, then kill what is left."""
    children: dict[int, int] = {}  # pid -> index
    wake_in, wake_out = os.pipe()
    os.set_blocking(wake_in, False)
    os.set_blocking(wake_out, False)
    signal.set_wakeup_fd(wake_out, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    received = b""
    try:
        while True:
            readable, _, _ = select.select([control.fileno(), wake_in], [], [])
            if wake_in in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake_in, 4096)
                _reap(control, children)
            if control.fileno() in readable:
                chunk = control.recv(65536)
                if not chunk:
                    return
                *lines, received = (received + chunk).split(b"\n")
                for line in lines:
                    start = msgspec.json.decode(line, type=Start)
                    server_pid = os.getpid()
                    pid = os.fork()
                    if pid == 0:
                        _become_worker(start, server_pid, (control.fileno(), wake_in, wake_out))
                    children[pid] = start.index
                    _send(control, Started(start.index, pid))
    except (BrokenPipeError, ConnectionResetError):
        return  # the launcher is gone
    finally:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _reap(control: socket.socket, children: dict[int, int]) -> None:
    while children:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid in children:
            _send(control, Exited(children.pop(pid), pid, os.waitstatus_to_exitcode(status)))


def _send(control: socket.socket, report: Report) -> None:
    control.sendall(msgspec.json.encode(report) + b"\n")


def _become_worker(start: Start, server_pid: int, inherited: tuple[int, ...]) -> None:
    """Turn this fresh fork into the worker; never returns."""
    code = 1
    try:
        die_with_parent(server_pid)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in inherited:
            os.close(descriptor)
        os.environ.update(start.environment)
        if start.log is not None:
            log = os.open(start.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
        if "numpy" in sys.modules:  # Python's own random numbers are seeded anew in a fork, NumPy's are not
            sys.modules["numpy"].random.seed()
        module, _, name = start.target.partition(":")
        code = getattr(importlib.import_module(module), name)(start.argument) or 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if isinstance(leaving.code, str):
            sys.stderr.write(leaving.code + "\n")
    except BaseException:  # noqa: BLE001 - the last frame of a process: whatever it was, it is reported
        traceback.print_exc()
    finally:
        if code == 0:  # one that failed is not kept from saying so by a thread that waits for others
            with contextlib.suppress(Exception):
                threading._shutdown()  # type: ignore[attr-defined]
                atexit._run_exitfuncs()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent dies."""
    pr_set_pdeathsig = 1
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the kernel was asked
        os._exit(1)


def main() -> None:
    die_with_parent(os.getppid())  # one that is gone already has closed the socket
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in PRELOADED:
        importlib.import_module(name)
    serve(control)


if __name__ == "__main__":
    main()
