"""The coordinator's journal: what it must know, and what it was about to do, should it be killed at any moment.

One entry is one transaction: the state after a turn of the coordinator, and the commands that follow from it. They are
carried out after the entry is written, and again by the coordinator that comes back; each has an effect only once.
The file is for the death of a process, not of the machine, which ends the launcher as well: it is never synced, and
an entry takes about 0.03 ms.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from cordee.core.errors import StorageError
from cordee.core.fault_points import reach

JOURNAL_FILE = "coordinator.sqlite"
_SIDE_FILES = ("-wal", "-shm", "-journal")


class Entry(NamedTuple):
    state: bytes
    effects: bytes


class Journal:
    """The entries of one run. Only the newest is kept."""

    def __init__(self, path: Path, run: str) -> None:
        """Open the journal of `run`; what another run left in the file is removed. Raises StorageError."""
        self._path, self._run = path, run
        try:
            try:
                self._open()
            except sqlite3.OperationalError:  # the disk refuses; what the file says is not thrown away for it
                raise
            except sqlite3.DatabaseError:  # damaged
                remove_journal(path)
                self._open()
        except (sqlite3.Error, OSError) as error:
            raise StorageError(f"cannot write {path}: {error}") from error

    def _open(self) -> None:
        # Commands have keys in them. SQLite gives the files beside this one the same mode.
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._database = sqlite3.connect(self._path, isolation_level=None)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = OFF")
        self._database.execute(
            "CREATE TABLE IF NOT EXISTS journal "
            "(only INTEGER PRIMARY KEY, number INTEGER, time REAL, run TEXT, state BLOB, effects BLOB)"
        )
        self._database.execute("DELETE FROM journal WHERE run != ?", (self._run,))
        (self.num_entries,) = self._database.execute("SELECT coalesce(max(number), 0) FROM journal").fetchone()

    def load(self) -> Entry | None:
        """Return the newest entry, if there is one. Raises StorageError."""
        try:
            row = self._database.execute("SELECT state, effects FROM journal").fetchone()
        except sqlite3.Error as error:
            raise StorageError(f"cannot read {self._path}: {error}") from error
        return None if row is None else Entry(*row)

    def commit(self, state: bytes, effects: bytes) -> None:
        """Write an entry, whole or not at all. Raises StorageError."""
        row = (self.num_entries + 1, time.time(), self._run, state, effects)
        try:
            reach("journal.write", sqlite3.OperationalError)
            self._database.execute("INSERT OR REPLACE INTO journal VALUES (1, ?, ?, ?, ?, ?)", row)
        except sqlite3.Error as error:
            raise StorageError(f"cannot write {self._path}: {error}") from error
        self.num_entries += 1
        reach("journal.written")

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def remove_journal(path: Path) -> None:
    """Remove the file and what SQLite keeps beside it. A disk that has become read-only keeps them."""
    for side in ("", *_SIDE_FILES):
        with contextlib.suppress(OSError):
            path.with_name(path.name + side).unlink(missing_ok=True)
