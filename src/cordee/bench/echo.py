"""The peer of the store's benchmark: ZeroMQ itself, sending bytes to a process that sends them back.

    python -m cordee.bench.echo < order.json

listens as the order says, prints where, and serves until its input is closed.
"""

from __future__ import annotations

import select
import sys
from typing import Any

import msgspec
import numpy as np
import zmq

_SMALL_BYTES = 64 << 10  # below this a copy is cheaper than keeping track of the buffer


class EchoOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Where to listen, and the pair of keys, as Z85, if the bytes are to be encrypted."""

    listen: str
    public: str = ""
    secret: str = ""


class Echo:
    """The client: one round trip of the bytes of an array."""

    def __init__(self, address: str, server_public: str = "") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REQ)
        self._socket.linger = 0
        if server_public:
            public, secret = zmq.curve_keypair()
            self._socket.curve_serverkey = server_public.encode()
            self._socket.curve_publickey, self._socket.curve_secretkey = public, secret
        self._socket.connect(address)

    def __call__(self, array: np.ndarray[Any, Any]) -> None:
        """Send the bytes and take them back, without a copy on this side where that is faster."""
        self._socket.send(array.data, 0, copy=array.nbytes < _SMALL_BYTES)
        frame = self._socket.recv(copy=False)
        assert len(frame) == array.nbytes

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def main() -> None:
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=EchoOrder)
    context = zmq.Context()
    server = context.socket(zmq.REP)
    server.linger = 0
    if order.secret:
        server.curve_server = True
        server.curve_publickey, server.curve_secretkey = order.public.encode(), order.secret.encode()
    server.bind(order.listen)
    print(bytes(server.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode(), flush=True)
    poller = zmq.Poller()
    poller.register(server, zmq.POLLIN)
    while True:
        if not poller.poll(500):
            if select.select([sys.stdin], [], [], 0)[0]:
                break
            continue
        frame = server.recv(copy=False)
        server.send(frame, copy=False)
    server.close()
    context.term()


if __name__ == "__main__":
    main()
