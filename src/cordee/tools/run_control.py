"""What a person asks of a run from outside: stop, following its logs, a run that outlives the terminal."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cordee.core.env import child_environment
from cordee.core.errors import RunDirectoryError
from cordee.monitoring import inspect_run
from cordee.monitoring.merged_logs import LogLine, Logs
from cordee.monitoring.run_directory import EVENTS_FILE, LOCK_FILE, Holder, holder_of

OUTPUT_FILE = "output.txt"  # what a detached run prints
_LOOK_EVERY_S = 0.1


def stop_run(run: Path, *, wait_s: float | None, say: Callable[[str], None]) -> str:
    """Have a run stop after its step, saved, as Ctrl-C does. Returns its state.

    Waits for the end for `wait_s` seconds (None: as long as it takes). Raises RunDirectoryError if no run is under way.
    """
    holder = _holder(run)
    if holder is None:
        info = inspect_run(run) if run.is_dir() else None
        if info is None:
            raise RunDirectoryError(f"{run} is not a run directory: it has no job.toml")
        raise RunDirectoryError(f"the run {run.name} is not under way: it is {info.state}")
    if holder.host not in ("", socket.gethostname()):
        raise RunDirectoryError(f"the run {run.name} was started on {holder.host}: stop it there")
    try:
        process = os.pidfd_open(holder.pid)
    except ProcessLookupError:
        process = -1
    try:
        # The process may have ended, and another may have got its number, since the lock was read.
        if process < 0 or _holder(run) != holder:
            raise RunDirectoryError(f"the run {run.name} has just ended")
        signal.pidfd_send_signal(process, signal.SIGTERM)
        say(f"asked process {holder.pid} to stop after the step and save")
        # A descriptor of a process becomes readable when the process ends.
        select.select([process], [], [], wait_s)
    except PermissionError:
        raise RunDirectoryError(f"the run {run.name} is of another user (process {holder.pid})") from None
    finally:
        if process >= 0:
            os.close(process)
    info = inspect_run(run)
    return info.state if info is not None else "died"


def _holder(run: Path) -> Holder | None:
    try:
        return holder_of(run / LOCK_FILE)
    except OSError as error:
        raise RunDirectoryError(f"cannot read {run / LOCK_FILE}: {error.strerror}") from error


# A run that outlives the terminal ------------------------------------------------------------------------------


def start_detached(arguments: Sequence[str], run: Path, *, timeout_s: float = 120.0) -> int:
    """Start `cordee train` with these arguments as a process of its own; return its number when it trains.

    What the process prints goes to a file in the run directory. Raises RunDirectoryError with what it printed if it
    ends before the run has begun.
    """
    is_new = not run.exists()
    run.mkdir(parents=True, exist_ok=True)
    output = run / OUTPUT_FILE
    with output.open("ab") as file:
        begin = file.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "cordee", "train", *arguments, "--run-dir", str(run)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a terminal that is closed does not end it
            env=child_environment(),
        )
    deadline_s = time.monotonic() + timeout_s
    events_before = _size(run / EVENTS_FILE)
    while process.poll() is None and time.monotonic() < deadline_s:
        holder = _holder(run)
        if holder is not None and holder.pid == process.pid and _size(run / EVENTS_FILE) > events_before:
            return process.pid
        time.sleep(_LOOK_EVERY_S)
    if process.poll() is None or process.returncode == 0:
        return process.pid  # slow to begin, or done already
    said = output.read_bytes()[begin:].decode(errors="replace").strip()
    if is_new and [path.name for path in run.iterdir()] == [OUTPUT_FILE]:
        output.unlink()
        run.rmdir()
    raise RunDirectoryError(said.removeprefix("cordee: ") or f"the run ended with exit code {process.returncode}")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


# Logs ------------------------------------------------------------------------------------------------------------


def follow_logs(run: Path, logs: Logs, say: Callable[[LogLine], None]) -> None:
    """Say each new line until the run has ended."""
    while True:
        is_running = _holder(run) is not None
        for line in logs.new_lines():
            say(line)
        if not is_running:
            return
        time.sleep(_LOOK_EVERY_S)
