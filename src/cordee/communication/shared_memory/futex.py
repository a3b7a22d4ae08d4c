"""Sleeping until another process of the host wakes this one, without a kernel object that could be left behind.

Each member of a segment has a word on which it sleeps with futex, and a byte that is set while it does, so
that a wake-up costs one load when nobody sleeps. Sleeps are a few milliseconds at most: see `rounds.py` on the one
wake-up that can be missed.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

from cordee.communication.shared_memory.segment import Layout, Segment

SLEEP_S = 0.004  # bounds what a missed wake-up costs, and how soon a dead peer is noticed

_SLOW_YIELD_S = 1e-3  # shorter ones were to the other end of the call; a program that computes keeps the core longer
_BUSY_S = 0.1  # how long a machine is taken for busy after a slow one

_SYS_FUTEX = 202  # x86-64
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_EVERYBODY = 1 << 30

_libc = ctypes.CDLL(None)
_libc.syscall.restype = ctypes.c_long
_libc.syscall.argtypes = (
    ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int,
)  # fmt: skip

# Gives up the core and, unlike os.sched_yield in CPython 3.11, the interpreter lock.
yield_core: Callable[[], int] = _libc.sched_yield


class Patience:
    """Waits by yielding the core while nobody else wants it.

    Who yields to another program comes back when that has used up its slice, whereas a sleeper that is woken runs at
    once; on an idle machine it is the sleeper's core that needs time to wake up.
    """

    def __init__(self) -> None:
        self._busy_until_s = 0.0

    def yields(self, now_s: float) -> bool:
        """Yield once; False if the machine is busy, and it is better to sleep."""
        if now_s < self._busy_until_s:
            return False
        yield_core()
        later_s = time.monotonic()
        if later_s - now_s > _SLOW_YIELD_S:
            self._busy_until_s = later_s + _BUSY_S
        return True


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


_SLEEP = _Timespec(0, int(SLEEP_S * 1e9))


def futex_wait(address: int, heard: int, limit_s: float) -> None:
    """Sleep while the word at `address` is `heard`, until woken, at most `limit_s`. Lets other threads run."""
    limit = _Timespec(int(limit_s), int(limit_s % 1 * 1e9))
    _libc.syscall(_SYS_FUTEX, address, _FUTEX_WAIT, heard & 0xFFFFFFFF, ctypes.byref(limit), None, 0)


def futex_wake(address: int) -> None:
    """Wake everybody who sleeps on the word at `address`."""
    _libc.syscall(_SYS_FUTEX, address, _FUTEX_WAKE, _EVERYBODY, None, None, 0)


class Futex:
    """The futex words of the members of a segment, for one purpose, as one member uses them."""

    def __init__(self, segment: Segment, layout: Layout, member: int, *, sleepers_at: int, futex_word: int) -> None:
        self._words = segment.words()
        self._address = segment.address
        self._layout = layout
        self._member = member
        self._futex_word = futex_word
        self._bytes = segment.bytes_at(sleepers_at, layout.num_members)
        self.sleepers = segment.words(sleepers_at, layout.sleeper_words)
        """One byte per member, eight to a word: all zero when nobody sleeps."""

    def sleep(self, is_ready: Callable[[], bool]) -> None:
        """Sleep until rung, at most a few milliseconds, and not at all if `is_ready()`."""
        word = self._layout.member_word(self._member) + self._futex_word
        heard = self._words[word]
        self._bytes[self._member] = 1
        try:
            if not is_ready():
                _libc.syscall(
                    _SYS_FUTEX, self._address + 8 * word, _FUTEX_WAIT, heard & 0xFFFFFFFF, ctypes.byref(_SLEEP), None, 0
                )
        finally:
            self._bytes[self._member] = 0

    def wake_sleepers(self) -> None:
        """Wake every member that sleeps."""
        for member, sleeping in enumerate(self._bytes):
            if sleeping and member != self._member:
                self._ring(member)

    def wake(self, member: int) -> None:
        """Wake one member if it sleeps."""
        if self._bytes[member]:
            self._ring(member)

    def _ring(self, member: int) -> None:
        word = self._layout.member_word(member) + self._futex_word
        self._words[word] += 1
        futex_wake(self._address + 8 * word)
