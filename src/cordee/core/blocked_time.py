"""How long the training of this process was held up by communication, counted where that happens.

Two counts. `BLOCKED` is the time in which the thread that trains could do nothing but communicate. `WAITED` is the time
in which a peer was waited for that had not arrived yet. What is blocked and not waited is the exchange itself.
"""

from __future__ import annotations

from threading import get_ident
from time import perf_counter_ns


class BlockedTime:
    """Counts the time inside `with BLOCKED:`, of one thread; nested blocks count once. Off until `start`."""

    def __init__(self) -> None:
        self.ns = 0
        self.is_on = False
        self._thread = 0  # no thread has this number
        self._depth = 0
        self._since_ns = 0

    def start(self) -> None:
        """Count the calling thread from now on."""
        self._thread, self._depth, self.is_on = get_ident(), 0, True

    def stop(self) -> None:
        self._thread, self.is_on = 0, False

    def __enter__(self) -> None:
        if get_ident() == self._thread:
            self._depth += 1
            if self._depth == 1:
                self._since_ns = perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        if get_ident() == self._thread:
            self._depth -= 1
            if self._depth == 0:
                self.ns += perf_counter_ns() - self._since_ns


class WaitedTime:
    """Adds up waits for peers. One thread at a time waits in a group; a lost addition of two groups is harmless."""

    def __init__(self) -> None:
        self.ns = 0

    def add(self, seconds: float) -> None:
        self.ns += int(seconds * 1e9)


BLOCKED = BlockedTime()
WAITED = WaitedTime()
