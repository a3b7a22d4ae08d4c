"""Calls to the servers of a store: several under way at once, and again after a lost connection."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cordee.communication.buffers import Buffer, WireError
from cordee.communication.calls import Connection, Connections, Pending, ServerDiedError, ServerFrozenError
from cordee.communication.channel import RefusedError
from cordee.communication.messages import Message
from cordee.core.errors import CommunicationError, StoreError
from cordee.parameters.messages import Bye, Cut
from cordee.parameters.shared_values import BLOCK_BYTES

log = logging.getLogger(__name__)

PIECE_BYTES = BLOCK_BYTES  # through shared memory
FAR_PIECE_BYTES = 1 << 18  # through channels, where encrypting takes most of the time, at both ends at once
DIRECTORY = -1  # in the place of a server's number
WINDOW = 4  # calls under way at each server
_RETRY_S = 0.05


class StoreCalls:
    """Calls to the servers of a store. Any thread may call."""

    def __init__(self, connect: Callable[[int], Connection], failure_timeout_s: float) -> None:
        self._connections = Connections(connect)
        self._timeout_s = failure_timeout_s
        self._dead: dict[int, ServerDiedError] = {}  # servers of this host whose process has ended: with their values

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
                self._connections.drop(server, connection)
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

    def close(self) -> None:
        """Say goodbye to all servers that were called, and close the connections."""
        for connection in self._connections.take_all():
            with contextlib.suppress(CommunicationError):
                connection.call(Bye(), timeout_s=1.0)
            connection.close()

    def connection(self, server: int) -> Connection:
        """Return the connection to a server. Raises CommunicationError if there is none and none can be made."""
        if server in self._dead:
            raise self._dead[server]
        return self._connections.get(server)

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


class Task(NamedTuple):
    """One call of several."""

    server: int
    message: Message
    parcel: Sequence[Any]
    receive: Callable[[Message, tuple[Buffer, ...]], Any]
    reply_bytes: int


def gone(server: int, error: CommunicationError) -> CommunicationError:
    return CommunicationError(f"{_describe_server(server)} of the store is gone: {error}")


def _describe_server(server: int) -> str:
    return "the directory" if server == DIRECTORY else f"server {server}"


def as_store_error(error: RefusedError) -> StoreError:
    return StoreError(error.detail if error.reason == "failed" else str(error))
