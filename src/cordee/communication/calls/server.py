"""The server's end of calls: hears lanes and the channel, and hands each request to one service.

Two threads: `run` serves the lanes, one beside it the channel. A service is called by one of them at a time. It
answers a call at once or keeps it and answers later; until then the buffers of the request stay as they are.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from cordee.communication.buffers import Buffer, WireError, outgoing
from cordee.communication.calls.messages import (
    CONNECTION,
    UNAVAILABLE,
    Greeting,
    HostCard,
    LaneOpened,
    OpenLane,
    Ping,
    Pong,
)
from cordee.communication.calls.shm_channel import (
    FIRST_SLOT,
    LIFE,
    MAX_LANES,
    REPLY_STAMP,
    Lane,
    RequestBoard,
    wake_client,
)
from cordee.communication.channel import Received, ServerChannel
from cordee.communication.endpoint import Speaker
from cordee.communication.keys import ServerKeys
from cordee.communication.messages import Message, Refused
from cordee.communication.shared_memory.futex import Patience
from cordee.communication.shared_memory.hosts import own_host_id
from cordee.communication.shared_memory.liveness import HEARTBEAT, read_stat
from cordee.communication.shared_memory.registration import BackendSettings
from cordee.communication.shared_memory.segment import Address, attach_segment
from cordee.communication.wire import Codec, Limits
from cordee.core.errors import CommunicationError, CordeeError

log = logging.getLogger(__name__)

_SPIN_S = 5e-6  # looking again costs less than sleeping for as long as a client needs between two calls
_YIELD_S = 0.0005
_NAP_S, _IDLE_NAP_S = 0.004, 0.05  # a wake-up that is missed costs this much; idle: nothing came for a second
_CENSUS_S = 0.5  # how often lanes are looked through for clients that died


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


class _ServedLane:
    def __init__(self, lane: Lane, slot: int, caller: str, incarnation: int, pid: int) -> None:
        self.lane, self.slot, self.caller, self.incarnation, self.pid = lane, slot, caller, incarnation, pid
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
        curve: bool = True,
        shared_memory: bool = True,
        public: str = "",
    ) -> None:
        """With `public` it listens there as well, for clients of other hosts."""
        self._codec = Codec([*CONNECTION, *messages], limits)
        self._channel = ServerChannel(address, speaker, self._codec, keys, curve=curve, public=public)
        self.address, self.public = self._channel.address, self._channel.public
        self._handle = handle
        self._porch, porch_address = RequestBoard.create()
        settings = BackendSettings(shared_memory=shared_memory)
        self._card = HostCard(
            own_host_id(settings, os.getpid()),
            porch_address.pid,
            porch_address.fd,
            porch_address.num_bytes,
            read_stat(os.getpid()).started,
        )
        self._porch_fd = porch_address.fd
        self.lock = threading.RLock()
        """Held while the service handles a call; take it to look at the service from another thread."""
        self._lanes: list[_ServedLane | None] = []
        self._fenced: dict[str, int] = {}
        self._is_closing = False
        self._has_lanes = threading.Event()
        self._beat = HEARTBEAT.add(self._porch.words, LIFE, 0.5)
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
        idle_since = census_at = time.monotonic()
        while not is_over():
            if not self._has_lanes.is_set():
                self._has_lanes.wait(_IDLE_NAP_S)
                continue
            if self.serve_lanes():
                idle_since = time.monotonic()
                continue
            now = time.monotonic()
            idle_s = now - idle_since
            if idle_s < _SPIN_S:
                continue
            if idle_s < _YIELD_S and patience.yields(now):
                continue
            if now - census_at > _CENSUS_S:
                census_at = now
                self._take_census()
            self._porch.sleep(self._has_request, _NAP_S if idle_s < 1.0 else _IDLE_NAP_S)

    def serve_lanes(self) -> bool:
        """Handle the requests that are there; return whether there was one."""
        words, found = self._porch.words, False
        for served in self._lanes:
            if served is not None and words[FIRST_SLOT + served.slot] != served.stamp:
                found = True
                self._serve_lane(served, words[FIRST_SLOT + served.slot])
        return found

    def close(self) -> None:
        self._is_closing = True
        self._channel.close()
        if self._thread is not None:
            self._thread.join(timeout=2.0)
        HEARTBEAT.remove(self._beat)
        with contextlib.suppress(OSError):
            os.close(self._porch_fd)

    def __enter__(self) -> CallServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _has_request(self) -> bool:
        words = self._porch.words
        return any(served is not None and words[FIRST_SLOT + served.slot] != served.stamp for served in self._lanes)

    def _serve_lane(self, served: _ServedLane, stamp: int) -> None:
        served.stamp = stamp
        if stamp < 0:  # the client is done with it
            self._drop(served)
            return
        lane = served.lane

        def send(message: Message, buffers: Sequence[Any]) -> None:
            payload = self._codec.encode_message(message)
            try:
                lane.write(bytes(payload), outgoing(buffers))
            except WireError as error:
                lane.write(bytes(self._codec.encode_message(Refused("reply-too-large", str(error)))), outgoing(()))
            lane.words[REPLY_STAMP] = stamp
            wake_client(lane)

        try:
            payload, buffers = lane.read()
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
                call.reply(self._card)
            case Ping():
                call.reply(Pong())
            case OpenLane():
                self._open_lane(call, received.message)
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

    def _open_lane(self, call: Call, asked: OpenLane) -> None:
        if asked.num_bytes > self._codec.limits.max_frame_bytes * 2 + (1 << 22):
            call.refuse("malformed", f"a lane of {asked.num_bytes} bytes is larger than two of the largest messages")
            return
        try:
            lane = Lane(attach_segment(Address(asked.pid, asked.fd, asked.num_bytes)), is_client=False)
        except (CommunicationError, OSError) as error:
            call.refuse("no-shared-memory", str(error))
            return
        with self.lock:
            slot = next((at for at, lane in enumerate(self._lanes) if lane is None), len(self._lanes))
            if slot >= MAX_LANES:
                call.refuse("too-many-lanes", f"this server has {MAX_LANES} lanes open")
                return
            self._porch.words[FIRST_SLOT + slot] = 0
            served = _ServedLane(lane, slot, call.caller, call.incarnation, asked.pid)
            if slot == len(self._lanes):
                self._lanes.append(served)
            else:
                self._lanes[slot] = served
        self._has_lanes.set()
        call.reply(LaneOpened(slot))

    def _take_census(self) -> None:
        for served in list(self._lanes):
            if served is not None and served.has_ended():
                self._drop(served)

    def _drop(self, served: _ServedLane) -> None:
        with self.lock:
            self._lanes[served.slot] = None
            if not any(self._lanes):
                self._has_lanes.clear()
