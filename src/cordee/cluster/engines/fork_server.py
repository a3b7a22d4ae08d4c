"""A process with torch already imported that forks workers on request, so that one is up in milliseconds.

Run as `python -m cordee.cluster.engines.fork_server FD MODULE...` by the local engine, with one end of a socket pair as
FD, and the modules that its processes will use. One JSON object per line: `Fork` in, `Forked` out, which each new
process sends itself before it does anything else. It has no threads and never uses torch itself, which is what
makes forking it safe.

It knows nothing of what it has forked: those are children of the launcher (forked twice, and adopted), which hears of
their end from the kernel, and they die with the launcher. So another fork server can take its place at any moment.
When the socket of one that died is at its end, every process it has forked has said so.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import io
import os
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any

import msgspec

from cordee.cluster.engine import ProcessSpec
from cordee.core.errors import CordeeError
from cordee.core.fault_points import identify, reach

PRELOADED = ("torch", "torch.distributed", "cordee.communication.shared_memory.backend")  # by every fork server


class Fork(msgspec.Struct, frozen=True):
    """A request."""

    spec: ProcessSpec
    command_line: list[bytes]  # of the launcher: the user's modules, imported again, find the same `sys.argv`


class Forked(msgspec.Struct, frozen=True):
    """The process that was asked for is a child of the launcher by now, or cannot be.

    Said twice, by the process and by the fork server: either may be killed or stopped before it does.
    """

    index: int
    incarnation: int
    pid: int = 0
    problem: str = ""  # why there is none


def serve(control: socket.socket, launcher_pid: int) -> None:
    """Answer requests until the launcher hangs up."""
    received = b""
    while True:
        try:
            chunk = control.recv(65536)
        except ConnectionResetError:
            return
        if not chunk:
            return
        *lines, received = (received + chunk).split(b"\n")
        for line in lines:
            reach("fork_server.asked")
            _fork(msgspec.json.decode(line, type=Fork), control, launcher_pid)
            reach("fork_server.answered")


def _fork(request: Fork, control: socket.socket, launcher_pid: int) -> None:
    spec = request.spec
    answer_in, answer_out = os.pipe()
    try:
        between = os.fork()
    except OSError as error:
        os.write(answer_out, _answer(spec, problem=str(error)))
        between = -1
    if between == 0:
        between = os.getpid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # before it is reported: it may be asked to leave then
        try:
            pid = os.fork()
        except OSError as error:
            os.write(answer_out, _answer(spec, problem=str(error)))
            os._exit(0)
        if pid:
            os.write(answer_out, _answer(spec, pid))
            os._exit(0)  # and so the launcher is the parent of what it has forked
        os.close(answer_in)
        os.close(answer_out)
        _become_worker(request, control, between, launcher_pid)
    os.close(answer_out)
    if between > 0:
        _, status = os.waitpid(between, 0)
        if os.WIFSIGNALED(status):  # whether it had forked nobody knows: end as it did, and the launcher sorts it out
            os.kill(os.getpid(), signal.SIGKILL)
        if status:
            sys.exit(1)
    reach("fork_server.forked")
    control.sendall(os.read(answer_in, 4096))
    os.close(answer_in)


def _answer(spec: ProcessSpec, pid: int = 0, problem: str = "") -> bytes:
    return msgspec.json.encode(Forked(spec.index, spec.incarnation, pid, problem)) + b"\n"


def _become_worker(request: Fork, control: socket.socket, between: int, launcher_pid: int) -> None:
    """Turn this fresh fork into the worker; never returns."""
    code, spec = 1, request.spec
    try:
        while os.getppid() == between:
            time.sleep(0.0005)
        die_with_parent(launcher_pid)
        identify("forked")
        reach("forked.alive")
        control.sendall(_answer(spec, os.getpid()))
        control.close()
        reach("forked.reported")
        os.environ.update(spec.environment)
        sys.argv = [os.fsdecode(argument) for argument in request.command_line]
        if spec.log is not None:
            _write_to(spec.log)
        if "numpy" in sys.modules:  # Python's own random numbers are seeded again in a fork, NumPy's are not
            sys.modules["numpy"].random.seed()
        module, _, name = spec.target.partition(":")
        code = getattr(importlib.import_module(module), name)(spec.argument) or 0
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


class _Output(io.FileIO):
    """A file that takes whatever is written: what a full disk refuses is lost, and nobody fails for it."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError:
            return len(memoryview(content).cast("B"))


def _write_to(path: str) -> None:
    """Have what this process prints go to a file, or to where the launcher's errors go if that cannot be opened."""
    try:
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        log = os.dup(2)
        with contextlib.suppress(OSError):
            os.write(2, f"warning: cannot write {path}: {error.strerror}; what belongs there is printed\n".encode())
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.BufferedWriter(_Output(descriptor, "w", closefd=False)), errors="backslashreplace", line_buffering=True
        )
        for descriptor in (1, 2)
    )


def die_with_parent(parent_pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent dies."""
    pr_set_pdeathsig = 1
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, number, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the kernel was asked
        os._exit(1)


def adopt_orphans(is_wanted: bool) -> bool:
    """Have the kernel make this process the parent of descendants whose own parent has ended, or no longer.

    Returns whether it did so before.
    """
    pr_set_child_subreaper, pr_get_child_subreaper = 36, 37
    libc, before = ctypes.CDLL(None, use_errno=True), ctypes.c_int()
    libc.prctl(pr_get_child_subreaper, ctypes.byref(before), 0, 0, 0)
    if libc.prctl(pr_set_child_subreaper, int(is_wanted), 0, 0, 0) != 0:
        raise CordeeError(f"the kernel does not support PR_SET_CHILD_SUBREAPER: {os.strerror(ctypes.get_errno())}")
    return bool(before.value)


def main() -> None:
    launcher_pid = os.getppid()
    die_with_parent(launcher_pid)  # one that is gone already has closed the socket
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm signals every process of a job, not only those it started
    identify("fork-server")
    for name in (*PRELOADED, *sys.argv[2:]):
        importlib.import_module(name)
    serve(control, launcher_pid)


if __name__ == "__main__":
    main()
