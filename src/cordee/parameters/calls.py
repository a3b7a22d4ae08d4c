"""Calls to servers of parameters: several under way at once, and again after a lost connection.

A server that died may come back under another address, or its follower takes over: what was not acknowledged is sent
again. Servers count each push once, so sending twice does no harm.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cordee.communication.calls import UNAVAILABLE, Connection, Connections, Pending, ServerDiedError, ServerFrozenError
from cordee.communication.channel import RefusedError
from cordee.communication.messages import Message
from cordee.communication.wire import Buffer, WireError
from cordee.core.errors import CommunicationError, StoreError
from cordee.core.fault_points import loses_message, reach
from cordee.parameters.messages import Bye, Cut, Memory
from cordee.parameters.shared_values import BLOCK_BYTES, SMALLEST_BYTES, ValuesView

log = logging.getLogger(__name__)

PIECE_BYTES = BLOCK_BYTES  # through shared memory
CHANNEL_PIECE_BYTES = 1 << 18  # through channels, where encrypting takes most of the time, at both ends at once
DIRECTORY = -1  # in the place of a server's number
WINDOW = 4  # calls under way at each server
_RETRY_S = 0.02


class ServerCalls:
    """Calls to servers by their numbers. Any thread may call.

    `connect` returns a connection to the process that serves now, and raises CommunicationError where there is none.
    """

    def __init__(
        self,
        connect: Callable[[int], Connection],
        patience_s: float,
        *,
        is_replaced: bool = True,
    ) -> None:
        """`is_replaced`: a process that is gone has another in its place after a while; else it is given up at once."""
        self._connections = Connections(connect)
        self._patience_s = patience_s
        self._is_replaced = is_replaced
        self._dead: dict[int, ServerDiedError] = {}  # whose process has ended, and with it what it held

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

        Raises CommunicationError if no server answers in time, or what `refusal` makes of it if the server refuses.
        """
        deadline = 0.0
        while True:
            connection: Connection | None = None
            try:
                connection = self.connection(server)
                reach("client.call", of=message)
                if loses_message():  # the request
                    time.sleep(_RETRY_S)
                    continue
                result = connection.call(message, buffers, receive=receive, reply_bytes=reply_bytes)
                reach("client.answered", of=message)
                if loses_message():  # the reply
                    continue
                return result
            except WireError:  # the message itself: no other attempt would do better
                raise
            except CommunicationError as error:
                if isinstance(error, RefusedError) and error.reason == "reply-too-large":
                    reply_bytes = max(2 * reply_bytes, 1 << 20)
                    continue
                if isinstance(error, RefusedError) and error.reason != UNAVAILABLE:
                    raise self.refusal(error) from error
                deadline = deadline or time.monotonic() + self._patience_s
                self._connections.drop(server, connection)
                if self._is_final(server, error) or time.monotonic() > deadline:
                    raise self.gone(server, error) from error
                log.info("%s: %s; trying again", describe_server(server), error)
                time.sleep(_RETRY_S)

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
                    raise self.refusal(error) from error
                except CommunicationError:
                    self._connections.drop(task.server, connection)
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

    def connection(self, server: int) -> Connection:
        """Return the connection to a server. Raises CommunicationError if there is none and none can be made."""
        if server in self._dead:
            raise self._dead[server]
        return self._connections.get(server)

    def close(self) -> None:
        for connection in self._connections.take_all():
            self.leave(connection)
            connection.close()

    def leave(self, connection: Connection) -> None:
        """Do what is to be done before a connection is closed."""

    def refusal(self, error: RefusedError) -> Exception:
        """Return what is raised where a server refuses."""
        return error

    def gone(self, server: int, error: CommunicationError) -> CommunicationError:
        """Return what is raised where a server does not answer any more."""
        return error

    def _is_final(self, server: int, error: CommunicationError) -> bool:
        """Whether nobody will answer however long one waits."""
        if self._is_replaced:
            return False
        if isinstance(error, ServerDiedError):
            self._dead[server] = error
        # Whoever is silent for the failure timeout has had its time.
        return server in self._dead or isinstance(error, ServerFrozenError)

    def _again(self, task: Task) -> None:
        self.call(task.server, task.message, task.parcel, receive=task.receive, reply_bytes=task.reply_bytes)

    def _finish(self, task: Task, pending: Pending, failed: list[Task]) -> None:
        try:
            pending.finish(task.receive)
        except CommunicationError as error:
            if isinstance(error, RefusedError) and error.reason not in (UNAVAILABLE, "reply-too-large"):
                raise self.refusal(error) from error
            if isinstance(error, ServerFrozenError) and not self._is_replaced:
                raise self.gone(task.server, error) from error
            failed.append(task)


class MappedValues:
    """The memory of one server's values, where it is on this host: mapped once the server has said where it is."""

    def __init__(self, calls: ServerCalls, server: int, num_bytes: int) -> None:
        self._calls, self._server, self._num_bytes = calls, server, num_bytes
        self._can_map = num_bytes >= SMALLEST_BYTES
        self.view: ValuesView | None = None  # of the process that answered last; a call reads in the view it has named

    def number(self, view: ValuesView | None) -> int:
        """Return what a call says that is to be answered by a stamp in `view`: 0 to be told of memory, -1 for none."""
        if view is not None:
            return view.number
        if not self._can_map:
            return -1
        try:
            return 0 if self._calls.connection(self._server).is_shared else -1
        except CommunicationError:
            return -1  # the call that follows waits for the server

    def map(self, place: Memory | None) -> None:
        """Map what the server that answers now has, to read it there from now on."""
        if place is None or (self.view is not None and self.view.number == place.number):
            return
        try:
            self.view = ValuesView(place, self._num_bytes)
        except CommunicationError as error:
            self.view, self._can_map = None, False
            log.info("values of %s are not read in shared memory: %s", describe_server(self._server), error)


class StoreCalls(ServerCalls):
    """Calls of a client of a store, to its servers and its directory; refusals are StoreErrors."""

    def ask(self, message: Message) -> Any:
        """Make a call to the directory, as `call` does."""
        return self.call(DIRECTORY, message)

    def piece_bytes(self, cuts: Sequence[Cut]) -> int:
        """Return in how large pieces an array with these parts should travel."""
        try:
            is_shared = all(self.connection(cut.server).is_shared for cut in cuts)
        except CommunicationError:
            if not self._is_replaced:
                raise
            is_shared = False
        return PIECE_BYTES if is_shared else CHANNEL_PIECE_BYTES

    def leave(self, connection: Connection) -> None:
        with contextlib.suppress(CommunicationError):
            connection.call(Bye(), timeout_s=1.0)

    def refusal(self, error: RefusedError) -> Exception:
        return as_store_error(error)

    def gone(self, server: int, error: CommunicationError) -> CommunicationError:
        if isinstance(error, DirectoryGoneError):
            return error
        return CommunicationError(f"{describe_server(server)} of the store is gone: {error}")

    def _is_final(self, server: int, error: CommunicationError) -> bool:
        asked = error.__cause__ if isinstance(error, DirectoryGoneError) else error if server == DIRECTORY else None
        if isinstance(asked, (ServerDiedError, ServerFrozenError)):
            return True  # nobody takes the place of the directory
        return super()._is_final(server, error)


class DirectoryGoneError(CommunicationError):
    """The directory of a store could not be asked which process serves."""


class Task(NamedTuple):
    """One call of several."""

    server: int
    message: Message
    parcel: Sequence[Any]
    receive: Callable[[Message, tuple[Buffer, ...]], Any]
    reply_bytes: int


def describe_server(server: int) -> str:
    return "the directory" if server == DIRECTORY else f"server {server}"


def as_store_error(error: RefusedError) -> StoreError:
    return StoreError(error.detail if error.reason == "failed" else str(error))
