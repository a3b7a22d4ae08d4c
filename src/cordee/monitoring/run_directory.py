"""The folder of one run: where its files are, who may write there, and what it is called.

job.toml  events.jsonl  checkpoints/  logs/  summary.json  .lock
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import socket
import time
import weakref
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from cordee.core.errors import RunDirectoryError, StorageError, nearest
from cordee.monitoring import summary as summaries
from cordee.monitoring.files import reason, write_atomically
from cordee.monitoring.summary import Summary

JOB_FILE, EVENTS_FILE, SUMMARY_FILE, LOCK_FILE = "job.toml", "events.jsonl", "summary.json", ".lock"
STORAGE_FILE = ".storage"  # which run of `checkpoint.storage` this is
DATA_FILE = ".data"  # a fingerprint of what the run trains on
CHECKPOINTS = "checkpoints"
_SIGNS_OF_A_RUN = (JOB_FILE, EVENTS_FILE, SUMMARY_FILE, CHECKPOINTS)
_PROBE_BYTES = 16384  # less room than this is no room for a run


class RunDirectory:
    """A run directory that this process holds, until `release` or its death. Made by the two class methods."""

    def __init__(self, path: Path, lock: DirectoryLock) -> None:
        self.path = path
        self._lock = lock
        self.job_file, self.events_file, self.summary_file = path / JOB_FILE, path / EVENTS_FILE, path / SUMMARY_FILE
        self.checkpoints, self.logs, self.tensorboard = path / CHECKPOINTS, path / "logs", path / "tensorboard"
        self.launcher_log = self.logs / "launcher.log"

    @classmethod
    def create(cls, path: str | Path, job_toml: str, *, is_new: bool = False) -> RunDirectory:
        """Make the directory of a new run and write its job. With `is_new` the caller has just made the directory.

        Raises `RunDirectoryError` when it cannot be made or written, holds a run already, or is in use.
        """
        path = Path(path)
        is_new = is_new or not _exists(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunDirectoryError(
                f"cannot make the run directory {path}: {reason(error)}; choose another --run-dir"
            ) from None
        _refuse_existing_run(path)
        lock: DirectoryLock | None = None
        try:
            lock = DirectoryLock(path / LOCK_FILE)
            _refuse_existing_run(path)  # another process may have made one since
            directory = cls(path, lock)
            directory._prepare(job_toml)
        except BaseException:
            if is_new:
                _remove_unused(path, lock)
            if lock is not None:
                lock.release()
            raise
        return directory

    @classmethod
    def create_in(cls, runs_folder: str | Path, job_name: str, job_toml: str) -> RunDirectory:
        """Like `create`, with a directory of its own in `runs_folder`, also if another run starts in this second."""
        while True:
            path = new_run_path(runs_folder, job_name)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.mkdir()
            except FileExistsError:
                continue  # another run has just made it
            except OSError as error:
                raise RunDirectoryError(
                    f"cannot make the run directory {path}: {reason(error)}; choose another --run-dir"
                ) from None
            return cls.create(path, job_toml, is_new=True)

    @classmethod
    def open_existing(cls, path: str | Path) -> RunDirectory:
        """Take hold of a run that ended or died, to continue it.

        Raises `RunDirectoryError` when there is no run, it cannot be written, or a living process has it.
        """
        path = Path(path)
        try:
            if not path.is_dir():
                beside = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
                raise RunDirectoryError(f"there is no run directory {path}{nearest(path.name, beside)}")
            if not (path / JOB_FILE).is_file():
                raise RunDirectoryError(f"{path} is not a run directory: it has no {JOB_FILE}")
        except OSError as error:
            raise RunDirectoryError(f"cannot read the run directory {path}: {reason(error)}") from None
        directory = cls(path, DirectoryLock(path / LOCK_FILE))
        try:
            directory._make_folders()
            directory._probe()
        except BaseException:
            directory.release()
            raise
        return directory

    def worker_log(self, worker_index: int = 0) -> Path:
        return self.logs / f"worker-{worker_index}.log"

    def write_job(self, job_toml: str) -> None:
        """Replace the recorded job, as a resume with changed settings does. Raises `StorageError`."""
        write_atomically(self.job_file, job_toml.encode())

    def write_data(self, fingerprint: str) -> None:
        """Record what the run trains on. Raises `StorageError`."""
        write_atomically(self.path / DATA_FILE, fingerprint.encode())

    def write_summary(self, summary: Summary) -> None:
        """Write `summary.json`, whole or not at all. Raises `StorageError`."""
        summaries.write_summary(self.summary_file, summary)

    def read_summary(self) -> Summary | None:
        """Return the last summary written, if any. Raises `RunDirectoryError` when the file is damaged."""
        return summaries.read_summary(self.summary_file)

    def discard(self) -> None:
        """Remove what `create` made, in a directory in which nothing has begun, and release it."""
        with contextlib.suppress(OSError):
            for file in (self.job_file, self.path / STORAGE_FILE, self.path / DATA_FILE):
                file.unlink(missing_ok=True)
            for folder in (self.checkpoints, self.logs):
                folder.rmdir()
            _remove_unused(self.path, self._lock)
        self.release()

    def release(self) -> None:
        """Let others use the directory. May be called again."""
        self._lock.release()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _prepare(self, job_toml: str) -> None:
        self._probe()
        try:
            # Before all else: what has no job can neither be resumed nor be taken for a run.
            self.write_job(job_toml)
        except StorageError as error:
            raise RunDirectoryError(f"{error}; free some space or choose another --run-dir") from None
        self._make_folders()

    def _make_folders(self) -> None:
        if self.checkpoints.is_symlink():
            raise RunDirectoryError(
                f"{self.checkpoints} is a link, and no links are followed: put the folder itself there, or the whole "
                "run elsewhere with --run-dir"
            )
        for folder in (self.checkpoints, self.logs):
            try:
                folder.mkdir(exist_ok=True)
            except OSError as error:
                raise RunDirectoryError(f"cannot make {folder}: {reason(error)}; choose another --run-dir") from None

    def _probe(self) -> None:
        probe = self.path / ".probe"
        try:
            write_atomically(probe, b"\0" * _PROBE_BYTES)
            probe.unlink()
        except (StorageError, OSError) as error:
            cause = error.__cause__ if isinstance(error, StorageError) else error
            assert isinstance(cause, OSError)
            raise RunDirectoryError(
                f"cannot write in the run directory {self.path}: {reason(cause)}; "
                "free some space or choose another --run-dir"
            ) from None


def new_run_path(runs_folder: str | Path, job_name: str) -> Path:
    """Return a path in `runs_folder` that is not taken: NAME-YYYYmmdd-HHMMSS, with -2, -3 … if need be."""
    # 200 bytes of the name leave room for the rest in the 255 that file systems allow.
    name = job_name.encode()[:200].decode(errors="ignore")
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(1):
        path = Path(runs_folder) / (stem if number == 1 else f"{stem}-{number}")
        if not _exists(path):
            return path
    raise AssertionError("unreachable")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # not readable: making it will say why
        return False


def _refuse_existing_run(path: Path) -> None:
    for sign in _SIGNS_OF_A_RUN:
        if _exists(path / sign):
            raise RunDirectoryError(
                f"{path} holds a run already (there is {sign}): continue it with --resume, or choose another --run-dir"
            )


def _remove_unused(path: Path, lock: DirectoryLock | None) -> None:
    if lock is not None and [file.name for file in path.iterdir()] == [LOCK_FILE]:
        lock.path.unlink()
    if not any(path.iterdir()):
        path.rmdir()


# A lock that says which process uses a run directory, and that the kernel frees when that process dies.

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
            os.pwrite(self._descriptor, f"{os.getpid()}\n{socket.gethostname()}\n".encode(), 0)
        except OSError as error:
            self.path.unlink()
            raise RunDirectoryError(
                f"cannot write in the run directory {self.path.parent}: {reason(error)}; "
                "free some space or choose another --run-dir"
            ) from None


def is_locked(path: Path) -> bool:
    """Return whether a living process holds `path`. Raises `OSError` when that cannot be found out."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


class Holder(NamedTuple):
    """The process that has a run directory."""

    pid: int
    host: str


def holder_of(path: Path) -> Holder | None:
    """Return the living process that holds a lock, or None. Raises `OSError` when that cannot be found out."""
    if not is_locked(path):
        return None
    with path.open("rb") as file:
        return _read_holder(file.fileno())


def _read_holder(descriptor: int) -> Holder | None:
    pid, _, host = os.pread(descriptor, 512, 0).decode("utf-8", "replace").strip().partition("\n")
    return Holder(int(pid), host) if pid.isdecimal() else None


def _owner(descriptor: int) -> str:
    holder = _read_holder(descriptor)
    if holder is None:
        return "another process"
    return f"process {holder.pid}" + (f" of {holder.host}" if holder.host not in ("", socket.gethostname()) else "")


def _close_in_forked_children() -> None:
    # A forked data-loading process would inherit the lock and keep it after its parent was killed.
    global _is_fork_hook_set
    if not _is_fork_hook_set:
        os.register_at_fork(after_in_child=_release_all)
        _is_fork_hook_set = True


def _release_all() -> None:
    for lock in tuple(_held):
        lock.release()
