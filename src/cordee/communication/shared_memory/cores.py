"""Living on few cores: how long to look for a peer before giving the core up, and keeping peers on different ones."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

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
