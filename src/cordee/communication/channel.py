"""Channels: encrypted, authenticated, typed messages between the members of a run and a server of it.

A server has one address and many peers; a client has one server. Threads: any thread may send; one at a time
may receive or make requests. Processes: a channel belongs to the process that opened it and must be opened
again after a fork (a child that inherits one also keeps its port busy for as long as it lives). No thread but
libzmq's I/O thread is started, and `close` ends it.

Measured 2026-11-15 between two processes on a 2-core host, tcp loopback, libzmq 4.3.5, while other work kept
the load at 6 to 8 (10th percentile; a bare pyzmq echo of the same bytes in the same run in brackets): small
round trip 0.25 ms with CURVE and 0.24 ms without (0.11, 0.09); a 4 MB buffer and a small reply 0.2–0.3 GB/s
with CURVE (0.2–0.45), without it 1.6 GB/s (1.9) and 2.0 GB/s (2.3) without the copy of what is sent. Encryption, in
libzmq's one I/O thread at each end, is what bounds large buffers; the copy hardly shows beside it.
"""

from __future__ import annotations

import logging
import select
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import zmq

from cordee.communication.endpoint import Admission, Endpoint, Speaker
from cordee.communication.keys import ClientKeys, ServerKeys
from cordee.communication.messages import Message, Refused
from cordee.communication.sockets import (
    DOMAIN,
    SocketMonitor,
    ZapAuthenticator,
    bound_address,
    check_address,
    descriptor,
    is_ipv6,
)
from cordee.communication.wire import Buffer, Codec, Envelope, WireError
from cordee.core.errors import CommunicationError

_log = logging.getLogger(__name__)
MALFORMED = "malformed"
UNKNOWN_KEY = "unknown-key"
_AUTHENTICATION_S = 0.01  # handshakes may wait so long while messages keep coming
_LOOK_S = 0.01  # between two looks at a connection that is being made


class RefusedError(CommunicationError):
    """The server refused a request; `reason` is a `Admission`, "malformed", or the service's own word."""

    def __init__(self, address: str, refused: Refused) -> None:
        detail = f": {refused.detail}" if refused.detail else ""
        super().__init__(f"the server at {address} refused the request ({refused.reason}){detail}")
        self.reason = refused.reason
        self.detail = refused.detail


class Peer(NamedTuple):
    """The way back to a client. Holds until its connection ends; a client that reconnects is a new peer."""

    route: bytes
    name: str


class Received(NamedTuple):
    """One message, as it came in."""

    peer: Peer
    envelope: Envelope
    message: Message
    buffers: tuple[Buffer, ...]


class ServerChannel(Endpoint):
    """Listens at an address for the clients whose keys are admitted.

    `address` may leave the port to the system: "tcp://127.0.0.1:*", "ipc://*". The attribute `address` then
    is the one chosen. Handshakes of new clients progress only while `receive` runs. With `public` it listens
    there as well, for other hosts; the attribute `public` is that address.
    """

    def __init__(
        self,
        address: str,
        speaker: Speaker,
        codec: Codec,
        keys: ServerKeys | None,
        *,
        curve: bool = True,
        public: str = "",
        admits_every_key: bool = False,
    ) -> None:
        """With `admits_every_key` anybody can connect. The sender of a message is then its public key in hexadecimal,
        whatever name the message gives, and the receiver decides whom it believes.
        """
        _check_keys(address, keys, curve)
        super().__init__(zmq.ROUTER, address, speaker, codec, curve)
        self._admits_every_key = admits_every_key
        self._refusals: Counter[str] = Counter()
        self._authenticator: ZapAuthenticator | None = None
        self._authenticator_fd = -1  # its descriptor
        self._authentication_next_s = 0.0  # when to look for handshakes, without a signal of one
        self._monitor: SocketMonitor | None = None
        # Sending to a peer that is gone, or that does not read, is an error and not a silent loss.
        self._socket.router_mandatory = True
        if curve and keys is not None:
            self._authenticator = ZapAuthenticator(self._context, None if admits_every_key else keys.admitted)
            self._authenticator_fd = descriptor(self._authenticator.socket)
            self._signals.register(self._authenticator_fd, select.POLLIN)
            self._socket.curve_server = True
            self._socket.curve_publickey, self._socket.curve_secretkey = keys.public, keys.secret
            self._socket.zap_domain = DOMAIN
            self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no answer from the authenticator is a "no"
        self.address = self._listen(address)
        self.public = ""
        if public:
            check_address(public, curve)
            self._socket.ipv6 = is_ipv6(public)
            self.public = self._listen(public)

    def _listen(self, address: str) -> str:
        """Return the address with the port that was chosen."""
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close(0)
            raise CommunicationError(f"cannot listen at {address}: {error.strerror}") from error
        return bound_address(self._socket)

    @property
    def refusals(self) -> dict[str, int]:
        """How many messages were refused, by reason, and how many handshakes ("unknown-key")."""
        counts = {str(reason): count for reason, count in (self._replay_filter.refusals + self._refusals).items()}
        if self._authenticator is not None and self._authenticator.num_refused:
            counts[UNKNOWN_KEY] = self._authenticator.num_refused
        return counts

    @property
    def num_lost(self) -> int:
        """How many connections of clients have ended since this was first asked, whoever ended them.

        Who has asked asks again and again: libzmq waits for a monitor that is not read.
        """
        with self._using:
            self._check_usable()
            if self._monitor is None:
                self._monitor = SocketMonitor(self._socket)
            self._monitor.read()
            return self._monitor.num_lost

    def fence(self, name: str, incarnation: int) -> None:
        """Refuse whatever this incarnation of the member, or an earlier one, still says."""
        with self._using:
            self._replay_filter.fence(name, incarnation)

    def receive(self, timeout_s: float) -> Received | None:
        """Return the next message that is admitted, or None after `timeout_s`.

        A message that is malformed, stale or heard before is counted, answered by `Refused`, and not returned:
        one bad client does not stop the others from being served.
        """
        deadline = time.monotonic() + timeout_s
        self._begin_receiving()
        try:
            while True:
                with self._using:
                    self._check_usable()
                    if self._authenticator is not None and time.monotonic() >= self._authentication_next_s:
                        self._authenticator.serve()
                        self._authentication_next_s = time.monotonic() + _AUTHENTICATION_S
                    frames = self._take_frames(num_heads=2)
                    self._is_waiting = frames is None
                    outcome = self._open(frames) if frames else None
                if isinstance(outcome, Received):
                    return outcome
                if outcome is not None:
                    self._refuse(outcome)
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    return None
                if frames is None:
                    self._wait(remaining_s)
        finally:
            self._end_receiving()

    def send(
        self,
        peer: Peer,
        message: Message,
        buffers: Sequence[Any] = (),
        *,
        reply_to: int = 0,
        timeout_s: float = 0.0,
    ) -> None:
        """Send to one client. By default it does not wait for a client that does not read: that is an error.

        Raises `CommunicationError` if the client is gone, or its queue is still full after `timeout_s`.
        """
        try:
            # Each channel of a caller has a name of its own, "worker-0/1b2c-3": the link is with the caller.
            sequence = self._transmit(peer.name.partition("/")[0], peer.route, message, buffers, reply_to, timeout_s)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise CommunicationError(f"{peer.name} is no longer connected to {self.address}") from error
        if sequence is None:
            raise CommunicationError(
                f"{peer.name} does not read: {self._codec.limits.max_queued} messages wait for it "
                f"at {self.address} after {timeout_s:g} s"
            )

    def reply(
        self, received: Received, message: Message, buffers: Sequence[Any] = (), *, timeout_s: float = 0.0
    ) -> None:
        """Answer a request. Like `send` otherwise."""
        self.send(received.peer, message, buffers, reply_to=received.envelope.sequence, timeout_s=timeout_s)

    def _open(self, frames: list[zmq.Frame]) -> Received | _Refusal:
        route, sender, sequence = frames[0].bytes, "", 0
        try:
            envelope = self._codec.decode_header(frames[1].buffer if len(frames) > 1 else b"")
            if self._admits_every_key:
                envelope = msgspec.structs.replace(envelope, sender=str(frames[1].get("User-Id")))
            sender, sequence = envelope.sender, envelope.sequence
            admission = self._replay_filter.admit(envelope)
            if admission is not Admission.ADMITTED:
                is_stale = admission is Admission.STALE_GENERATION
                detail = f"the current generation is {self.generation}" if is_stale else ""
                return _Refusal(Peer(route, sender), sequence, Refused(admission, detail))
            return Received(Peer(route, sender), envelope, *self._decode(envelope, frames[2:]))
        except WireError as error:
            self._refusals[MALFORMED] += 1
            return _Refusal(Peer(route, sender or route.hex()), sequence, Refused(MALFORMED, str(error)))

    def _refuse(self, refusal: _Refusal) -> None:
        refused = refusal.refused
        # Once as a warning for each kind: who sends a lot of rubbish shall not fill the log.
        is_first = self.refusals.get(refused.reason) == 1
        _log.log(
            logging.WARNING if is_first else logging.DEBUG,
            "%s refused a message of %r: %s %s",
            self.address,
            refusal.peer.name,
            refused.reason,
            refused.detail,
        )
        try:
            self.send(refusal.peer, refused, reply_to=refusal.sequence)
        except CommunicationError as error:  # it is gone or does not read: nobody is waiting for the answer
            _log.debug("the refusal was not delivered: %s", error)

    def _record_signal(self, ready: int) -> None:
        if ready == self._authenticator_fd:
            self._authentication_next_s = 0.0

    def _close_sockets(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
        if self._authenticator is not None:
            self._authenticator.close()


class _Refusal(NamedTuple):
    peer: Peer
    sequence: int
    refused: Refused


class Asked(NamedTuple):
    """A request that was sent."""

    sequence: int
    num_lost: int  # connections lost before it
    kind: str


class ClientChannel(Endpoint):
    """Connects to a server in the background, and again whenever the connection breaks.

    libzmq gives up for good on what refuses our key or speaks without CURVE: then open a new channel.
    """

    def __init__(
        self,
        address: str,
        speaker: Speaker,
        codec: Codec,
        keys: ClientKeys | None,
        *,
        curve: bool = True,
        silence_s: float = 0.0,
    ) -> None:
        """With `silence_s` a connection over which nothing comes back for so long counts as broken."""
        _check_keys(address, keys, curve)
        super().__init__(zmq.DEALER, address, speaker, codec, curve)
        self._server = ""  # its name, when it has said anything
        self._aside: deque[Received] = deque()  # came in while a request waited for its reply
        self._monitor = SocketMonitor(self._socket)
        self._signals.register(descriptor(self._monitor.socket), select.POLLIN)
        # Nothing is queued before there is a connection, so that a send says when there is none.
        self._socket.immediate = True
        self._socket.reconnect_ivl, self._socket.reconnect_ivl_max = 50, 1000
        if silence_s:
            self._socket.heartbeat_ivl = round(silence_s / 3 * 1000)
            self._socket.heartbeat_timeout = round(silence_s * 1000)
        if curve and keys is not None:
            self._socket.curve_serverkey = keys.server_public
            self._socket.curve_publickey, self._socket.curve_secretkey = keys.public, keys.secret
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close(0)
            raise CommunicationError(f"cannot connect to {address}: {error.strerror}") from error

    def send(self, message: Message, buffers: Sequence[Any] = (), *, timeout_s: float) -> int:
        """Send to the server, waiting at most `timeout_s` for a connection and a place in its queue.

        Returns the sequence that a reply will name.
        Raises `CommunicationError`, which says why, after that time; at once if the server refuses our key.
        What has been sent may still be lost with the connection: only a reply says that it arrived.
        """
        sequence = self._transmit(self._server, None, message, buffers, 0, timeout_s)
        if sequence is None:
            raise CommunicationError(
                f"nothing could be sent to {self.address} within {timeout_s:g} s: "
                + (self._monitor.problem or f"{self._codec.limits.max_queued} messages wait and it does not read")
            )
        return sequence

    def receive(self, timeout_s: float) -> Received | None:
        """Return the next message of the server, or None after `timeout_s`.

        Raises `WireError` if the server sends what is no message, `CommunicationError` if it refuses our key.
        Stale and repeated messages are counted and passed over.
        """
        if (kept := self.kept()) is not None:
            return kept
        return self._receive(time.monotonic() + timeout_s, None)

    def kept(self) -> Received | None:
        """Return the next message that came in while a request waited for its reply. Any thread may ask."""
        try:
            return self._aside.popleft()
        except IndexError:
            return None

    def request(
        self,
        message: Message,
        buffers: Sequence[Any] = (),
        *,
        timeout_s: float,
        wait_on: Callable[[], bool] = lambda: False,
    ) -> Received:
        """Send a message and return the reply to it; other messages are kept for `receive`.

        Raises `RefusedError` if the server refuses it, and `CommunicationError` if no reply has come within
        `timeout_s` and `wait_on()` does not give it as much time again, or as soon as none can come because the
        connection was lost.
        """
        return self.finish(self.begin(message, buffers, timeout_s=timeout_s), timeout_s=timeout_s, wait_on=wait_on)

    def begin(self, message: Message, buffers: Sequence[Any] = (), *, timeout_s: float) -> Asked:
        """Send a request; `finish` waits for the reply. Raises like `send`."""
        deadline = time.monotonic() + timeout_s
        if self._monitor.problem:
            self._await_connection(deadline)
        num_lost = self._monitor.num_lost
        sequence = self.send(message, buffers, timeout_s=max(0.0, deadline - time.monotonic()))
        return Asked(sequence, num_lost, type(message).__name__)

    def _await_connection(self, deadline: float) -> None:
        """Wait until the handshake is done, or the deadline: `send` then says what is wrong.

        libzmq takes messages for a connection that has broken until it has cleaned up, and for one whose handshake
        may still fail; nobody would hear that such a request was lost.
        """
        news = select.poll()
        news.register(descriptor(self._monitor.socket), select.POLLIN)
        while time.monotonic() < deadline:
            with self._using:
                self._check_usable()
                self._explain_blocked()
            if not self._monitor.problem:
                return
            news.poll(_LOOK_S * 1000)

    def finish(self, asked: Asked, *, timeout_s: float, wait_on: Callable[[], bool] = lambda: False) -> Received:
        """Return the reply to a request, like `request`."""
        deadline = time.monotonic() + timeout_s
        while True:
            received = self._receive(deadline, asked.num_lost)
            if received is None:
                if not wait_on():
                    break
                deadline = time.monotonic() + timeout_s
                continue
            if received.envelope.reply_to == asked.sequence:
                if isinstance(received.message, Refused):
                    raise RefusedError(self.address, received.message)
                return received
            self._aside.append(received)
        raise CommunicationError(
            f"no reply to {asked.kind} from {self.address} within {timeout_s:g} s"
            + (f": {self._monitor.problem}" if self._monitor.problem else "")
        )

    def _receive(self, deadline: float, num_lost: int | None) -> Received | None:
        self._begin_receiving()
        try:
            while True:
                with self._using:
                    self._check_usable()
                    frames = self._take_frames(num_heads=1)
                    self._is_waiting = frames is None
                    received = self._open(frames) if frames else None
                    if frames is None:
                        self._explain_blocked()
                if received is not None:
                    return received
                if frames is None and num_lost is not None and self._monitor.num_lost != num_lost:
                    raise CommunicationError(f"the connection to {self.address} was lost before the reply came")
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    return None
                if frames is None:
                    self._wait(remaining_s)
        finally:
            self._end_receiving()

    def _open(self, frames: list[zmq.Frame]) -> Received | None:
        envelope = self._codec.decode_header(frames[0].buffer)
        if self._replay_filter.admit(envelope) is not Admission.ADMITTED:
            return None
        self._server = envelope.sender
        return Received(Peer(b"", envelope.sender), envelope, *self._decode(envelope, frames[1:]))

    def _explain_blocked(self) -> None:
        self._monitor.read()
        if self._monitor.is_key_refused:
            raise CommunicationError(f"cannot connect to {self.address}: {self._monitor.problem}")

    def _close_sockets(self) -> None:
        self._monitor.close()


def _check_keys(address: str, keys: ServerKeys | ClientKeys | None, curve: bool) -> None:
    if curve and keys is None:
        raise CommunicationError(f"a channel at {address} needs keys: see cordee.communication.keys.make_keys")
