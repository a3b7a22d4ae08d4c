"""What one member of a group shares with the members on other hosts: collectives of leaders, and signs of life.

Two members of different hosts have a connection for messages and one on which each shows that it lives; the leaders of
two hosts have a third, for collectives (see `handshake.py` on how they are made).
"""

from __future__ import annotations

import select
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cordee.communication.shared_memory.connections import NO_EVENT, Connection, Pump, drive
from cordee.communication.shared_memory.handshake import Handshake, LinkSettings, Purpose
from cordee.communication.shared_memory.liveness import HEARTBEAT, Silence, forget_waits, watch_waits
from cordee.communication.shared_memory.rounds import describe
from cordee.core.errors import CommunicationError


@dataclass
class _Life:
    """What is known of one member of another host."""

    connection: Connection
    silence: Silence = field(default_factory=Silence)
    num_heard: int = 0
    said: str = ""  # why it left or gave up
    lost: str = ""  # how a connection to it ended
    outgoing: Pump | None = None
    incoming: Pump | None = None


_SAID = struct.Struct("!H")
_LIFE_BYTES = 512  # of a sign of life: mostly empty, or the reason why there will be no more


class Links:
    """The connections of one member of a group to the members on other hosts. `connect` makes them."""

    def __init__(self, rank: int, names: Sequence[str], settings: LinkSettings) -> None:
        """`names` are the members in words, by group rank."""
        self._rank, self._names, self._settings = rank, names, settings
        self.culprit: int | None = None  # the group rank that a wait failed for
        self.collectives: dict[int, Connection] = {}  # by group rank: the leaders of the other hosts, on a leader
        self.messages: dict[int, Connection] = {}
        self._lives: dict[int, _Life] = {}
        self._lock = threading.Lock()
        self._abandoned = ""
        self._beat: int | None = None
        watch_waits(self)

    def connect(self, store: Any, remote: Sequence[int], leaders: Sequence[int]) -> None:
        """Connect with the group ranks of other hosts, of which `leaders` lead theirs; empty if this one leads none.

        Collective over the group. Raises CommunicationError, which says who could not be reached, after the
        connecting timeout.
        """
        purposes = {
            rank: {Purpose.LIFE, Purpose.MESSAGES} | ({Purpose.COLLECTIVES} if rank in leaders else set())
            for rank in remote
        }
        try:
            made = Handshake(self._rank, self._names, self._settings, purposes, lambda: self._abandoned).run(store)
        except BaseException:
            forget_waits(self)
            raise
        for (rank, purpose), connection in made.items():
            if purpose is Purpose.LIFE:
                self._lives[rank] = _Life(connection)
            else:
                (self.collectives if purpose is Purpose.COLLECTIVES else self.messages)[rank] = connection
        self._beat = HEARTBEAT.add(self._show_life, min(self._settings.failure_timeout_s / 5, 1.0))

    def exchange(
        self,
        sent: Mapping[int, Sequence[Any]],
        received: Mapping[int, Sequence[Any]],
        sign: int,
        timeout_s: float,
        taken: Callable[[int], None] | None = None,
    ) -> None:
        """Send parts to leaders and receive parts from leaders, at the same time.

        Collective over those who are named. `sign` says what is being done; both ends must say the same. With `taken`
        one leader is received from, and `taken(i)` is called when part i has come and as many parts are sent: their
        memory is free then. Raises CommunicationError if a peer died, froze, gave up, does something else, or does
        not come in time.
        """
        progress = dict.fromkeys(sent, 0)
        pumps = [self._guard(rank, self._send(rank, parts, sign, progress)) for rank, parts in sent.items()]
        pumps += [
            self._guard(rank, self._receive(rank, parts, sign, progress, taken)) for rank, parts in received.items()
        ]
        peers = sorted({*sent, *received})
        deadline_s = time.monotonic() + timeout_s

        def look(has_moved: bool) -> None:
            for rank in peers:
                if has_moved:
                    self._lives[rank].num_heard += 1
                if (failure := self.find_failure(rank)) is not None:
                    raise CommunicationError(failure)
            if time.monotonic() > deadline_s:
                names = " and ".join(self._names[rank] for rank in peers)
                raise CommunicationError(
                    f"the exchange with {names} was not done within the timeout of {timeout_s:g} s: raise `timeout` of "
                    "init_process_group if the hosts may be that far apart, or look for a rank that skips the call"
                )

        drive(pumps, look)

    def _send(self, rank: int, parts: Sequence[Any], sign: int, progress: dict[int, int]) -> Pump:
        header = [_HEADER.pack(sign, sum(len(part) for part in parts))]
        for part in parts or [b""]:
            yield from self.collectives[rank].send(*header, part)
            header = []
            progress[rank] += 1

    def _receive(
        self,
        rank: int,
        parts: Sequence[Any],
        sign: int,
        progress: Mapping[int, int],
        taken: Callable[[int], None] | None,
    ) -> Pump:
        header = bytearray(_HEADER.size)
        yield from self.collectives[rank].receive(header)
        theirs, total = _HEADER.unpack(header)
        expected = sum(len(part) for part in parts)
        if theirs != sign or total != expected:
            raise CommunicationError(
                f"{self._names[rank]} is in {describe(theirs)} with {total} bytes while this rank is in "
                f"{describe(sign)} with {expected}: all ranks of a group must make the same collective calls in the "
                "same order, with the same sizes and types"
            )
        connection = self.collectives[rank]
        for index, part in enumerate(parts):
            yield from connection.receive(part)
            if taken is not None:
                while min(progress.values()) <= index:
                    yield connection.descriptor, select.POLLOUT
                taken(index)

    def _guard(self, rank: int, pump: Pump) -> Pump:
        """Name the peer in an error of the connection."""
        try:
            yield from pump
        except OSError as error:
            raise CommunicationError(self.explain(rank, error)) from error

    def explain(self, rank: int, error: OSError | CommunicationError) -> str:
        """Return why a connection ended, in the words of the other end where it said any."""
        life = self._lives[rank]
        for _ in range(10):  # what it said may still be on its way, on the other connection
            with self._lock:
                self._listen(life)
            if life.said:
                break
            time.sleep(0.01)
        lost = str(error)
        if isinstance(error, OSError):
            lost = f"{self._names[rank]} died or was cut off while {self._names[self._rank]} waited for it: {lost}"
        return self._lose(rank, life.said or lost)

    def _lose(self, rank: int, why: str) -> str:
        self._lives[rank].lost = why
        if self.culprit is None:
            self.culprit = rank
        return why

    def find_failure(self, rank: int) -> str | None:
        """Return what is wrong with a member of another host that is waited for, or None."""
        if self._abandoned:
            return self._abandoned
        life = self._lives[rank]
        if life.lost:
            return life.lost
        with self._lock:
            self._listen(life)
        now_s = time.monotonic()
        step_s, life.silence.sampled_s = now_s - life.silence.sampled_s, now_s
        silent_s = life.silence.observe(life.num_heard, 0, step_s)
        if silent_s < self._settings.failure_timeout_s:
            return None
        lost = (
            f"{self._names[rank]} is frozen or cut off: no sign of life for {silent_s:.1f} s; failure_timeout is "
            f"{self._settings.failure_timeout_s:g} s"
        )
        return self._lose(rank, life.said or lost)

    def abandon(self, reason: str) -> None:
        """Have every wait of this member for other hosts end with an error. Any thread may call."""
        self._abandoned = self._abandoned or reason

    def fail(self, reason: str) -> None:
        """Tell the members on other hosts why this one gives up, and end their waits."""
        self._end(reason)

    def close(self) -> None:
        """Leave in order."""
        self._end(f"{self._names[self._rank]} has left this process group while others still wait for it")

    def _end(self, reason: str) -> None:
        """Say why there will be no more, and close everything. What was sent before still arrives."""
        forget_waits(self)
        self.abandon(reason)
        if self._beat is not None:
            HEARTBEAT.remove(self._beat)
            self._beat = None
        with self._lock:
            for life in self._lives.values():
                self._speak(life, reason)
                self._listen(life)  # what lies unread when a connection is closed would take what was said with it
                life.connection.close()
        for connection in [*self.collectives.values(), *self.messages.values()]:
            connection.close()

    # Signs of life. A thread of the process gives them; whoever waits takes them.

    def _show_life(self) -> None:
        with self._lock:
            for life in self._lives.values():
                self._speak(life, "")
                self._listen(life)  # so that nothing piles up where nobody waits

    def _speak(self, life: _Life, reason: str) -> None:
        text = reason.encode()[: _LIFE_BYTES - _SAID.size]
        if life.outgoing is None or reason:
            record = (_SAID.pack(len(text)) + text).ljust(_LIFE_BYTES, b"\0")
            unsent = life.outgoing
            life.outgoing = _chain(unsent, life.connection.send(record))
        life.outgoing = _advance(life.outgoing)

    def _listen(self, life: _Life) -> None:
        if life.incoming is None:
            life.incoming = self._take_signs(life)
        life.incoming = _advance(life.incoming)

    def _take_signs(self, life: _Life) -> Pump:
        record = bytearray(_LIFE_BYTES)
        while True:
            yield from life.connection.receive(record)
            life.num_heard += 1
            (length,) = _SAID.unpack_from(record)
            if length:
                life.said = record[_SAID.size : _SAID.size + length].decode(errors="replace")


_HEADER = struct.Struct("!qq")  # what is being done, and how many bytes follow


def _gone() -> Pump:
    """A pump of a connection that has ended: waits for nothing that will come."""
    while True:
        yield NO_EVENT


def _advance(pump: Pump | None) -> Pump | None:
    """Let a pump do what it can now; None if it has ended. A connection that has ended is silent, no more."""
    try:
        if pump is not None:
            next(pump)
    except StopIteration:
        return None
    except (OSError, CommunicationError):
        return _gone()
    return pump


def _chain(*pumps: Pump | None) -> Pump:
    for pump in pumps:
        if pump is not None:
            yield from pump
