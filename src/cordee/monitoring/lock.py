"""A lock that says which process uses a run directory, and that the kernel frees when that process dies."""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from pathlib import Path

from cordee.core.errors import RunDirectoryError
from cordee.monitoring.files import reason

# Whoever lists runs holds the lock for an instant to see whether it is free; a starting run waits that out.
_PATIENCE_S = 0.3

_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()
_is_fork_hook_set = False


class DirectoryLock:
    """Holds `path` from construction to `release`, or to the death of the process, whichever way it dies.

    Raises `RunDirectoryError` with the process id when another process holds it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RunDirectoryError(
                f"cannot write in the run directory {path.parent}: {reason(error)}; choose another --run-dir"
            ) from None
        try:
            self._acquire()
            self._write_pid()
        except BaseException:
            os.close(self._descriptor)
            raise
        _close_in_forked_children()
        _held.add(self)

    def release(self) -> None:
        """Give the lock up. May be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _acquire(self) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RunDirectoryError(
                        f"the run directory {self.path.parent} is in use by {_owner(self._descriptor)}: "
                        "wait for it to end, or choose another --run-dir"
                    ) from None
                time.sleep(0.01)
            except OSError as error:
                raise RunDirectoryError(
                    f"cannot lock the run directory {self.path.parent}: {reason(error)}; "
                    "choose a --run-dir on a file system with locks"
                ) from None

    def _write_pid(self) -> None:
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            self.path.unlink()
            raise RunDirectoryError(
                f"cannot write in the run directory {self.path.parent}: {reason(error)}; "
                "free some space or choose another --run-dir"
            ) from None


def is_locked(path: Path) -> bool:
    """Return whether a living process holds `path`. Raises `OSError` when that cannot be found out."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _owner(descriptor: int) -> str:
    text = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
    return f"process {text}" if text.isdigit() else "another process"


def _close_in_forked_children() -> None:
    # A forked data-loading process would inherit the lock and keep it after its parent was killed.
    global _is_fork_hook_set
    if not _is_fork_hook_set:
        os.register_at_fork(after_in_child=_release_all)
        _is_fork_hook_set = True


def _release_all() -> None:
    for lock in tuple(_held):
        lock.release()
