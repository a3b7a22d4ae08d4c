"""What a federation has on disk beside checkpoints: its clients, and what they sent in the round under way.

One SQLite file in the run directory, mode 0600. `invite` and `revoke` write it while the server runs. A result is
acknowledged after it was written and synced, so that it survives the death of the process and of the machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from cordee.communication.wire import Buffer, BufferSpec
from cordee.core.errors import JobError, RunDirectoryError, StorageError
from cordee.core.fault_points import reach

STORE_FILE = "federation.sqlite"
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
_BUSY_S = 10.0


class ClientRecord(msgspec.Struct, frozen=True):
    """A client that was invited."""

    number: int  # in the order of invitations; its place among all clients
    name: str
    ticket_hash: str
    key: str  # public key in hexadecimal; empty until the ticket was used
    is_revoked: bool


class RoundRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The round under way: all that a server that comes back must know, beside the results."""

    round: int
    attempt: int
    asked: tuple[str, ...]  # in the order of their places
    started: float  # unix seconds
    closed: dict[str, tuple[str, ...]] = {}  # of a secure round: who was heard, by stages that are over
    num_wanted: int = 0  # of an asynchronous round: updates of clients that it takes
    # Of an asynchronous round: which task each client was given, as (updates of the server before it, attempt).
    requests: dict[str, tuple[int, int]] = {}


class ResultRecord(NamedTuple):
    """A result of a client, as it came in."""

    client: str
    stage: str
    header: bytes  # MessagePack of the message
    buffers: bytes  # MessagePack of (dtype, shape, bytes) of each buffer


class FederationStore:
    """The file. Each method is one transaction. Raises StorageError where the disk refuses."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        if not create and not path.is_file():
            raise RunDirectoryError(
                f"{path.parent} is no federation: `cordee federation serve JOB.toml --run-dir {path.parent}` makes it"
            )
        self._path = path
        with self._writing():
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._database = sqlite3.connect(path, isolation_level=None, timeout=_BUSY_S)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
            self._database.executescript(
                """
                CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT);
                CREATE TABLE IF NOT EXISTS clients (
                    number INTEGER PRIMARY KEY, name TEXT UNIQUE, ticket_hash TEXT, client_key TEXT,
                    is_revoked INTEGER, invited REAL);
                CREATE TABLE IF NOT EXISTS results (
                    round INTEGER, attempt INTEGER, stage TEXT, client TEXT, header BLOB, buffers BLOB,
                    PRIMARY KEY (round, attempt, stage, client));
                """
            )

    def close(self) -> None:
        self._database.close()

    # Facts: plain values by name.

    def fact(self, name: str) -> str | None:
        with self._writing():
            row = self._database.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def set_fact(self, name: str, value: str) -> None:
        with self._writing():
            self._database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    # Clients.

    def invite(self, name: str) -> str:
        """Write down a new client; return its ticket. Raises JobError for a name that is taken, or is none."""
        if not name or len(name) > 64 or set(name) - _NAME_CHARACTERS:
            raise JobError(f"a client's name is 1 to 64 letters, digits, '-', '_' and '.', not {name!r}")
        ticket = secrets.token_urlsafe(24)
        try:
            with self._writing():
                self._database.execute(
                    "INSERT INTO clients (name, ticket_hash, client_key, is_revoked, invited) VALUES (?, ?, '', 0, ?)",
                    (name, _hash(ticket), time.time()),
                )
        except sqlite3.IntegrityError:
            raise JobError(
                f"{name!r} was invited before: choose another name (a client that was revoked stays revoked)"
            ) from None
        return ticket

    def revoke(self, name: str) -> None:
        """Refuse whatever a client says from now on. Raises JobError if there is no such client."""
        with self._writing():
            found = self._database.execute("UPDATE clients SET is_revoked = 1 WHERE name = ?", (name,)).rowcount
        if not found:
            known = ", ".join(client.name for client in self.clients()) or "nobody"
            raise JobError(f"no client {name!r} was invited (there are: {known})")

    def clients(self) -> list[ClientRecord]:
        """Return all clients in the order of their invitations."""
        with self._writing():
            rows = self._database.execute(
                "SELECT number, name, ticket_hash, client_key, is_revoked FROM clients ORDER BY number"
            ).fetchall()
        return [
            ClientRecord(number, name, ticket_hash, key, bool(is_revoked))
            for number, name, ticket_hash, key, is_revoked in rows
        ]

    def version(self) -> int:
        """Return a number that changes when another process has written."""
        with self._writing():
            (version,) = self._database.execute("PRAGMA data_version").fetchone()
        return int(version)

    def enrol(self, name: str, ticket: str, key: str) -> str:
        """Pin a client's key on the first use of its ticket; return why not, if so. The same key may come again."""
        record = next((client for client in self.clients() if client.name == name), None)
        if record is None or not hmac.compare_digest(record.ticket_hash, _hash(ticket)):
            return "the token is not one of this federation"
        if record.is_revoked:
            return f"client {name} was revoked"
        if record.key and record.key != key:
            return f"the token of {name} was used by another client: ask for an invitation of your own"
        with self._writing():
            pinned = self._database.execute(
                "UPDATE clients SET client_key = ? WHERE name = ? AND client_key IN ('', ?)", (key, name, key)
            ).rowcount
        return "" if pinned else f"the token of {name} was used by another client: ask for an invitation of your own"

    # The round under way.

    def round(self) -> RoundRecord | None:
        text = self.fact("round")
        return None if text is None else msgspec.json.decode(text, type=RoundRecord)

    def write_round(self, record: RoundRecord) -> None:
        """Begin a round, an attempt or a stage. Results of other rounds and attempts are forgotten."""
        with self._writing(), self._transaction():
            self._database.execute(
                "INSERT OR REPLACE INTO facts VALUES ('round', ?)", (msgspec.json.encode(record).decode(),)
            )
            self._database.execute(
                "DELETE FROM results WHERE round != ? OR attempt != ?", (record.round, record.attempt)
            )

    def end_round(self) -> None:
        """Forget the round under way: what came of it is in a checkpoint."""
        with self._writing(), self._transaction():
            self._database.execute("DELETE FROM facts WHERE name = 'round'")
            self._database.execute("DELETE FROM results")

    def add_results(self, round_number: int, attempt: int, results: Sequence[ResultRecord]) -> None:
        """Write results, all or none. One that is there already stays as it is."""
        reach("federation.result", StorageError)
        rows = [(round_number, attempt, r.stage, r.client, r.header, r.buffers) for r in results]
        with self._writing(), self._transaction():
            self._database.executemany("INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?, ?, ?)", rows)
        reach("federation.result_written")

    def results(self, round_number: int, attempt: int) -> Iterator[ResultRecord]:
        """Yield the results of an attempt in the order in which they came."""
        with self._writing():
            cursor = self._database.execute(
                "SELECT client, stage, header, buffers FROM results WHERE round = ? AND attempt = ? ORDER BY rowid",
                (round_number, attempt),
            )
            for row in cursor:
                yield ResultRecord(*row)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.IntegrityError:
            raise
        except (sqlite3.Error, OSError) as error:
            raise StorageError(f"cannot write {self._path}: {error}") from error


def pack_buffers(buffers: Sequence[Any]) -> bytes:
    """Return received buffers as bytes for the disk."""
    return msgspec.msgpack.encode([(b.spec.dtype, b.spec.shape, bytes(b.data)) for b in buffers])


def unpack_buffers(packed: bytes) -> list[Tensor]:
    """Return the tensors of a result from the disk."""
    found = msgspec.msgpack.decode(packed, type=list[tuple[str, tuple[int, ...], bytes]])
    return [
        Buffer(BufferSpec(dtype, shape), memoryview(bytearray(content))).torch()  # type: ignore[arg-type]
        for dtype, shape, content in found
    ]


def _hash(ticket: str) -> str:
    return hashlib.sha256(ticket.encode()).hexdigest()
