"""Barriers in shared memory: who has come how far, and waiting for those who have not.

Every member has a stamp, a 64-bit counter in its own cache line that it alone writes, and two signature words
that say what it is doing. A collective is a sequence of *rounds*; in round r each member may write its buffer
r % 2, publishes its next stamp, waits for the stamps of those it reads from, and reads their buffers. A round may
have further stamps. Before a member writes its buffer or signature again it must have seen everybody publish in the
round between: they publish there only after they have read both. So one barrier per round is enough.

Memory order: a stamp must not become visible before the data it announces. x86-64 keeps stores in order (TSO),
and CPython moves an aligned 64-bit item of a memoryview with one instruction; nothing more is needed. Other
processors may reorder, which is why the backend does not use shared memory there (see `this_host.own_host_id`). The one
reordering x86 allows, a later load before an earlier store, can only make a sleeper miss its wake-up; sleeps
are bounded by a few milliseconds for that reason.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Sequence
from enum import IntEnum

import torch

from cordee.communication.shared_memory.futex import Futex, yield_core
from cordee.communication.shared_memory.liveness import PeerFailure, PeerWatch
from cordee.communication.shared_memory.segment import FUTEX, SIGNATURE, Layout, Segment
from cordee.core.blocked_time import WAITED
from cordee.core.errors import CommunicationError

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


class CallsDifferError(CommunicationError):
    """Members make different calls: nobody is lost, and the same would happen in another group."""


class Rounds:
    """The stamps of one segment, seen by one member. Used by one thread at a time."""

    def __init__(self, segment: Segment, layout: Layout, member: int, watch: PeerWatch, group_key: int = 0) -> None:
        self.words = segment.words()
        self.watch = watch
        self._own = layout.member_word(member)
        members = range(layout.num_members)
        self.member_words = tuple(layout.member_word(index) for index in members)
        self.peer_words = tuple(layout.member_word(index) for index in members if index != member)
        self._futex = Futex(segment, layout, member, sleepers_at=layout.sleepers_at, futex_word=FUTEX)
        self._sleepers = self._futex.sleepers
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
        self.is_arriving = True  # the first long wait of a collective is for peers to arrive, later ones are its course

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
                self._futex.wake_sleepers()
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
        try:
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
                        self._check_peers(need)
                    self._futex.sleep(lambda: self.ready(need))
                    now = time.monotonic()
        finally:
            # Also for a peer that never arrives, because it was killed or is frozen.
            if self.is_arriving:
                WAITED.add(now - started)
        self.is_arriving = False
        self._patience.learn(peer_needed_core=has_switched, waited_s=now - started)

    def _check_peers(self, need: Need) -> None:
        missing = [word for word in need[0] if self.words[word] < need[1]]
        failure = self.watch.find_failure(missing)
        # A peer may come, finish and exit between the two looks.
        if failure is not None and not self.ready(need):
            raise self.watch.blame(failure)

    def _refuse(self, word: int, theirs: int, ours: int) -> None:
        rank = self.watch.rank_of(word)
        message = (
            f"rank {rank} is in {describe(theirs)} while this rank is in {describe(ours)}: all ranks of a group "
            "must make the same collective calls in the same order, with the same sizes and types"
        )
        self.watch.blame(PeerFailure(rank, message))
        raise CallsDifferError(message)


# Living on few cores: how long to look for a peer before giving the core up, and keeping peers on different ones.

# Looks at a stamp before the core is given up, at about 70 ns each: 50 µs when every member has a core, since a
# hand-over through the kernel costs as much; hardly any when a peer may need this core to arrive.
MIN_SPINS, MAX_SPINS = 20, 700
# Between two chunks of a long operation a peer is at most about as far behind as a chunk takes.
STREAM_SPINS = 2000

_SPREAD_EVERY_S = 0.02


def home_core(cores: Sequence[int], member: int, group_key: int) -> int:
    """Return the core that a member may move to: another for each member, and not the same for all groups."""
    return cores[(group_key + member) % len(cores)]


class SpinPatience:
    """How often one member looks for its peers before it gives up the core; it learns from how waits went."""

    def __init__(self, member: int, num_members: int, group_key: int) -> None:
        cores = sorted(os.sched_getaffinity(0))
        self._home = home_core(cores, member, group_key)
        self.has_core_each = num_members <= len(cores)
        self._max_spins = MAX_SPINS if self.has_core_each else MIN_SPINS
        self._next_spread = 0.0
        self.spins = self._max_spins
        self.stream_spins = STREAM_SPINS if self.has_core_each else MIN_SPINS

    def learn(self, *, peer_needed_core: bool, waited_s: float) -> None:
        """Note how a wait went that outlasted the looks, and whether another process ran on this core meanwhile."""
        if not peer_needed_core:
            self.spins = min(self.spins * 2, self._max_spins)
        elif waited_s < 0.001:
            self.spins = max(self.spins // 4, MIN_SPINS)
            if self.has_core_each:
                self._spread()

    def _spread(self) -> None:
        """Move this thread to a core of its own; the kernel is free to move it again.

        Linux likes to keep two processes that wake each other on one core, where each waits for the other to be
        scheduled: an all-reduce of 1 KB then took 115 µs instead of 16.
        """
        now = time.monotonic()
        if now < self._next_spread:
            return
        self._next_spread = now + _SPREAD_EVERY_S
        allowed = os.sched_getaffinity(0)
        if self._home in allowed:
            os.sched_setaffinity(0, {self._home})
            os.sched_setaffinity(0, allowed)


# What a member is doing, in one 64-bit word, so that ranks that disagree raise an error instead of hanging.
#
# bits 0–5 operation · 6–9 reduction · 10–15 element type · 16–27 root · 28–62 elements


class Operation(IntEnum):
    ALL_REDUCE = 1
    BROADCAST = 2
    ALL_GATHER = 3
    REDUCE = 4
    REDUCE_SCATTER = 5
    GATHER = 6
    SCATTER = 7
    ALL_TO_ALL = 8
    BARRIER = 9


_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.bool,
)  # fmt: skip
DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES, start=1)}  # 0: raw bytes
_REDUCTIONS = ("", "sum", "average", "product", "minimum", "maximum", "bitwise and", "bitwise or", "bitwise xor")
_COUNT_MASK = (1 << 35) - 1


def sign(operation: Operation, *, reduction: int = 0, dtype_code: int = 0, root: int = 0, count: int = 0) -> int:
    """Return the word for an operation; counts beyond 2**35 differ only by their low bits."""
    return operation | reduction << 6 | dtype_code << 10 | (root & 0xFFF) << 16 | (count & _COUNT_MASK) << 28


def describe(signature: int) -> str:
    """Return the words for a signature, for an error message."""
    try:
        name = Operation(signature & 0x3F).name.lower()
    except ValueError:
        return "nothing yet"
    reduction, dtype_code = signature >> 6 & 0xF, signature >> 10 & 0x3F
    root, count = signature >> 16 & 0xFFF, signature >> 28
    if name == "barrier":
        return "barrier"
    kind = str(_DTYPES[dtype_code - 1]).removeprefix("torch.") if 0 < dtype_code <= len(_DTYPES) else "bytes"
    text = f"{name}({count} × {kind}"
    if 0 < reduction < len(_REDUCTIONS):
        text += f", {_REDUCTIONS[reduction]}"
    if name in ("broadcast", "reduce", "gather", "scatter"):
        text += f", root {root}"
    return text + ")"
