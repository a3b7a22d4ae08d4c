"""Workers that compute on shared cores and wait for each other, played through event by event. Pure."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

TINY_S = 1e-12  # differences of times that are only rounding


class Task(NamedTuple):
    """A piece of a worker's work."""

    key: Hashable
    seconds: float  # on a core of its own
    needs: tuple[tuple[Hashable, float], ...] = ()  # tasks that must have ended, and how long their news is on its way
    is_computed: bool = True  # takes a core; else it is only time that passes


class Played(NamedTuple):
    """How it went."""

    end_s: float
    waited_s: float  # by all workers, for others' news


def play(orders: Sequence[Sequence[Task]], num_lanes: float = math.inf) -> Played:
    """Play every worker's tasks in their order; at most `num_lanes` compute at once, and share evenly beyond that.

    A worker that waits, for another's task or for time to pass, leaves its core to the others.
    """
    places = [0] * len(orders)
    ended_s: dict[Hashable, float] = {}
    left: dict[int, float] = {}  # of each worker's present task, in seconds of a core
    now_s = waited_s = 0.0
    while True:
        wake_s, num_waiting, num_computing = math.inf, 0, 0
        for worker, order in enumerate(orders):
            if places[worker] == len(order):
                continue
            task = order[places[worker]]
            if worker not in left:
                begin_s = max((ended_s.get(key, math.inf) + delay_s for key, delay_s in task.needs), default=now_s)
                if begin_s > now_s + TINY_S:
                    wake_s = min(wake_s, begin_s)
                    num_waiting += 1
                    continue
                left[worker] = task.seconds
            num_computing += task.is_computed
        if not left and wake_s == math.inf:
            assert not num_waiting, "somebody waits for what nobody does"
            return Played(now_s, waited_s)
        pace = min(1.0, num_lanes / num_computing) if num_computing else 1.0
        paces = {worker: pace if orders[worker][places[worker]].is_computed else 1.0 for worker in left}
        spent_s = max(0.0, min([wake_s - now_s, *(rest / paces[worker] for worker, rest in left.items())]))
        now_s += spent_s
        waited_s += spent_s * num_waiting
        for worker in list(left):
            left[worker] -= spent_s * paces[worker]
            if left[worker] <= TINY_S:
                del left[worker]
                ended_s[orders[worker][places[worker]].key] = now_s
                places[worker] += 1
