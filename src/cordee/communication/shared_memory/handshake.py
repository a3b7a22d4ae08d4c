"""Connecting the members of a group that are on different hosts, so that each knows who is at the other end.

The first member draws a secret, which the others find in the store through which the group is formed: what the secret
is worth is what the store is worth. Of two members the one of lower rank dials. Both prove that they know the secret
before anything else is said, and derive the keys of the connection from it and from what both have drawn. A member
listens only until all have come; who does not know the secret learns nothing, and is dropped.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgspec
import psutil

from cordee.communication.shared_memory.connections import NO_EVENT, Connection, Pump, drive
from cordee.core.errors import CommunicationError

_STRANGER_S = 5.0  # for one who connects to prove who it is
_MAX_STRANGERS = 64
_AGAIN_S = 0.2  # before an address is tried again
_SECRET_BYTES = _DRAWN_BYTES = _PROOF_BYTES = 32
# Version, purpose, whether it is encrypted, who dials whom, and what the dialling end has drawn.
_HELLO = struct.Struct(f"!8sBBII{_DRAWN_BYTES}s")
_VERSION = b"cordee 1"


class Purpose(IntEnum):
    """What a connection is for."""

    COLLECTIVES = 1
    MESSAGES = 2
    LIFE = 3


@dataclass(frozen=True)
class LinkSettings:
    """What the members of a group agree on, and where this one can be reached."""

    encrypt: bool
    failure_timeout_s: float
    connecting_timeout_s: float
    address: str | None  # of this host; None: all that it has


class Handshake:
    """One member's part in connecting a group."""

    def __init__(
        self,
        rank: int,
        names: Sequence[str],
        settings: LinkSettings,
        purposes: Mapping[int, set[Purpose]],
        why_over: Callable[[], str],
    ) -> None:
        """`purposes` are those of the connections to each group rank. The wait ends when `why_over()` has an answer."""
        self._rank, self._names, self._settings = rank, names, settings
        self._wanted = {(other, purpose) for other, wanted in purposes.items() for purpose in wanted}
        self._why_over = why_over
        self._made: dict[tuple[int, Purpose], Connection] = {}
        self._proved: set[tuple[int, Purpose]] = set()  # of those: all has been said
        self._troubles: dict[int, str] = {}
        self._pumps: list[Pump] = []
        self._num_strangers = 0
        self._secret = b""

    def run(self, store: Any) -> dict[tuple[int, Purpose], Connection]:
        """Return the connections. Collective over the group."""
        with contextlib.ExitStack() as stack:
            doors = [stack.enter_context(contextlib.closing(door)) for door in _listen(self._settings.address)]
            store.set(f"door/{self._rank}", msgspec.json.encode([door.getsockname()[:2] for door in doors]).decode())
            if self._rank == 0:
                store.set("secret", secrets.token_hex(_SECRET_BYTES))
            self._secret = bytes.fromhex(store.get("secret").decode())
            stack.push(self._close_after_failure)
            self._pumps += [self._accept(door) for door in doors]
            for other, purpose in sorted(self._wanted):
                if other > self._rank:
                    for host, port in msgspec.json.decode(store.get(f"door/{other}"), type=list[tuple[str, int]]):
                        self._pumps.append(self._dial(other, purpose, host, port))
            self._deadline_s = time.monotonic() + self._settings.connecting_timeout_s
            drive(self._pumps, self._look, lambda: self._is_done)
        return self._made

    def _close_after_failure(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None:
            for connection in self._made.values():
                connection.close()

    def _look(self, has_moved: bool) -> None:
        if why := self._why_over():
            raise CommunicationError(why)
        if time.monotonic() > self._deadline_s:
            missing = sorted({other for other, _ in self._wanted - self._proved})
            if missing[-1] < self._rank and time.monotonic() < self._deadline_s + _LISTENING_S:
                return  # who dials knows which address does not answer, and should be the first to say so
            raise CommunicationError(
                f"{self._names[self._rank]} is not connected with "
                + ", ".join(f"{self._names[other]} ({self._troubles.get(other, _NEVER_CAME)})" for other in missing)
                + f" after {self._settings.connecting_timeout_s:g} s: is a firewall between the hosts, or does "
                "`address` name one that the others cannot reach?"
            )

    @property
    def _is_done(self) -> bool:
        return self._wanted == self._proved

    # The end that dials.

    def _dial(self, other: int, purpose: Purpose, host: str, port: int) -> Pump:
        """Try one address of a member, again and again. The first that answers as that member is taken."""
        while (other, purpose) not in self._made:
            sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
            try:
                sock.setblocking(False)
                yield from self._introduce(sock, other, purpose, (host, port))
            except OSError as error:
                self._troubles[other] = f"{host} port {port}: {error.strerror or error}"
            finally:
                if (kept := self._made.get((other, purpose))) is None or kept.sock is not sock:
                    sock.close()
            until_s = time.monotonic() + _AGAIN_S
            while time.monotonic() < until_s and (other, purpose) not in self._made:
                yield NO_EVENT

    def _introduce(self, sock: socket.socket, other: int, purpose: Purpose, address: tuple[str, int]) -> Pump:
        self._troubles.setdefault(other, f"{address[0]} port {address[1]} does not answer")
        code = sock.connect_ex(address)
        if code == errno.EINPROGRESS:
            yield sock.fileno(), select.POLLOUT
            while not select.select([], [sock], [], 0)[1]:
                yield sock.fileno(), select.POLLOUT
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        drawn = secrets.token_bytes(_DRAWN_BYTES)
        hello = _HELLO.pack(_VERSION, purpose, self._settings.encrypt, self._rank, other, drawn)
        line = Connection(sock, other, None)
        yield from line.send(hello)
        answer = bytearray(_DRAWN_BYTES + _PROOF_BYTES)
        yield from line.receive(answer)
        transcript = hello + bytes(answer[:_DRAWN_BYTES])
        if not hmac.compare_digest(answer[_DRAWN_BYTES:], self._derive(b"answers", transcript)):
            raise ConnectionRefusedError("who answers there is not a member of the group")
        if (other, purpose) not in self._made:
            self._made[other, purpose] = Connection(sock, other, self._keys(transcript, is_dialling=True))
            yield from line.send(self._derive(b"dials", transcript))
            self._proved.add((other, purpose))

    # The end that listens.

    def _accept(self, door: socket.socket) -> Pump:
        while not self._is_done:
            if self._num_strangers < _MAX_STRANGERS:
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    self._pumps.append(self._welcome(door.accept()[0]))
                    continue
            yield door.fileno(), select.POLLIN

    def _welcome(self, sock: socket.socket) -> Pump:
        """Hear who connects; keep the connection of one who proves to be a member that is waited for."""
        self._num_strangers += 1
        key: tuple[int, Purpose] | None = None
        try:
            line = Connection(sock, -1, None)
            until_s = time.monotonic() + _STRANGER_S
            key = yield from self._examine(line, until_s)
        except OSError:
            pass
        finally:
            self._num_strangers -= 1
            if key is None:
                sock.close()

    def _examine(self, line: Connection, until_s: float) -> Any:
        hello = bytearray(_HELLO.size)
        yield from self._hurry(line.receive(hello), until_s)
        version, number, encrypt, source, target, _ = _HELLO.unpack(hello)
        key = (source, Purpose(number)) if number in set(Purpose) else None
        is_expected = key in self._wanted - self._made.keys() and source < self._rank == target
        if version != _VERSION or encrypt != self._settings.encrypt or key is None or not is_expected:
            return None
        drawn = secrets.token_bytes(_DRAWN_BYTES)
        transcript = bytes(hello) + drawn
        yield from self._hurry(line.send(drawn + self._derive(b"answers", transcript)), until_s)
        proof = bytearray(_PROOF_BYTES)
        yield from self._hurry(line.receive(proof), until_s)
        if key in self._made or not hmac.compare_digest(proof, self._derive(b"dials", transcript)):
            return None
        self._made[key] = Connection(line.sock, source, self._keys(transcript, is_dialling=False))
        self._proved.add(key)
        return key

    def _hurry(self, pump: Pump, until_s: float) -> Pump:
        for wanted in pump:
            yield wanted
            if time.monotonic() > until_s:
                raise TimeoutError

    # What the secret is used for.

    def _derive(self, purpose: bytes, transcript: bytes) -> bytes:
        return hmac.digest(self._secret, purpose + b"\0" + transcript, hashlib.sha256)

    def _keys(self, transcript: bytes, *, is_dialling: bool) -> tuple[bytes, bytes] | None:
        """Return the keys for sending and for receiving."""
        if not self._settings.encrypt:
            return None
        keys = self._derive(b"key of who dials", transcript), self._derive(b"key of who answers", transcript)
        return keys if is_dialling else (keys[1], keys[0])


_LISTENING_S = 1.0  # for how much longer a member waits for others that should have connected to it
_NEVER_CAME = "which should have connected to this one, and did not"


def _listen(address: str | None) -> list[socket.socket]:
    """Listen at an address of this host, or at each that it has, at ports that the system chooses."""
    doors = []
    for host in [address] if address else _own_addresses():
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            door = socket.create_server((host, 0), family=family, backlog=128)
        except OSError as error:
            if address:
                raise CommunicationError(f"cannot listen at {host}: {error.strerror}") from error
            continue
        door.setblocking(False)
        doors.append(door)
    if not doors:
        raise CommunicationError("this host has no address at which others can reach it")
    return doors


def _own_addresses() -> list[str]:
    """Return the addresses of this host, without those that mean something else on every host.

    An interface counts once it is switched on. The system says a second later, or more, that it is also running; who
    left it out until then would be reached by nobody.
    """
    flags = {name: stats.flags.split(",") for name, stats in psutil.net_if_stats().items()}
    found = [
        entry.address
        for name, entries in psutil.net_if_addrs().items()
        if "up" in flags.get(name, ())
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6) and "%" not in entry.address
    ]
    return [one for one in found if not one.startswith("127.") and one != "::1"] or ["127.0.0.1"]
