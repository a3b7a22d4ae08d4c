"""Barriers in shared memory: who has come how far, and waiting for those who have not.

Every member has a stamp, a 64-bit counter in its own cache line that it alone writes, and two signature words
that say what it is doing. A collective is a sequence of *rounds*; in round r each member may write its buffer
r % 2, publishes its next stamp, waits for the stamps of those it reads from, and reads their buffers. A round may
have further stamps. Before a member writes its buffer or signature again it must have seen everybody publish in the
round between: they publish there only after they have read both. So one barrier per round is enough.

Memory order: a stamp must not become visible before the data it announces. x86-64 keeps stores in order (TSO),
and CPython moves an aligned 64-bit item of a memoryview with one instruction; nothing more is needed. Other
processors may reorder, which is why the backend does not use shared memory there (see `hosts.py`). The one
reordering x86 allows, a later load before an earlier store, can only make a sleeper miss its wake-up; sleeps
are bounded by a few milliseconds for that reason.
"""

from __future__ import annotations

import time
from collections.abc import Generator

from cordee.communication.shared_memory.cores import SpinPatience
from cordee.communication.shared_memory.futex import Futex, yield_core
from cordee.communication.shared_memory.layout import DOORBELL, SIGNATURE, Layout
from cordee.communication.shared_memory.liveness import PeerWatch, Verdict
from cordee.communication.shared_memory.segment import Segment
from cordee.communication.shared_memory.signature import describe

# What a collective waits for: control words of members, and the stamp they must reach.
Need = tuple[tuple[int, ...], int]
# A collective in progress: it yields what it waits for and is resumed, by any thread, when that is so.
Steps = Generator[Need, None, None]

# A wake-up costs about 50 µs on a virtual machine: give up the core politely this long before sleeping.
_YIELD_S = 0.0005
# A call to give up the core returns in 1–10 µs if nobody else wants it, and takes longer if a peer used it to arrive.
_PEER_TURN_S = 30e-6


class WaitTimeoutError(Exception):
    """The time given to a wait is over; the wait may be taken up again."""


class Rounds:
    """The stamps of one segment, seen by one member. Used by one thread at a time."""

    def __init__(self, segment: Segment, layout: Layout, member: int, watch: PeerWatch, group_key: int = 0) -> None:
        self.words = segment.words()
        self.watch = watch
        self._own = layout.member_word(member)
        members = range(layout.num_members)
        self.member_words = tuple(layout.member_word(index) for index in members)
        self.peer_words = tuple(layout.member_word(index) for index in members if index != member)
        self._bell = Futex(segment, layout, member, sleepers_at=layout.sleepers_at, bell_word=DOORBELL)
        self._sleepers = self._bell.sleepers
        self.stamp = 0
        self.parity = 0
        self._round_stamp = 0  # first stamp of the current round
        self._seen_by_all = 0  # every peer is known to have reached this stamp
        # Set during long operations. With a core for each member their waits end in sleep rather than in yielding: a
        # sleeper is scheduled as soon as it is woken, one who yields comes after other programs (4 MB on a busy
        # machine: 1.2 ms instead of 4). Short operations are better off yielding, since a wake-up often brings
        # both peers to one core.
        self.is_streaming = False
        self._patience = SpinPatience(member, layout.num_members, group_key)

    def open(self) -> Need | None:
        """Begin a round; return what must be true before this member may write or publish, if anything."""
        needed = self._round_stamp
        self._round_stamp = self.stamp + 1
        self.parity ^= 1
        if self._seen_by_all < needed:
            return self.peer_words, needed
        return None

    def publish(self, signature: int) -> int:
        """Announce what this member has written; return the new stamp."""
        stamp = self.stamp = self.stamp + 1
        words, own = self.words, self._own
        words[own + SIGNATURE + self.parity] = signature
        words[own] = stamp
        for sleeping in self._sleepers:
            if sleeping:
                self._bell.ring_sleepers()
                break
        return stamp

    def confirm(self, members: tuple[int, ...], signature: int) -> None:
        """Raise if one of the members, all waited for, does something else than we do in this round."""
        words, at = self.words, SIGNATURE + self.parity
        for word in members:
            if words[word + at] != signature:
                self._refuse(word, words[word + at], signature)

    def own_signature(self) -> int:
        return int(self.words[self._own + SIGNATURE + self.parity])

    def ready(self, need: Need) -> bool:
        members, stamp = need
        words = self.words
        return all(words[word] >= stamp for word in members)

    def wait(self, need: Need, timeout_s: float) -> None:
        """Wait until the members have reached the stamp.

        Raises CommunicationError when a peer died, froze or left, `WaitTimeoutError` after `timeout_s`.
        """
        members, stamp = need
        words = self.words
        spins = self._patience.stream_spins if self.is_streaming else self._patience.spins
        for word in members:
            while words[word] < stamp:
                spins -= 1
                if spins < 0:
                    self._wait_long(need, timeout_s)
                    break
        if members is self.peer_words and stamp > self._seen_by_all:
            self._seen_by_all = stamp

    def _wait_long(self, need: Need, timeout_s: float) -> None:
        started = now = time.monotonic()
        deadline = started + timeout_s
        sleep_after = started + (0.0 if self.is_streaming and self._patience.has_core_each else _YIELD_S)
        has_switched = False
        looks = 0
        while not self.ready(need):
            if now > deadline:
                raise WaitTimeoutError
            if now < sleep_after:
                yield_core()
                before, now = now, time.monotonic()
                has_switched |= now - before > _PEER_TURN_S
            else:
                looks += 1
                if looks > 1:
                    self._look_after_peers(need)
                self._bell.sleep(lambda: self.ready(need))
                now = time.monotonic()
        self._patience.learn(peer_needed_core=has_switched, waited_s=now - started)

    def _look_after_peers(self, need: Need) -> None:
        missing = [word for word in need[0] if self.words[word] < need[1]]
        verdict = self.watch.verdict(missing)
        # A peer may come, finish and exit between the two looks.
        if verdict is not None and not self.ready(need):
            raise self.watch.blame(verdict)

    def _refuse(self, word: int, theirs: int, ours: int) -> None:
        rank = self.watch.rank_of(word)
        message = (
            f"rank {rank} is in {describe(theirs)} while this rank is in {describe(ours)}: all ranks of a group "
            "must make the same collective calls in the same order, with the same sizes and types"
        )
        raise self.watch.blame(Verdict(rank, message))
