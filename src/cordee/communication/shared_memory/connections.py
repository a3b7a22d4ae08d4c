"""Connections to members on other hosts: bytes in order, encrypted where there are keys.

What comes and goes is written as *pumps*: generators that yield the socket and the event that they wait for, so that
one thread can move many of them.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from cordee.communication.traffic import SENT
from cordee.core.errors import CommunicationError

# A connection in use: it yields a descriptor and the events of `select.poll` to wait for, and is resumed then.
# Being resumed too early does no harm.
Pump = Generator[tuple[int, int], None, None]
NO_EVENT = (-1, 0)  # for a pump that only waits for time to pass

RECORD_BYTES = 1 << 18  # encrypted at once; stays in the cache
TAG_BYTES = 16
_LOOK_S = 0.05  # between two looks at the peers while nothing comes


class Connection:
    """A connection to one member of another host, whose end there is known to be that member's."""

    def __init__(self, sock: socket.socket, rank: int, keys: tuple[bytes, bytes] | None) -> None:
        """`keys` are for what is sent and for what is received; without them nothing is encrypted."""
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.rank = sock, rank
        self.descriptor = sock.fileno()
        self._link = f"rank {rank} at {_host_of(sock)}" if rank >= 0 else ""
        self._sealer = None if keys is None else _Cipher(keys[0])
        self._opener = None if keys is None else _Cipher(keys[1])

    def send(self, *parts: Any) -> Pump:
        """Send bytes-like parts. They must not change until the pump has ended."""
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        if self._sealer is not None:
            for piece in self._sealer.seal(views):
                yield from self._write([piece])
        else:
            yield from self._write(views)

    def receive(self, *parts: Any) -> Pump:
        """Fill writable bytes-like parts: as many, and as long, as the other end sends."""
        for part in parts:
            view = memoryview(part).cast("B") if len(part) else memoryview(b"")
            if self._opener is None:
                yield from self._read(view)
                continue
            for start in range(0, len(view), RECORD_BYTES):
                piece = view[start : start + RECORD_BYTES]
                sealed = self._opener.room(len(piece))
                yield from self._read(sealed)
                self._opener.open(sealed, piece)

    def close(self) -> None:
        self.sock.close()

    def _write(self, views: list[memoryview]) -> Pump:
        # In one call: a header that goes first, alone, wakes the other end for a message that is not there yet.
        while views:
            try:
                count = self.sock.sendmsg(views)
            except BlockingIOError:
                yield self.descriptor, select.POLLOUT
                continue
            SENT.add(count, self._link)
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if count:
                views[0] = views[0][count:]

    def _read(self, view: memoryview) -> Pump:
        while view:
            try:
                count = self.sock.recv_into(view)
            except BlockingIOError:
                yield self.descriptor, select.POLLIN
                continue
            if not count:
                raise ConnectionResetError("the connection was closed")
            view = view[count:]


def _host_of(sock: socket.socket) -> str:
    try:
        return str(sock.getpeername()[0])
    except (OSError, IndexError):  # it is gone already, or no socket of a network
        return "?"


class _Cipher:
    """AES-GCM for one direction of one connection. Its key is used nowhere else, so that a counter is the nonce."""

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._aead = AESGCM(key)
        self._count = 0
        # Room for a header and a record, so that short messages go out in one piece.
        self._stage = memoryview(bytearray(RECORD_BYTES + 4 * TAG_BYTES + 1024))

    def seal(self, views: Sequence[memoryview]) -> Iterator[memoryview]:
        """Yield what goes over the network; each piece is overwritten when the next is asked for."""
        used = 0
        for view in views:
            for start in range(0, len(view), RECORD_BYTES):
                piece = view[start : start + RECORD_BYTES]
                size = len(piece) + TAG_BYTES
                if used + size > len(self._stage):
                    yield self._stage[:used]
                    used = 0
                self._aead.encrypt_into(self._nonce(), piece, None, self._stage[used : used + size])
                used += size
        if used:
            yield self._stage[:used]

    def room(self, size: int) -> memoryview:
        """Return where to put a record of `size` bytes as it comes in."""
        return self._stage[: size + TAG_BYTES]

    def open(self, sealed: memoryview, out: memoryview) -> None:
        from cryptography.exceptions import InvalidTag

        try:
            self._aead.decrypt_into(self._nonce(), sealed, None, out)
        except InvalidTag:
            raise CommunicationError(
                "what came over the network is not what a member of the group has sent: somebody changes it on its way"
            ) from None

    def _nonce(self) -> bytes:
        self._count += 1
        return self._count.to_bytes(12, "big")


def drive(pumps: list[Pump], look: Callable[[bool], None], is_done: Callable[[], bool] = lambda: False) -> None:
    """Run pumps in this thread until all have ended, or `is_done()`. Pumps that are appended meanwhile are run as well.

    `look` is called now and then, with whether something moved since; what it raises ends the wait.
    """
    waiting: list[tuple[Pump, int, int]] = []
    next_look_s, has_moved = time.monotonic() + _LOOK_S, False
    while True:
        while pumps:
            _resume(pumps.pop(0), waiting)
        if not waiting or is_done():
            break
        poll = select.poll()
        masks: dict[int, int] = {}
        for _, descriptor, mask in waiting:
            masks[descriptor] = masks.get(descriptor, 0) | mask
        for descriptor, mask in masks.items():
            if descriptor >= 0:
                poll.register(descriptor, mask)
        ready = dict(poll.poll(_LOOK_S * 1000))
        has_moved |= bool(ready)
        now_s = time.monotonic()
        is_late = now_s >= next_look_s
        if is_late:
            look(has_moved)
            next_look_s, has_moved = now_s + _LOOK_S, False
        before, waiting = waiting, []
        for pump, descriptor, mask in before:
            if is_late or ready.get(descriptor, 0) & (mask | select.POLLERR | select.POLLHUP | select.POLLNVAL):
                _resume(pump, waiting)
            else:
                waiting.append((pump, descriptor, mask))
    for pump, _, _ in waiting:
        pump.close()


def _resume(pump: Pump, waiting: list[tuple[Pump, int, int]]) -> None:
    with contextlib.suppress(StopIteration):
        waiting.append((pump, *next(pump)))
