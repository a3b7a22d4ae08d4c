"""ZeroMQ sockets: which addresses a channel may use, the state of a connection, and who may connect."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from cordee.core.errors import CommunicationError

_MAX_PORT = 65535
_MAX_SOCKET_PATH = 107  # bytes; a limit of the operating system


def check_address(address: str, is_encrypted: bool) -> None:
    """Raise unless a channel may bind or connect there. Without encryption it must not leave the host."""
    scheme, separator, rest = address.partition("://")
    if not separator or scheme not in ("tcp", "ipc") or not rest:
        raise CommunicationError(f"'{address}' is no address of a channel: use 'tcp://HOST:PORT' or 'ipc://PATH'")
    port = rest.rpartition(":")[2]
    if scheme == "tcp" and port != "*" and not (port.isdecimal() and int(port) <= _MAX_PORT):
        raise CommunicationError(
            f"'{address}' has no port from 0 to {_MAX_PORT}: use 'tcp://HOST:PORT', or '*' for any"
        )
    if scheme == "ipc" and len(rest.encode()) > _MAX_SOCKET_PATH:
        raise CommunicationError(
            f"the path in '{address}' is longer than the {_MAX_SOCKET_PATH} bytes that the system allows: "
            "use a shorter one, or tcp://127.0.0.1:*"
        )
    if not is_encrypted and scheme == "tcp" and not _is_loopback(_host(address)):
        raise CommunicationError(
            f"'{address}' can be reached from other hosts, which a channel without encryption must not: "
            "leave curve on, or use tcp://127.0.0.1 or ipc://"
        )


_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)  # working with the enums takes longer than asking


def can_receive(socket: zmq.Socket[bytes]) -> bool:
    """Return whether a message waits. Takes the signal of the socket's descriptor away, as every use does."""
    events: Any = socket.get(_EVENTS)
    return bool(int(events) & _POLLIN)


def descriptor(socket: zmq.Socket[bytes]) -> int:
    """Return the descriptor that becomes readable when something about the socket changes."""
    return int(socket.get(zmq.FD))


def bound_address(socket: zmq.Socket[bytes]) -> str:
    """Return the address a socket listens at, with the port or path that the system chose."""
    return bytes(socket.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()


def is_ipv6(address: str) -> bool:
    return address.startswith("tcp://") and ":" in _host(address)


def _host(address: str) -> str:
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# The state of a client's connection, from the events that libzmq reports about its socket.

_MONITORED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


_NOT_OURS = "what listens there has another server key, or is no server of ours"


class SocketMonitor:
    """Follows one socket. To be used by one thread at a time, the one that uses the socket."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.problem = "nothing listens there"  # why there is no connection; empty while there is one
        self.is_key_refused = False
        self.num_lost = 0  # connections that broke; what was asked over them stays unanswered
        self._watched = socket
        self.socket = socket.get_monitor_socket(_MONITORED)

    def read(self) -> None:
        """Take in what has happened since the last call; does not block."""
        while can_receive(self.socket):
            event = parse_monitor_message(self.socket.recv_multipart(zmq.NOBLOCK))["event"]
            was_up = not self.problem
            match event:
                case zmq.Event.HANDSHAKE_SUCCEEDED:
                    self.problem = ""
                case zmq.Event.HANDSHAKE_FAILED_AUTH:
                    self.problem, self.is_key_refused = "the server does not know our key", True
                case zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
                    self.problem = _NOT_OURS
                case zmq.Event.CONNECTED if self.problem != _NOT_OURS:
                    self.problem = "what listens there does not answer our handshake"
                case zmq.Event.DISCONNECTED:
                    # Also before the handshake is done: libzmq takes messages as soon as there is a connection.
                    self.num_lost += 1
                    if was_up:
                        self.problem = "the connection was lost"
                case zmq.Event.CONNECT_RETRIED if was_up:
                    self.problem = "nothing listens there any more"

    def close(self) -> None:
        self._watched.disable_monitor()
        self.socket.close(linger=0)


# Lets clients in by their public key: the authentication handler that libzmq asks during a handshake (ZAP).
#
# libzmq suspends a handshake until the handler answers, and reads no message of that client before. The handler
# is a socket of the server's own context that the server's own thread serves, so that there is no other thread
# to start, to die or to leave behind; the price is that handshakes progress only while the server receives.

_ENDPOINT = "inproc://zeromq.zap.01"  # fixed by the protocol, rfc.zeromq.org/spec/27
_AT_ONCE = 32  # handshakes served in a row, before messages get their turn

DOMAIN = b"cordee"


class ZapAuthenticator:
    """Answers the handshakes of one context. To be used by one thread at a time."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], admitted: Iterable[bytes] | None) -> None:
        """`admitted` are the keys that are let in; None lets everybody in, and messages then name their key."""
        self.num_refused = 0
        self._admitted = None if admitted is None else frozenset(admitted)
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ENDPOINT)

    def serve(self) -> None:
        """Answer the handshakes that wait; does not block."""
        for _ in range(_AT_ONCE):
            if not can_receive(self.socket):
                return
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
            self.socket.send_multipart(self.answer(frames), zmq.NOBLOCK)

    def answer(self, frames: list[bytes]) -> list[bytes]:
        """Return the reply to one request; anything but a known key in our own domain is denied."""
        request_id = frames[1] if len(frames) > 1 else b""
        admitted, user = self._admitted, b""
        match frames:
            case [b"1.0", _, domain, _, _, b"CURVE", key] if domain == DOMAIN and (admitted is None or key in admitted):
                status, text, user = b"200", b"OK", key.hex().encode()
            case _:
                self.num_refused += 1
                status, text = b"400", b"unknown key"
        return [b"1.0", request_id, status, text, user, b""]

    def close(self) -> None:
        self.socket.close(linger=0)
