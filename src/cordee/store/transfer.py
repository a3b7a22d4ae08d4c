"""Moving arrays between a client and the servers: in pieces, several under way at once, again after a lost connection.

While a server works on one piece of a large array the client copies the next, and copies the result of the one before.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np

from cordee.communication.buffers import ITEM_BYTES, Buffer, BufferSpec, Parcel, WireError, padded
from cordee.communication.calls import Connection, Pending, ServerDiedError, ServerFrozenError
from cordee.communication.channel import RefusedError
from cordee.communication.messages import Message
from cordee.core.errors import CommunicationError, StoreError
from cordee.store.messages import AskMemory, Bye, Cut, Done, Exchange, Fill, Memory, Pull, Push, Value
from cordee.store.shared_values import BLOCK_BYTES, SMALLEST_BYTES, ValuesView

log = logging.getLogger(__name__)

PIECE_BYTES = BLOCK_BYTES  # through shared memory
FAR_PIECE_BYTES = 1 << 18  # through channels, where encrypting takes most of the time, at both ends at once
DIRECTORY = -1  # in the place of a server's number
WINDOW = 4  # pieces under way at each server
_RETRY_S = 0.05
_SMALL_BYTES = 64 << 10


class Pulled(NamedTuple):
    """The value of a key, and how many pushes are in it (of a key in several parts: at least)."""

    value: Any
    version: int


class Piece(NamedTuple):
    """A run of elements that travels in one message."""

    part: int  # which of the array's parts
    server: int
    start: int  # within the part
    stop: int
    first: int  # bytes within the array
    last: int
    empty: Parcel  # without the bytes


@dataclass
class Entry:
    """What a client knows of a key."""

    key: str
    number: int
    kind: str
    shape: tuple[int, ...]
    cuts: tuple[Cut, ...]
    piece_bytes: int = PIECE_BYTES
    memories: list[ValuesView | None] | None = None  # of the parts, on this host; None: not asked for yet
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while a push is under way: keeps their order

    def __post_init__(self) -> None:
        item = ITEM_BYTES[self.kind]
        step = max(1, self.piece_bytes // item)
        self.num_bytes = prod(self.shape) * item
        self.pieces: list[Piece] = []
        for index, cut in enumerate(self.cuts):
            length = cut.stop - cut.start
            for start in range(0, max(length, 1), step):
                stop = min(start + step, length)
                size = (stop - start) * item
                first = (cut.start + start) * item
                empty = describe((self.kind, (stop - start,)))
                self.pieces.append(Piece(index, cut.server, start, stop, first, first + size, empty))


def describe(*buffers: tuple[str, tuple[int, ...]]) -> Parcel:
    """Return a parcel of buffers of these kinds and shapes, without their bytes."""
    specs = tuple(BufferSpec(kind, shape) for kind, shape in buffers)  # type: ignore[arg-type]
    return Parcel(specs, [], msgspec.msgpack.encode(specs), sum(padded(spec.num_bytes) for spec in specs))


class Wire:
    """Calls to the servers of a store. Any thread may call."""

    def __init__(self, connect: Callable[[int], Connection], failure_timeout_s: float) -> None:
        self._connect = connect
        self._timeout_s = failure_timeout_s
        self._connections: dict[int, Connection] = {}
        self._dead: dict[int, ServerDiedError] = {}  # servers of this host whose process has ended: with their values
        self._lock = threading.Lock()

    def call(
        self,
        server: int,
        message: Message,
        buffers: Sequence[Any] = (),
        *,
        receive: Callable[[Message, tuple[Buffer, ...]], Any] = lambda message, buffers: message,
        reply_bytes: int = 0,
    ) -> Any:
        """Make a call until it is answered.

        Raises StoreError if the server refuses it, CommunicationError if the server died or does not answer in time.
        """
        deadline = 0.0
        while True:
            connection = None
            try:
                connection = self.connection(server)
                return connection.call(message, buffers, receive=receive, reply_bytes=reply_bytes)
            except RefusedError as error:
                raise as_store_error(error) from error
            except WireError:  # the message itself: no other attempt would do better
                raise
            except CommunicationError as error:
                deadline = deadline or time.monotonic() + self._timeout_s
                self._drop(server, connection)
                if isinstance(error, ServerDiedError):
                    self._dead[server] = error
                # Whoever is silent for the failure timeout has had its time.
                if server in self._dead or isinstance(error, ServerFrozenError) or time.monotonic() > deadline:
                    raise gone(server, error) from error
                log.info("%s: %s; trying again", _describe_server(server), error)
                time.sleep(_RETRY_S)

    def piece_bytes(self, cuts: Sequence[Cut]) -> int:
        """Return in how large pieces an array with these parts should travel."""
        is_near = all(self.connection(cut.server).is_shared for cut in cuts)
        return PIECE_BYTES if is_near else FAR_PIECE_BYTES

    def ask(self, message: Message) -> Any:
        """Make a call to the directory, as `call` does."""
        return self.call(DIRECTORY, message)

    def run(self, tasks: Sequence[Task]) -> None:
        """Make all calls, some at a time for each server; raises as `call` does, when none is under way any more."""
        if len(tasks) == 1:
            self._again(tasks[0])
            return
        under_way: deque[tuple[Task, Pending]] = deque()
        failed: list[Task] = []
        lost: set[int] = set()  # servers that could not be called: one attempt is enough for all tasks
        limit = WINDOW * len({task.server for task in tasks})
        try:
            for task in tasks:
                if len(under_way) >= limit:
                    self._finish(*under_way.popleft(), failed)
                if task.server in lost:
                    failed.append(task)
                    continue
                connection = None
                try:
                    connection = self.connection(task.server)
                    under_way.append((task, connection.begin(task.message, task.parcel, reply_bytes=task.reply_bytes)))
                except RefusedError as error:
                    raise as_store_error(error) from error
                except CommunicationError:
                    self._drop(task.server, connection)
                    lost.add(task.server)
                    failed.append(task)
            while under_way:
                self._finish(*under_way.popleft(), failed)
        except BaseException:
            for _, pending in under_way:
                pending.abandon()
            raise
        for task in failed:
            self._again(task)

    def close(self) -> None:
        """Say goodbye to all servers that were called, and close the connections."""
        with self._lock:
            connections, self._connections = list(self._connections.values()), {}
        for connection in connections:
            with contextlib.suppress(CommunicationError):
                connection.call(Bye(), timeout_s=1.0)
            connection.close()

    def connection(self, server: int) -> Connection:
        connection = self._connections.get(server)
        if connection is not None:
            return connection
        if server in self._dead:
            raise self._dead[server]
        with self._lock:
            if server not in self._connections:
                self._connections[server] = self._connect(server)
            return self._connections[server]

    def _again(self, task: Task) -> None:
        self.call(task.server, task.message, task.parcel, receive=task.receive, reply_bytes=task.reply_bytes)

    def _finish(self, task: Task, pending: Pending, failed: list[Task]) -> None:
        try:
            pending.finish(task.receive)
        except RefusedError as error:
            raise as_store_error(error) from error
        except ServerFrozenError as error:
            raise gone(task.server, error) from error
        except CommunicationError:
            failed.append(task)

    def _drop(self, server: int, connection: Connection | None) -> None:
        with self._lock:
            if connection is None or self._connections.get(server) is not connection:
                return
            del self._connections[server]
        connection.close()


class Task(NamedTuple):
    """One call of several."""

    server: int
    message: Message
    parcel: Sequence[Any]
    receive: Callable[[Message, tuple[Buffer, ...]], Any]
    reply_bytes: int


class Versions:
    """Gathers the versions that the pieces of one transfer report."""

    def __init__(self, num_parts: int) -> None:
        self._highest, self._lowest = [0] * num_parts, [-1] * num_parts

    def note(self, part: int, version: int) -> None:
        self._highest[part] = max(self._highest[part], version)
        if self._lowest[part] < 0 or version < self._lowest[part]:
            self._lowest[part] = version

    @property
    def after_push(self) -> int:
        """The version of the part that is furthest behind, of each the latest report: it is of the whole push."""
        return min(self._highest)

    @property
    def of_pull(self) -> int:
        return min(self._lowest)


def fill(wire: Wire, entry: Entry, view: memoryview) -> None:
    """Bring the first value of a key to its servers, where room has been made."""
    wire.run(
        [
            Task(piece.server, Fill(entry.number, piece.start), _parcel(piece, view), _ignore, 0)
            for piece in entry.pieces
        ]
    )


def push(wire: Wire, entry: Entry, view: memoryview, sequence: int) -> int:
    """Push a whole array; return the version that has it."""
    versions = Versions(len(entry.cuts))
    wire.run(
        [
            Task(
                piece.server,
                Push(entry.number, sequence, piece.start),
                _parcel(piece, view),
                _note(versions, piece.part),
                0,
            )
            for piece in entry.pieces
        ]
    )
    return versions.after_push


def pull(wire: Wire, entry: Entry, target: memoryview, min_version: int, timeout_s: float) -> int:
    """Pull a whole array; return its version."""
    versions = Versions(len(entry.cuts))
    memories = _memories(wire, entry)
    late: list[Piece] = []
    wire.run(
        [
            Task(
                piece.server,
                Pull(entry.number, piece.start, piece.stop, min_version, timeout_s, memories[piece.part] is not None),
                (),
                _write(entry, piece, target, versions, late, memories[piece.part]),
                0 if memories[piece.part] is not None else piece.empty.extent,
            )
            for piece in entry.pieces
        ]
    )
    if late:
        _pull_pieces(wire, entry, late, target, versions, min_version, timeout_s)
    return versions.of_pull


def push_pull(wire: Wire, entry: Entry, view: memoryview, target: memoryview, sequence: int) -> int:
    """Push a whole array and pull the value that has it; return the version."""
    versions = Versions(len(entry.cuts))
    memories = _memories(wire, entry)
    late: list[Piece] = []
    wire.run(
        [
            Task(
                piece.server,
                Exchange(entry.number, sequence, piece.start, memories[piece.part] is not None),
                _parcel(piece, view),
                _write(entry, piece, target, versions, late, memories[piece.part]),
                piece.empty.extent,
            )
            for piece in entry.pieces
        ]
    )
    version = versions.after_push
    if late:
        _pull_pieces(wire, entry, late, target, Versions(len(entry.cuts)), 0, 0.0)
    return version


def _memories(wire: Wire, entry: Entry) -> list[ValuesView | None]:
    """Return, for each part, its shared memory, if this process can read it."""
    if entry.memories is None:
        entry.memories = [_map(wire, entry, cut) for cut in entry.cuts]
    return entry.memories


def _map(wire: Wire, entry: Entry, cut: Cut) -> ValuesView | None:
    num_bytes = (cut.stop - cut.start) * ITEM_BYTES[entry.kind]
    if num_bytes < SMALLEST_BYTES or not wire.connection(cut.server).is_shared:
        return None
    memory = wire.call(cut.server, AskMemory(entry.number))
    assert isinstance(memory, Memory)
    if not memory.num_bytes:
        return None
    try:
        return ValuesView(memory.pid, memory.fd, memory.num_bytes, num_bytes)
    except CommunicationError as error:
        log.debug("key '%s' is not read in shared memory: %s", entry.key, error)
        return None


def _pull_pieces(
    wire: Wire,
    entry: Entry,
    pieces: Sequence[Piece],
    target: memoryview,
    versions: Versions,
    min_version: int,
    timeout_s: float,
) -> None:
    wire.run(
        [
            Task(
                piece.server,
                Pull(entry.number, piece.start, piece.stop, min_version, timeout_s),
                (),
                _write(entry, piece, target, versions, [], None),
                piece.empty.extent,
            )
            for piece in pieces
        ]
    )


def _parcel(piece: Piece, view: memoryview) -> Parcel:
    empty = piece.empty
    return Parcel(empty.specs, [view[piece.first : piece.last]], empty.described, empty.extent)


def _note(versions: Versions, part: int) -> Callable[[Message, tuple[Buffer, ...]], None]:
    def receive(message: Message, buffers: tuple[Buffer, ...]) -> None:
        assert isinstance(message, Done)
        versions.note(part, message.version)

    return receive


def _write(
    entry: Entry,
    piece: Piece,
    target: memoryview,
    versions: Versions,
    late: list[Piece],
    memory: ValuesView | None,
) -> Callable[[Message, tuple[Buffer, ...]], None]:
    def receive(message: Message, buffers: tuple[Buffer, ...]) -> None:
        assert isinstance(message, Value)
        versions.note(piece.part, message.version)
        if memory is not None and message.stamp >= 0:
            first = piece.start * ITEM_BYTES[entry.kind]
            if memory.read(first, target[piece.first : piece.last], message.stamp):
                return
        if not buffers:
            late.append(piece)
            return
        data = buffers[0].data
        if data.nbytes != piece.last - piece.first:
            raise CommunicationError(
                f"a server sent {data.nbytes} bytes where {piece.last - piece.first} were asked for"
            )
        if data.nbytes < _SMALL_BYTES:
            target[piece.first : piece.last] = data
        else:  # NumPy lets other threads run meanwhile
            np.frombuffer(target, np.uint8)[piece.first : piece.last] = np.frombuffer(data, np.uint8)

    return receive


def _ignore(message: Message, buffers: tuple[Buffer, ...]) -> None:
    pass


def gone(server: int, error: CommunicationError) -> CommunicationError:
    return CommunicationError(f"{_describe_server(server)} of the store is gone: {error}")


def _describe_server(server: int) -> str:
    return "the directory" if server == DIRECTORY else f"server {server}"


def as_store_error(error: RefusedError) -> StoreError:
    return StoreError(error.detail if error.reason == "failed" else str(error))
