"""The server's end of calls: listens to shared-memory channels and the channel, and hands each request to one service.

Two threads: `run` serves the shared-memory channels, one beside it the ZeroMQ channel. A service is called by one of
them at a time. It answers a call at once or keeps it and answers later; until then the buffers of the request stay as
they are.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from cordee.communication.calls.shm_channel import (
    CLIENT_FUTEX,
    CONNECTION,
    FIRST_SLOT,
    LIFE,
    MAX_CHANNELS,
    REPLY_STAMP,
    SERVER_FUTEX,
    UNAVAILABLE,
    Greeting,
    HostInfo,
    OpenShmChannel,
    Ping,
    Pong,
    RequestBoard,
    ShmChannel,
    ShmChannelOpened,
    sleep,
    wake,
)
from cordee.communication.channel import Received, ServerChannel
from cordee.communication.endpoint import Speaker
from cordee.communication.keys import ServerKeys
from cordee.communication.messages import Message, Refused
from cordee.communication.shared_memory.futex import Patience
from cordee.communication.shared_memory.liveness import HEARTBEAT, counter, read_stat
from cordee.communication.shared_memory.registration import BackendSettings
from cordee.communication.shared_memory.segment import Address, attach_segment
from cordee.communication.this_host import own_host_id
from cordee.communication.wire import Buffer, Codec, Limits, WireError, outgoing
from cordee.core.errors import CommunicationError, CordeeError

log = logging.getLogger(__name__)

_SPIN_S = 5e-6  # looking again costs less than sleeping for as long as a client needs between two calls
_YIELD_S = 0.0005
_NAP_S, _IDLE_NAP_S = 0.004, 0.05  # a wake-up that is missed costs this much; idle: nothing came for a second
_LIVENESS_CHECK_S = 0.5  # how often shared-memory channels are looked through for clients that died


class UnavailableError(CommunicationError):
    """A service cannot answer now: the caller is to find out where the service is, and to try again."""


class Call:
    """One request: who makes it, what it says, and the way to answer it. Must be answered exactly once."""

    __slots__ = ("_send", "buffers", "caller", "incarnation", "message")

    def __init__(
        self,
        caller: str,
        incarnation: int,
        message: Message,
        buffers: tuple[Buffer, ...],
        send: Callable[[Message, Sequence[Any]], None],
    ) -> None:
        self.caller = caller
        self.incarnation = incarnation
        self.message = message
        self.buffers = buffers
        self._send = send

    def reply(self, message: Message, buffers: Sequence[Any] = ()) -> None:
        """Answer. A client that is gone does not hear it, which is not an error here."""
        try:
            self._send(message, buffers)
        except CommunicationError as error:
            log.debug("the reply to %s was not delivered: %s", self.caller, error)

    def refuse(self, reason: str, detail: str = "") -> None:
        self.reply(Refused(reason, detail))


class _ServerShmChannel:
    def __init__(self, shm_channel: ShmChannel, slot: int, caller: str, incarnation: int, pid: int) -> None:
        self.end, self.slot, self.caller, self.incarnation, self.pid = shm_channel, slot, caller, incarnation, pid
        self.started = read_stat(pid).started
        self.stamp = 0

    def has_ended(self) -> bool:
        try:
            return read_stat(self.pid).started != self.started
        except OSError:
            return True


class CallServer:
    """Serves calls of the `messages` of one service at an address. `handle` answers each `Call`."""

    def __init__(
        self,
        address: str,
        speaker: Speaker,
        messages: Sequence[type[Message]],
        keys: ServerKeys | None,
        handle: Callable[[Call], None],
        *,
        limits: Limits | None = None,
        public: str = "",
    ) -> None:
        """With `public` it listens there as well, for clients of other hosts."""
        self._codec = Codec([*CONNECTION, *messages], limits)
        self._channel = ServerChannel(address, speaker, self._codec, keys, public=public)
        self.address, self.public = self._channel.address, self._channel.public
        self._handle = handle
        self._board, board_address = RequestBoard.create()
        self._info = HostInfo(
            own_host_id(BackendSettings(), os.getpid()),
            board_address.pid,
            board_address.fd,
            board_address.num_bytes,
            read_stat(os.getpid()).started,
        )
        self._board_fd = board_address.fd
        self.lock = threading.RLock()
        """Held while the service handles a call; take it to look at the service from another thread."""
        self._shm_channels: list[_ServerShmChannel | None] = []
        self._fenced: dict[str, int] = {}
        self._is_closing = False
        self._has_shm_channels = threading.Event()
        self._beat = HEARTBEAT.add(counter(self._board.words, LIFE), 0.5)
        self._thread: threading.Thread | None = None

    def fence(self, caller: str, incarnation: int) -> None:
        """Refuse every call of this incarnation of the caller, and of earlier ones, from now on."""
        with self.lock:
            self._fenced[caller] = max(self._fenced.get(caller, -1), incarnation)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Serve until `is_over()`, which is asked every few milliseconds."""
        self._thread = threading.Thread(target=self._serve_channel, name="cordee-calls", daemon=True)
        self._thread.start()
        patience = Patience()
        idle_since = checked_at = time.monotonic()
        while not is_over():
            if not self._has_shm_channels.is_set():
                self._has_shm_channels.wait(_IDLE_NAP_S)
                continue
            if self.serve_shm_channels():
                idle_since = time.monotonic()
                continue
            now = time.monotonic()
            idle_s = now - idle_since
            if idle_s < _SPIN_S:
                continue
            if idle_s < _YIELD_S and patience.yields(now):
                continue
            if now - checked_at > _LIVENESS_CHECK_S:
                checked_at = now
                self._drop_dead_clients()
            sleep(self._board, SERVER_FUTEX, self._has_request, _NAP_S if idle_s < 1.0 else _IDLE_NAP_S)

    def serve_shm_channels(self) -> bool:
        """Handle the requests that are there; return whether there was one."""
        words, found = self._board.words, False
        for served in self._shm_channels:
            if served is not None and words[FIRST_SLOT + served.slot] != served.stamp:
                found = True
                self._serve_shm_channel(served, words[FIRST_SLOT + served.slot])
        return found

    def close(self) -> None:
        self._is_closing = True
        self._channel.close()
        if self._thread is not None:
            self._thread.join(timeout=2.0)
        HEARTBEAT.remove(self._beat)
        with contextlib.suppress(OSError):
            os.close(self._board_fd)

    def __enter__(self) -> CallServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _has_request(self) -> bool:
        words = self._board.words
        return any(
            served is not None and words[FIRST_SLOT + served.slot] != served.stamp for served in self._shm_channels
        )

    def _serve_shm_channel(self, served: _ServerShmChannel, stamp: int) -> None:
        served.stamp = stamp
        if stamp < 0:  # the client is done with it
            self._drop(served)
            return
        shm_channel = served.end

        def send(message: Message, buffers: Sequence[Any]) -> None:
            payload = self._codec.encode_payload(message)
            try:
                shm_channel.write(payload, outgoing(buffers))
            except WireError as error:
                refused = Refused("reply-too-large", str(error))
                shm_channel.write(self._codec.encode_payload(refused), outgoing(()))
            shm_channel.words[REPLY_STAMP] = stamp
            wake(shm_channel, CLIENT_FUTEX)

        try:
            payload, buffers = shm_channel.read()
            message = self._codec.decode_payload(payload, served.caller)
        except WireError as error:
            log.warning("%s sent what is no request: %s", served.caller, error)
            send(Refused("malformed", str(error)), ())
            return
        self._dispatch(Call(served.caller, served.incarnation, message, buffers, send))

    def _serve_channel(self) -> None:
        while not self._is_closing:
            try:
                received = self._channel.receive(0.25)
            except CommunicationError:  # closed, in the end
                return
            if received is not None:
                self._take(received)

    def _take(self, received: Received) -> None:
        def send(message: Message, buffers: Sequence[Any]) -> None:
            self._channel.reply(received, message, buffers, timeout_s=1.0)

        envelope = received.envelope
        caller = envelope.sender.partition("/")[0]
        call = Call(caller, envelope.incarnation, received.message, received.buffers, send)
        match received.message:
            case Greeting():
                call.reply(self._info)
            case Ping():
                call.reply(Pong())
            case OpenShmChannel():
                self._open_shm_channel(call, received.message)
            case _:
                self._dispatch(call)

    def _dispatch(self, call: Call) -> None:
        with self.lock:
            if call.incarnation <= self._fenced.get(call.caller, -1):
                call.refuse("fenced", f"{call.caller} was given up; it may join again under a new incarnation")
                return
            try:
                self._handle(call)
            except UnavailableError as error:
                call.refuse(UNAVAILABLE, str(error))
            except CordeeError as error:
                call.refuse("failed", str(error))
            except Exception as error:
                log.exception("%s of %s failed", type(call.message).__name__, call.caller)
                call.refuse("failed", f"{type(error).__name__}: {error}")

    def _open_shm_channel(self, call: Call, asked: OpenShmChannel) -> None:
        if asked.num_bytes > self._codec.limits.max_frame_bytes * 2 + (1 << 22):
            call.refuse(
                "malformed",
                f"a shared-memory channel of {asked.num_bytes} bytes is larger than two of the largest messages",
            )
            return
        try:
            shm_channel = ShmChannel(attach_segment(Address(asked.pid, asked.fd, asked.num_bytes)), is_client=False)
        except (CommunicationError, OSError) as error:
            call.refuse("no-shared-memory", str(error))
            return
        with self.lock:
            slot = next(
                (at for at, shm_channel in enumerate(self._shm_channels) if shm_channel is None),
                len(self._shm_channels),
            )
            if slot >= MAX_CHANNELS:
                call.refuse(
                    "too-many-shared-memory channels", f"this server has {MAX_CHANNELS} shared-memory channels open"
                )
                return
            self._board.words[FIRST_SLOT + slot] = 0
            served = _ServerShmChannel(shm_channel, slot, call.caller, call.incarnation, asked.pid)
            if slot == len(self._shm_channels):
                self._shm_channels.append(served)
            else:
                self._shm_channels[slot] = served
        self._has_shm_channels.set()
        call.reply(ShmChannelOpened(slot))

    def _drop_dead_clients(self) -> None:
        for served in list(self._shm_channels):
            if served is not None and served.has_ended():
                self._drop(served)

    def _drop(self, served: _ServerShmChannel) -> None:
        with self.lock:
            self._shm_channels[served.slot] = None
            if not any(self._shm_channels):
                self._has_shm_channels.clear()
