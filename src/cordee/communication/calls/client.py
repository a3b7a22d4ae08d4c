"""The client's end of calls: a connection to one server.

A call takes a channel for itself, of shared memory where the server is on this host and of ZeroMQ otherwise, so that
one call may wait long at the server while others go through. Channels are opened as needed and kept.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from cordee.communication.calls.shm_channel import (
    CLIENT_FUTEX,
    CONNECTION,
    DATA_AT,
    LIFE,
    REPLY_STAMP,
    Greeting,
    HostInfo,
    OpenShmChannel,
    Ping,
    RequestBoard,
    ShmChannel,
    ShmChannelOpened,
    sleep,
)
from cordee.communication.channel import Asked, ClientChannel, RefusedError
from cordee.communication.endpoint import Speaker
from cordee.communication.keys import ClientKeys
from cordee.communication.messages import Message, Refused
from cordee.communication.shared_memory.futex import Patience
from cordee.communication.shared_memory.liveness import Silence, open_process
from cordee.communication.shared_memory.registration import BackendSettings
from cordee.communication.shared_memory.segment import Address, create_segment
from cordee.communication.this_host import own_host_id
from cordee.communication.wire import Buffer, Codec, Limits, outgoing
from cordee.core.errors import CommunicationError

log = logging.getLogger(__name__)

Receive = Callable[[Message, tuple[Buffer, ...]], Any]

# At about 70 ns each; then the core is yielded. On a busy 2-core machine 300 took 0.19 ms for 1 KB, 60 took 0.12.
_SPINS = 60
_YIELD_S = 0.0005
_NAP_S, _LONG_NAP_S = 0.004, 0.02
_SMALLEST_CHANNEL_BYTES = 1 << 16


def _message_only(message: Message, buffers: tuple[Buffer, ...]) -> Message:
    return message


class Pending:
    """A request that is under way. Exactly one of `finish` and `abandon` must be called; the latter needs no reply."""

    __slots__ = ("_finish", "abandon")

    def __init__(self, finish: Callable[[Receive, float | None], Any], abandon: Callable[[], None]) -> None:
        self._finish, self.abandon = finish, abandon

    def finish(self, receive: Receive = _message_only, *, timeout_s: float | None = None) -> Any:
        """Wait for the reply and return what `receive` makes of it, as `Connection.call` does."""
        return self._finish(receive, timeout_s)


class ServerDiedError(CommunicationError):
    """The process of a server on this host has ended, and so has what it held."""


class ServerFrozenError(CommunicationError):
    """A server on this host has shown no sign of life for the failure timeout."""


class Connection:
    """Calls to one server. Safe to use from several threads; each call blocks its own."""

    def __init__(
        self,
        address: str,
        speaker: Speaker,
        messages: Sequence[type[Message]],
        keys: ClientKeys | None,
        *,
        failure_timeout_s: float,
        connect_timeout_s: float | None = None,
        limits: Limits | None = None,
        shared_memory: bool = True,
    ) -> None:
        """Connect. Raises CommunicationError if the server does not answer within `connect_timeout_s`.

        Without it: `failure_timeout_s`, which is for everything that follows.
        """
        self.address = address
        self._speaker = speaker
        self._keys = keys
        self._timeout_s = failure_timeout_s
        self._codec = Codec([*CONNECTION, *messages], limits)
        self._patience = Patience()
        self._lock = threading.Lock()
        self._control_lock = threading.Lock()
        # A server takes a second connection of the same speaker, opened when the first was lost, for a replay of it.
        self._token = secrets.token_hex(4)
        self._num_channels = 0
        self._free: list[_ClientShmChannel] = []
        self._free_channels: list[ClientChannel] = []
        self._is_closed = False
        self._board: RequestBoard | None = None
        self._watch: _ServerWatch | None = None
        self._control = self._open_channel()
        try:
            limit_s = failure_timeout_s if connect_timeout_s is None else connect_timeout_s
            info = self._control.request(Greeting(), timeout_s=limit_s).message
            assert isinstance(info, HostInfo)
            settings = BackendSettings(shared_memory=shared_memory)
            if info.host_id == own_host_id(settings, os.getpid()):
                self._board = RequestBoard.attach(Address(info.board_pid, info.board_fd, info.board_bytes))
                self._watch = _ServerWatch(address, info, self._board, failure_timeout_s)
        except BaseException:
            self._control.close(0)
            raise

    @property
    def is_shared(self) -> bool:
        """Whether calls go through shared memory."""
        return self._board is not None

    def call(
        self,
        message: Message,
        buffers: Sequence[Any] = (),
        *,
        receive: Receive = _message_only,
        reply_bytes: int = 0,
        timeout_s: float | None = None,
    ) -> Any:
        """Make a request and return what `receive` makes of the reply; the reply's buffers live only inside it.

        `reply_bytes` is how much the buffers of the reply may take. Without `timeout_s` it waits as long as the
        server lives. Raises RefusedError if the server refuses, CommunicationError if it dies, freezes or is late.
        """
        if self._board is None:
            return self._begin_channel(message, buffers).finish(receive, timeout_s=timeout_s)
        shm_channel = self._begin_shm(message, buffers, reply_bytes)
        return self._finish_shm(shm_channel, receive, timeout_s)

    def begin(self, message: Message, buffers: Sequence[Any] = (), *, reply_bytes: int = 0) -> Pending:
        """Make a request without waiting for the reply, which `finish` of the result returns; several may be under way.

        The buffers may change as soon as it returns.
        """
        if self._board is None:
            return self._begin_channel(message, buffers)
        shm_channel = self._begin_shm(message, buffers, reply_bytes)
        return Pending(partial(self._finish_shm, shm_channel), partial(shm_channel.close, self._board))

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            shm_channels, self._free = self._free, []
            channels, self._free_channels = self._free_channels, []
        if self._board is not None:
            for shm_channel in shm_channels:
                shm_channel.close(self._board)
        if self._watch is not None:
            self._watch.close()
        for channel in [self._control, *channels]:
            channel.close(0)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin_channel(self, message: Message, buffers: Sequence[Any]) -> Pending:
        with self._lock:
            self._refuse_closed()
            channel = self._free_channels.pop() if self._free_channels else None
        if channel is None:
            channel = self._open_channel()
        try:
            asked = channel.begin(message, buffers, timeout_s=self._timeout_s)
        except BaseException:
            channel.close(0)
            raise
        return Pending(partial(self._finish_channel, channel, asked), partial(channel.close, 0))

    def _begin_shm(self, message: Message, buffers: Sequence[Any], reply_bytes: int) -> _ClientShmChannel:
        assert self._board is not None
        parcel = outgoing(buffers)
        payload = self._codec.encode_payload(message)
        shm_channel = self._take_shm_channel(max(parcel.extent, reply_bytes))
        try:
            shm_channel.end.write(payload, parcel)
        except BaseException:
            shm_channel.close(self._board)
            raise
        shm_channel.show(self._board)
        return shm_channel

    def _finish_shm(self, shm_channel: _ClientShmChannel, receive: Receive, timeout_s: float | None) -> Any:
        assert self._board is not None and self._watch is not None
        try:
            shm_channel.wait(self._watch, self._patience, timeout_s)
            raw, answers = shm_channel.end.read()
            reply = self._codec.decode_payload(raw, self.address)
            if type(reply) is Refused:
                raise RefusedError(self.address, reply)
            result = receive(reply, answers)
        except RefusedError:
            self._give_back(shm_channel)
            raise
        except BaseException:  # the reply may still come: nobody else may use this shared-memory channel
            shm_channel.close(self._board)
            raise
        self._give_back(shm_channel)
        return result

    def _finish_channel(self, channel: ClientChannel, asked: Asked, receive: Receive, timeout_s: float | None) -> Any:
        try:
            received = channel.finish(
                asked,
                timeout_s=self._timeout_s if timeout_s is None else timeout_s,
                wait_on=self._ping if timeout_s is None else lambda: False,
            )
            result = receive(received.message, received.buffers)
        except RefusedError:
            self._give_channel_back(channel)
            raise
        except BaseException:
            channel.close(0)
            raise
        self._give_channel_back(channel)
        return result

    def _ping(self) -> bool:
        """Whether the server lives; raises CommunicationError if it does not."""
        with self._control_lock:
            self._control.request(Ping(), timeout_s=self._timeout_s)
        return True

    def _open_channel(self) -> ClientChannel:
        with self._lock:
            number = self._num_channels
            self._num_channels += 1
        name = f"{self._speaker.name}/{self._token}-{number}"
        speaker = Speaker(run=self._speaker.run, name=name, incarnation=self._speaker.incarnation)
        return ClientChannel(self.address, speaker, self._codec, self._keys)

    def _give_channel_back(self, channel: ClientChannel) -> None:
        with self._lock:
            if not self._is_closed:
                self._free_channels.append(channel)
                return
        channel.close(0)

    def _take_shm_channel(self, needed: int) -> _ClientShmChannel:
        with self._lock:
            self._refuse_closed()
            if self._free and self._free[-1].end.capacity >= needed:
                return self._free.pop()
            fitting = [shm_channel for shm_channel in self._free if shm_channel.end.capacity >= needed]
            if fitting:
                shm_channel = min(fitting, key=lambda shm_channel: shm_channel.end.capacity)
                self._free.remove(shm_channel)
                return shm_channel
            small = self._free.pop() if self._free else None
        if small is not None:  # grows: a shared-memory channel is kept for the sizes that are in use
            assert self._board is not None
            small.close(self._board)
        return self._open_shm_channel(max(needed, _SMALLEST_CHANNEL_BYTES))

    def _open_shm_channel(self, capacity: int) -> _ClientShmChannel:
        assert self._watch is not None
        # A server that died would not answer, which takes until the timeout to notice.
        self._watch.check(time.monotonic())
        num_bytes = -(-(DATA_AT + capacity) // 4096) * 4096
        segment, fd = create_segment(num_bytes, f"calls to {self.address}")
        try:
            with self._control_lock:
                opened = self._control.request(
                    OpenShmChannel(os.getpid(), fd, num_bytes), timeout_s=self._timeout_s
                ).message
        finally:
            os.close(fd)
        assert isinstance(opened, ShmChannelOpened)
        return _ClientShmChannel(ShmChannel(segment, is_client=True), opened.slot)

    def _give_back(self, shm_channel: _ClientShmChannel) -> None:
        with self._lock:
            if not self._is_closed:
                self._free.append(shm_channel)
                return
        assert self._board is not None
        shm_channel.close(self._board)

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise CommunicationError(f"the connection to {self.address} is closed")


class _ClientShmChannel:
    """A shared-memory channel of the client, and how far it is."""

    def __init__(self, shm_channel: ShmChannel, slot: int) -> None:
        self.end, self.slot, self.stamp = shm_channel, slot, 0

    def show(self, board: RequestBoard) -> None:
        """Notify the server of the request that was written."""
        self.stamp += 1
        board.call(self.slot, self.stamp)

    def wait(self, watch: _ServerWatch, patience: Patience, timeout_s: float | None) -> None:
        """Wait for the reply."""
        stamp, words = self.stamp, self.end.words
        for _ in range(_SPINS):
            if words[REPLY_STAMP] >= stamp:
                return
        started = now = time.monotonic()
        while words[REPLY_STAMP] < stamp:
            waited_s = now - started
            if waited_s >= _YIELD_S or not patience.yields(now):
                watch.check(now)
                if timeout_s is not None and waited_s > timeout_s:
                    raise CommunicationError(f"no reply from the server at {watch.address} within {timeout_s:g} s")
                nap_s = _NAP_S if waited_s < 0.1 else _LONG_NAP_S
                sleep(self.end, CLIENT_FUTEX, lambda: words[REPLY_STAMP] >= stamp, nap_s)
            now = time.monotonic()

    def close(self, board: RequestBoard) -> None:
        self.stamp = -1
        board.call(self.slot, -1)


class _ServerWatch:
    """Whether the server on this host lives."""

    def __init__(self, address: str, info: HostInfo, board: RequestBoard, failure_timeout_s: float) -> None:
        self.address = address
        self._pid, self._words = info.board_pid, board.words
        self._limit_s = failure_timeout_s
        self._is_closed = False
        self._silence = Silence()
        self._lock = threading.Lock()
        pidfd = open_process(self._pid, info.started)
        if pidfd is None:
            raise ServerDiedError(f"the server at {address} (process {self._pid}) died")
        self._pidfd = pidfd
        self._poll = select.poll()
        self._poll.register(pidfd, select.POLLIN)

    def check(self, now: float) -> None:
        """Raise CommunicationError if the server died or froze, or is not watched any more."""
        with self._lock:
            if self._is_closed:  # by another thread, which may have noticed that the server died
                raise CommunicationError(f"the connection to {self.address} was closed while a reply was awaited")
            if self._poll.poll(0):
                raise ServerDiedError(f"the server at {self.address} (process {self._pid}) died")
            silent_s, state = self._silence.sample(self._pid, self._words[LIFE], now)
        if silent_s >= self._limit_s:
            raise ServerFrozenError(
                f"the server at {self.address} (process {self._pid}) is frozen: no sign of life for {silent_s:.1f} s, "
                f"process state {state}"
            )

    def close(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._pidfd)


# Connections to several servers: one to each, made when it is first needed, and again after it was dropped.


class Connections:
    """By the numbers of the servers. Any thread may ask; `connect` is called by one at a time, and may raise."""

    def __init__(self, connect: Callable[[int], Connection]) -> None:
        self._connect = connect
        self._connections: dict[int, Connection] = {}
        self._lock = threading.Lock()

    def get(self, server: int) -> Connection:
        """Return the connection to a server. Raises what `connect` does where there is none yet."""
        connection = self._connections.get(server)
        if connection is not None:
            return connection
        with self._lock:
            if server not in self._connections:
                self._connections[server] = self._connect(server)
            return self._connections[server]

    def drop(self, server: int, connection: Connection | None) -> None:
        """Close a connection that failed, unless another thread has done so and there is a newer one."""
        with self._lock:
            if connection is None or self._connections.get(server) is not connection:
                return
            del self._connections[server]
        connection.close()

    def take_all(self) -> list[Connection]:
        """Return all connections, for the caller to close."""
        with self._lock:
            connections, self._connections = list(self._connections.values()), {}
        return connections
