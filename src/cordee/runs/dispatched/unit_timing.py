"""How long workers of a served run have their units of work in hand: who is slow, and what is late."""

from __future__ import annotations

import time
from collections.abc import Callable

from cordee.cluster.stragglers import Stragglers


class UnitTiming:
    """Not remembered by coordinators that come back: how long units were in hand before is not known."""

    def __init__(self, emit: Callable[..., None]) -> None:
        self._emit = emit
        self._taken_s: dict[int, float] = {}  # unit -> since when somebody has it
        self._stragglers = Stragglers()

    def begin(self, unit: int) -> None:
        """Take note that a unit is handed out."""
        self._taken_s[unit] = time.monotonic()

    def end(self, unit: int, worker: str, worker_index: int, step: int) -> None:
        """Take note that a worker is done with a unit of `step`, and tell if that took it much longer than others."""
        taken_s = self._taken_s.pop(unit, None)
        if taken_s is None:
            return
        slow = self._stragglers.hear(worker, step, time.monotonic() - taken_s)
        if slow is not None:
            self._emit("straggler", worker=worker_index, step=step, seconds=slow.seconds, median_seconds=slow.median_s)
            self._emit("warning", message=slow.describe())

    def forget(self, worker: str) -> None:
        """Compare nobody with a worker that is gone."""
        self._stragglers.forget(worker)

    def late(self, limit_s: float) -> list[tuple[int, float]]:
        """Return the units that have been in hand for longer, and for how long."""
        now_s = time.monotonic()
        waits = [(unit, now_s - taken_s) for unit, taken_s in self._taken_s.items()]
        return [(unit, wait_s) for unit, wait_s in waits if wait_s > limit_s]

    def give_up(self, unit: int) -> None:
        """Take note that a unit was taken away from who had it."""
        del self._taken_s[unit]
