"""Small questions about sockets: which addresses a channel may use, and what a socket has to say."""

from __future__ import annotations

import ipaddress
from typing import Any

import zmq

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
    """Tell whether a message waits. Takes the signal of the socket's descriptor away, as every use does."""
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
