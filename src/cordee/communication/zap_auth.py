"""Lets clients in by their public key: the authentication handler that libzmq asks during a handshake (ZAP).

libzmq suspends a handshake until the handler answers, and reads no message of that client before. The handler
is a socket of the server's own context that the server's own thread serves, so that there is no other thread
to start, to die or to leave behind; the price is that handshakes progress only while the server receives.
"""

from __future__ import annotations

from collections.abc import Iterable

import zmq

from cordee.communication.sockets import can_receive

_ENDPOINT = "inproc://zeromq.zap.01"  # fixed by the protocol, rfc.zeromq.org/spec/27
_AT_ONCE = 32  # handshakes served in a row, before messages get their turn

DOMAIN = b"cordee"


class ZapAuthenticator:
    """Answers the handshakes of one context. To be used by one thread at a time."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], admitted: Iterable[bytes]) -> None:
        self.num_refused = 0
        self._admitted = frozenset(admitted)
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
        match frames:
            case [b"1.0", _, domain, _, _, b"CURVE", key] if domain == DOMAIN and key in self._admitted:
                status, text = b"200", b"OK"
            case _:
                self.num_refused += 1
                status, text = b"400", b"unknown key"
        return [b"1.0", request_id, status, text, b"", b""]

    def close(self) -> None:
        self.socket.close(linger=0)
