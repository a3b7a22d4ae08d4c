"""Whether the peers of a host still live: dead ones are noticed at once, frozen ones after a while.

A dead peer is one whose pidfd is readable: the kernel says so, no clock is involved. A frozen peer is one that
for `failure_timeout_s` gave no sign of life, neither of two: a counter that a small thread of each process
moves, and the processor time of the process in /proc. A peer that computes, even without ever letting go of
the interpreter lock, uses processor time; one that sleeps or waits for a disk still moves its counter; a
stopped one (SIGSTOP, debugger, frozen cgroup) does neither.
"""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from cordee.communication.shared_memory.segment import CULPRIT, LIFE, STATE, Layout
from cordee.core.errors import CommunicationError

ACTIVE, LEFT, FAILED = 1, 2, 3

_SAMPLE_S = 0.05  # /proc is read at most this often
_MAX_STEP_S = 0.5  # a longer gap between samples means that we were not running ourselves: not held against peers


@dataclass(frozen=True)
class Identity:
    """One process of a host; the start time distinguishes it from a later one with the same pid."""

    rank: int  # in the whole job, for messages
    pid: int
    started: int

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid})"

    @classmethod
    def own(cls, rank: int) -> Identity:
        return cls(rank, os.getpid(), read_stat(os.getpid()).started)


@dataclass(frozen=True)
class Stat:
    """What /proc/<pid>/stat says of a process."""

    state: str
    cpu_ticks: int
    started: int


def read_stat(pid: int) -> Stat:
    """Return the state of a process; OSError if there is none."""
    text = Path(f"/proc/{pid}/stat").read_text()
    fields = text[text.rindex(")") + 2 :].split()  # the name before it may hold spaces and brackets
    return Stat(state=fields[0], cpu_ticks=int(fields[11]) + int(fields[12]), started=int(fields[19]))


@dataclass
class Silence:
    """How long a peer has given no sign of life, counted only while we ourselves were running."""

    life: int = -1
    cpu_ticks: int = -1
    silent_s: float = 0.0
    sampled_s: float = field(default_factory=time.monotonic)

    def sample(self, pid: int, life: int, now: float) -> tuple[float, str]:
        """Look at a process, unless that was done just now; return its seconds of silence so far and its state."""
        step_s = now - self.sampled_s
        if step_s < _SAMPLE_S:
            return 0.0, ""
        self.sampled_s = now
        try:
            stat = read_stat(pid)
        except OSError:  # it just died: its pidfd says so at the next look
            return 0.0, ""
        return self.observe(life, stat.cpu_ticks, step_s), stat.state

    def observe(self, life: int, cpu_ticks: int, step_s: float) -> float:
        """Take a sample made `step_s` after the one before; return the seconds of silence so far."""
        if life != self.life or cpu_ticks != self.cpu_ticks:
            self.life, self.cpu_ticks, self.silent_s = life, cpu_ticks, 0.0
        else:
            self.silent_s += min(step_s, _MAX_STEP_S)
        return self.silent_s


@dataclass(frozen=True)
class PeerFailure:
    """Who is to blame for a wait that will never end, and the message that says so."""

    rank: int
    message: str


@dataclass
class _Peer:
    identity: Identity
    word: int
    pidfd: int
    silence: Silence = field(default_factory=Silence)


class PeerWatch:
    """Looks after the other members of a segment on behalf of whoever waits for them."""

    def __init__(
        self, words: memoryview, layout: Layout, member: int, identities: list[Identity], failure_timeout_s: float
    ) -> None:
        self._words = words
        self._own = layout.member_word(member)
        self._rank = identities[member].rank
        self._failure_timeout_s = failure_timeout_s
        self._lock = threading.Lock()
        self._poll = select.poll()
        self._peers: dict[int, _Peer] = {}
        self._abandoned = ""
        words[self._own + STATE] = ACTIVE
        for index, identity in enumerate(identities):
            if index != member:
                pidfd = open_process(identity.pid, identity.started)
                if pidfd is None:
                    raise CommunicationError(f"{identity} died while the process group was formed")
                self._poll.register(pidfd, select.POLLIN)
                self._peers[pidfd] = _Peer(identity, layout.member_word(index), pidfd)
        watch_waits(self)

    def rank_of(self, word: int) -> int:
        """Return the rank of the peer whose control words start at `word`."""
        return next(peer.identity.rank for peer in self._peers.values() if peer.word == word)

    def find_failure(self, missing: Collection[int]) -> PeerFailure | None:
        """Return what is wrong with the members whose control words are `missing`, or None.

        Only those that are waited for count: another one may have finished and gone in good order.
        """
        with self._lock:  # collectives and messages may wait in different threads
            return self._check_peers(missing)

    def blame(self, failure: PeerFailure) -> CommunicationError:
        """Mark this member as failed, so that the others stop too; return the error to raise."""
        self._words[self._own + CULPRIT] = failure.rank + 1
        self._words[self._own + STATE] = FAILED
        return CommunicationError(failure.message)

    def give_up(self) -> None:
        """Mark this member as failed, for a reason of its own unless another was blamed already."""
        if self._words[self._own + STATE] != FAILED:
            self.blame(PeerFailure(self._rank, ""))

    def abandon(self, reason: str) -> None:
        """Have every wait of this member end with an error. Any thread may call."""
        self._abandoned = reason

    @property
    def life_word(self) -> int:
        """The counter that this process must move to be seen alive."""
        return self._own + LIFE

    def close(self) -> None:
        """Stop watching, and announce to the peers that this member has left in order unless it failed."""
        forget_waits(self)
        if self._words[self._own + STATE] == ACTIVE:
            self._words[self._own + STATE] = LEFT
        with self._lock:
            for pidfd in self._peers:
                os.close(pidfd)
            self._peers.clear()
            self._poll = select.poll()

    def _check_peers(self, missing: Collection[int]) -> PeerFailure | None:
        if self._abandoned:
            return PeerFailure(self._rank, self._abandoned)
        peers = [peer for peer in self._peers.values() if peer.word in missing]
        gone = {fd for fd, _ in self._poll.poll(0)}
        for peer in peers:
            state = self._words[peer.word + STATE]
            if state == FAILED:
                return self._reported_failure(peer)
            if state == LEFT:
                return PeerFailure(
                    peer.identity.rank,
                    f"{peer.identity} has left this process group while rank {self._rank} still waits for it: all "
                    "ranks must make the same collective calls before they destroy the group",
                )
        dead = [peer for peer in peers if peer.pidfd in gone]
        if dead:
            names = " and ".join(str(peer.identity) for peer in dead)
            return PeerFailure(dead[0].identity.rank, f"{names} died while rank {self._rank} waited for it")
        return self._find_frozen(peers)

    def _reported_failure(self, peer: _Peer) -> PeerFailure:
        culprit = self._words[peer.word + CULPRIT] - 1
        if culprit in (peer.identity.rank, self._rank):
            return PeerFailure(peer.identity.rank, f"{peer.identity} gave up in the middle of a collective operation")
        return PeerFailure(culprit, f"rank {culprit} died, froze or failed: {peer.identity} noticed it first")

    def _find_frozen(self, peers: list[_Peer]) -> PeerFailure | None:
        now = time.monotonic()
        for peer in peers:
            silent_s, state = peer.silence.sample(peer.identity.pid, self._words[peer.word + LIFE], now)
            if silent_s >= self._failure_timeout_s:
                return PeerFailure(
                    peer.identity.rank,
                    f"{peer.identity} is frozen: no sign of life for {silent_s:.1f} s, process state {state}. "
                    f"Continue or kill that process; failure_timeout is {self._failure_timeout_s:g} s",
                )
        return None


class Abandonable(Protocol):
    """What waits for peers, of this host or of others, and can be told that it waits in vain."""

    def abandon(self, reason: str) -> None: ...


_waiting: weakref.WeakSet[Abandonable] = weakref.WeakSet()


def watch_waits(one: Abandonable) -> None:
    """Have `abandon_groups` end the waits of `one`."""
    _waiting.add(one)


def forget_waits(one: Abandonable) -> None:
    _waiting.discard(one)


def abandon_groups(reason: str) -> None:
    """Have everything that waits for peers fail. For when somebody else knows that it waits in vain."""
    for one in list(_waiting):
        one.abandon(reason)


def counter(words: memoryview, word: int) -> Callable[[], None]:
    """Return what moves a life counter by one."""

    def move() -> None:
        words[word] += 1

    return move


class Heartbeat:
    """One daemon thread per process that shows its peers, of this host and of others, that it lives."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._targets: dict[int, tuple[Callable[[], None], float]] = {}
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._next_key = 0

    def add(self, beat: Callable[[], None], interval_s: float) -> int:
        """Call `beat` at least every `interval_s` from now on; return the key to stop it with."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # not alive: we are a forked child
                self._thread = threading.Thread(target=self._beat, name="cordee-heartbeat", daemon=True)
                self._thread.start()
            self._next_key += 1
            self._targets[self._next_key] = (beat, interval_s)
            self._wake.set()
            return self._next_key

    def remove(self, key: int) -> None:
        """Stop calling; the thread ends with the last one."""
        with self._lock:
            self._targets.pop(key, None)
            thread = self._thread if not self._targets else None
            self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=1.0)

    def _beat(self) -> None:
        while True:
            with self._lock:
                if not self._targets:
                    self._thread = None
                    return
                self._wake.clear()
                interval_s = min(interval for _, interval in self._targets.values())
                for beat, _ in self._targets.values():
                    beat()
            self._wake.wait(interval_s)


HEARTBEAT = Heartbeat()


def open_process(pid: int, started: int) -> int | None:
    """Return a descriptor that is readable once the process has ended; None if it has, or is a later one of its pid."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        is_same = read_stat(pid).started == started
    except OSError:
        is_same = False
    if not is_same:
        os.close(pidfd)
    return pidfd if is_same else None
