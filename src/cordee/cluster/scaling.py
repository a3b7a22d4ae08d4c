"""Measures a team while it trains, and has it scaled where `autoscaling` says so."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable

import psutil

from cordee.cluster.autoscaling import Autoscaler, Observation, Size
from cordee.cluster.members import Membership
from cordee.core import Job
from cordee.core.errors import JobError

log = logging.getLogger("cordee.scaling")


class Scaling:
    """Looks at one run. `scale` is what `cordee scale` comes to; it raises JobError for what cannot be."""

    def __init__(self, job: Job, num_slots: int, scale: Callable[[int, int, str], str]) -> None:
        self._scale = scale
        self._every_s = job.cluster.autoscale_every_s
        self._threads = job.training.threads  # 0: the cores are shared out
        self._is_fixed = job.training.reproducible
        self._num_cores = num_slots
        self._autoscaler = Autoscaler(job.cluster.min_workers, job.cluster.max_workers or num_slots)
        self._since: tuple[int, float] | None = None  # step and time at the start of what is measured
        self._own_s: dict[int, list[float]] = {}  # by worker: what its own part of a step took

    def begin(self, step: int, now_s: float) -> None:
        """Measure anew: another generation has been formed, and its first steps are not like the others."""
        self._since, self._own_s = (step, now_s), {}
        psutil.cpu_percent()  # counts from here

    def hear(self, worker: int, seconds: float) -> None:
        """Take note of how long a worker's own part of a step took."""
        self._own_s.setdefault(worker, []).append(seconds)

    def look(self, membership: Membership, threads: int, now_s: float) -> None:
        """Decide when it is time to, and have done what was decided."""
        if self._since is None:
            self.begin(membership.step, now_s)
        assert self._since is not None
        if now_s - self._since[1] < self._every_s:
            return
        step, since_s = self._since
        is_settled = len(membership.members) == membership.num_workers == len(membership.active)
        if not is_settled or membership.step <= step or not self._own_s:
            self.begin(membership.step, now_s)
            return
        steps_per_s = (membership.step - step) / (now_s - since_s)
        own_s = statistics.mean(statistics.median(times) for times in self._own_s.values())
        seen = Observation(
            size=Size(membership.num_workers, threads or self._threads),
            steps_per_s=steps_per_s,
            busy=min(1.0, own_s * steps_per_s),
            free_cores=self._num_cores * (1 - psutil.cpu_percent() / 100),
        )
        log.info("%s", seen)
        self.begin(membership.step, now_s)
        self._act(seen)

    def _act(self, seen: Observation) -> None:
        change = self._autoscaler.decide(seen)
        if change is None:
            return
        size = change.size
        try:
            if self._is_fixed and size.threads != seen.size.threads:
                raise JobError("training.reproducible = true fixes the number of threads")
            self._scale(size.workers, size.threads if size.threads != seen.size.threads else 0, change.reason)
        except JobError as error:
            log.info("%s cannot be: %s", size, error)
            self._autoscaler.refused(size)
