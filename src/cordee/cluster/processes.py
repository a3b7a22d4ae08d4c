"""Looking at processes of this host: whether they live, are stopped by a signal, or get processor time."""

from __future__ import annotations

import signal

import psutil


def is_alive(pid: int) -> bool:
    """Whether there is such a process; one that has ended and was not waited for is none."""
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


def describe_status(status: int) -> str:
    """Return what an exit code, or minus the number of a signal, means, in words."""
    if status >= 0:
        return f"exited with code {status}"
    if -status == signal.SIGBUS:
        return (
            "was killed by SIGBUS: a file that it had mapped was cut short (a checkpoint that something else writes "
            "to), or the memory for files of /dev/shm ran out"
        )
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
