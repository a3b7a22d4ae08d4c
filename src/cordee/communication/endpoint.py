"""What both ends of a channel share: one socket, its lock, deadlines, an orderly end, and which messages are admitted.

A ZeroMQ socket may be used by one thread at a time. Here every use is under a lock that is never held while
waiting: waits poll the socket's file descriptor outside of it. That descriptor signals only *changes*, and any
use of the socket takes the signal away, so a sender that finds something to receive passes the signal on to
the thread that waits for it, through an eventfd.
"""

from __future__ import annotations

import enum
import os
import select
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Self

import msgspec
import zmq

from cordee.communication.messages import Count, Message, Name
from cordee.communication.sockets import can_receive, check_address, descriptor, is_ipv6
from cordee.communication.traffic import SENT
from cordee.communication.wire import PROTOCOL_VERSION, Buffer, Codec, Envelope, WireError, outgoing
from cordee.core.errors import CommunicationError

_CURVE_OVERHEAD_BYTES = 64  # nonce, authenticator and flags of an encrypted frame take 33
_NOW, _NOW_AND_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # combining enum flags takes 0.7 µs
_RETRY_S = 0.005  # how long a blocked sender waits between two tries, where no signal wakes it earlier


class Speaker(msgspec.Struct, frozen=True, kw_only=True):
    """Who a process is in its run."""

    run: Name
    name: Name
    incarnation: Count  # must grow whenever a process of this name starts again


class Endpoint:
    """One end of a channel. `ServerChannel` and `ClientChannel` are the two kinds."""

    def __init__(self, socket_type: int, address: str, speaker: Speaker, codec: Codec, is_encrypted: bool) -> None:
        check_address(address, is_encrypted)
        try:
            msgspec.convert(msgspec.to_builtins(speaker), Speaker)
        except msgspec.ValidationError as error:
            raise CommunicationError(f"{speaker} cannot speak on a channel: {error}") from error
        self.speaker = speaker
        self.address = address
        self._codec = codec
        self._replay_filter = ReplayFilter(speaker.run)
        self._sequence = 0
        self._process = os.getpid()
        self._is_closed = False
        self._is_waiting = False
        self._is_torn = False  # between the frames of a message: for good, if a signal handler raised there
        self._using = threading.Lock()  # held while the socket is used, never while waiting
        self._receiving = threading.Lock()  # held for the whole of a receive
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # A context of its own: the authentication handler is one per context, and so is the I/O thread.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(socket_type)
        self._socket.linger = 0
        self._socket.ipv6 = is_ipv6(address)
        self._socket.sndhwm = self._socket.rcvhwm = codec.limits.max_queued
        self._socket.maxmsgsize = codec.limits.max_frame_bytes + (_CURVE_OVERHEAD_BYTES if is_encrypted else 0)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, 10_000)
        self._signals = select.poll()
        self._signals.register(self._wake, select.POLLIN)
        self._descriptor = descriptor(self._socket)
        self._signals.register(self._descriptor, select.POLLIN)

    @property
    def generation(self) -> int:
        """The generation this end belongs to; 0 before the first.

        It goes out with every generational message, and those of earlier generations that come in are refused.
        """
        return self._replay_filter.generation

    @generation.setter
    def generation(self, value: int) -> None:
        with self._using:
            self._replay_filter.advance(value)

    def close(self, linger_s: float = 0.5) -> None:
        """Close the sockets and end the I/O thread. What was sent has `linger_s` to leave; no wait is longer.

        A thread that waits in `receive` gets an error at once. In a forked child this does nothing, since the
        sockets belong to the parent.
        """
        if os.getpid() != self._process:
            return
        with self._using:
            if self._is_closed:
                return
            self._is_closed = True
        os.eventfd_write(self._wake, 1)
        # A second at most, in case the closer is a signal handler that interrupted the receiver.
        is_free = self._receiving.acquire(timeout=1.0)
        with self._using:
            self._close_sockets()
            self._socket.close(linger=round(linger_s * 1000))
            self._context.term()
            os.close(self._wake)
        if is_free:
            self._receiving.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin_receiving(self) -> None:
        """To be followed by `_end_receiving`, whatever happens. Two functions: a context manager takes 3 µs more."""
        if not self._receiving.acquire(blocking=False):
            with self._using:
                self._check_usable()
            raise CommunicationError(f"two threads receive from the channel {self.address} at once")

    def _end_receiving(self) -> None:
        self._is_waiting = False
        self._receiving.release()

    def _close_sockets(self) -> None:
        """Close what the subclass has opened beside the main socket."""

    def _check_usable(self) -> None:
        if os.getpid() != self._process:
            raise CommunicationError(f"the channel {self.address} was opened before a fork: open one in the child")
        if self._is_closed:
            raise CommunicationError(f"the channel {self.address} is closed")
        if self._is_torn:
            raise CommunicationError(f"the channel {self.address} was interrupted within a message: open a new one")

    def _transmit(
        self, to: str, route: bytes | None, message: Message, arrays: Sequence[Any], reply_to: int, timeout_s: float
    ) -> int | None:
        """Hand a message to the transport; return its sequence, None if it took none before the deadline.

        Any thread may send. The arrays are copied: they may change as soon as it returns.
        """
        payload = self._codec.encode_message(message)
        specs, views, _, _ = outgoing(arrays)
        deadline = time.monotonic() + timeout_s
        while True:
            with self._using:
                self._check_usable()
                envelope = Envelope(
                    version=PROTOCOL_VERSION,
                    run=self.speaker.run,
                    sender=self.speaker.name,
                    incarnation=self.speaker.incarnation,
                    generation=self.generation if message.is_generational else 0,
                    sequence=self._sequence + 1,
                    reply_to=reply_to,
                    buffers=specs,
                    payload=payload,
                )
                try:
                    return self._put(to, route, self._codec.encode_header(envelope), views)
                except zmq.Again:
                    self._explain_blocked()
                finally:
                    self._pass_signal_on()
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return None
            patience = select.poll()
            patience.register(self._descriptor, select.POLLIN)
            patience.poll(min(remaining_s, _RETRY_S) * 1000)

    def _put(self, to: str, route: bytes | None, header: bytes, views: list[memoryview]) -> int:
        self._is_torn = True
        # Only the first frame can find the queue full: libzmq takes the rest of a message it has begun.
        try:
            if route is not None:
                self._socket.send(route, _NOW_AND_MORE)
            self._socket.send(header, _NOW_AND_MORE if views else _NOW)
        except zmq.ZMQError:
            self._is_torn = False
            raise
        for left, view in zip(range(len(views) - 1, -1, -1), views):
            self._socket.send(view, _NOW_AND_MORE if left else _NOW)
        self._is_torn = False
        SENT.add(len(route or b"") + len(header) + sum(view.nbytes for view in views), to)
        self._sequence += 1
        return self._sequence

    def _explain_blocked(self) -> None:
        """Raise if it is known that waiting is of no use."""

    def _pass_signal_on(self) -> None:
        if self._is_waiting and can_receive(self._socket):
            os.eventfd_write(self._wake, 1)

    def _wait(self, remaining_s: float) -> None:
        """Wait for a signal of any of the sockets. The caller holds `_receiving`, and not `_using`."""
        for ready, _ in self._signals.poll(max(0.0, remaining_s) * 1000):
            self._record_signal(ready)
            if ready == self._wake and not self._is_closed:
                os.eventfd_read(self._wake)

    def _record_signal(self, ready: int) -> None:
        """A descriptor is ready that the subclass may have registered."""

    def _take_frames(self, num_heads: int) -> list[zmq.Frame] | None:
        """Return the frames of the next message, or None. Of frames beyond the limits only the count is kept."""
        if not can_receive(self._socket):  # an exception would take longer
            return None
        self._is_torn = True
        try:
            frames = [self._socket.recv(_NOW, copy=False)]
        except zmq.Again:
            self._is_torn = False
            return None
        most = num_heads + self._codec.limits.max_buffers
        while frames[-1].more:
            frame = self._socket.recv(_NOW, copy=False)
            if len(frames) > most:
                frames[-1] = frame
            else:
                frames.append(frame)
        self._is_torn = False
        return frames

    def _decode(self, envelope: Envelope, frames: Sequence[zmq.Frame]) -> tuple[Message, tuple[Buffer, ...]]:
        if len(frames) > self._codec.limits.max_buffers:
            raise WireError(
                f"a message from {envelope.sender!r} with more frames than the {self._codec.limits.max_buffers} "
                "buffers that are allowed"
            )
        buffers = self._codec.decode_buffers(envelope, [frame.buffer for frame in frames])
        return self._codec.decode_message(envelope), buffers


# Which messages are admitted: not those of other runs, of the past, or received before. Decides without I/O.


class Admission(enum.StrEnum):
    """How a `ReplayFilter` classifies an envelope. All but `ADMITTED` are reasons of a refusal."""

    ADMITTED = "admitted"
    WRONG_RUN = "wrong-run"
    STALE_GENERATION = "stale-generation"  # of a team that has been re-formed since
    STALE_INCARNATION = "stale-incarnation"  # the sender was fenced, or has started again since
    REPLAY = "replay"  # heard already, or overtaken by a later message
    TOO_MANY_SENDERS = "too-many-senders"


class ReplayFilter:
    """Admits or refuses envelopes in the order they arrive.

    Remembers, for each sender, its newest incarnation and the highest sequence heard of it. A newer
    generation than the filter's own is admitted: its holder has learned of it first. Generation 0 belongs to no
    team and is never stale; what fences such messages is the incarnation.

    A filter that starts empty, as after a restart, admits any first sequence of a sender.
    """

    def __init__(self, run: str, *, max_senders: int = 65536) -> None:
        self.run = run
        self.generation = 0
        self.refusals: Counter[Admission] = Counter()  # how often each reason was given, but for ADMITTED
        self._max_senders = max_senders
        self._heard: dict[str, tuple[int, int]] = {}  # sender -> (incarnation, highest sequence)

    def admit(self, envelope: Envelope) -> Admission:
        """Classify one envelope and, if it is admitted, remember it."""
        admission = self._classify(envelope)
        if admission is Admission.ADMITTED:
            self._heard[envelope.sender] = (envelope.incarnation, envelope.sequence)
        else:
            self.refusals[admission] += 1
        return admission

    def advance(self, generation: int) -> None:
        """Make `generation` the current one: messages of earlier ones are refused from now on."""
        assert generation >= self.generation, f"generation {generation} after {self.generation}"
        self.generation = generation

    def fence(self, sender: str, incarnation: int) -> None:
        """Refuse whatever this incarnation of the sender, or an earlier one, still says."""
        if self._heard.get(sender, (-1, -1))[0] <= incarnation:
            self._heard[sender] = (incarnation + 1, -1)

    def _classify(self, envelope: Envelope) -> Admission:
        if envelope.run != self.run:
            return Admission.WRONG_RUN
        heard = self._heard.get(envelope.sender)
        if heard is None:
            if len(self._heard) >= self._max_senders:
                return Admission.TOO_MANY_SENDERS
        elif envelope.incarnation < heard[0]:
            return Admission.STALE_INCARNATION
        elif envelope.incarnation == heard[0] and envelope.sequence <= heard[1]:
            return Admission.REPLAY
        if 0 < envelope.generation < self.generation:
            return Admission.STALE_GENERATION
        return Admission.ADMITTED
