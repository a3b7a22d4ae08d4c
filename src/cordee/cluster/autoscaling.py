"""How many workers a run should have, and how many threads each: decided from what was measured, without I/O.

One change at a time, and each is measured: what did not pay is taken back and not tried again. `Scaling` measures a
team while it trains, and has it scaled where the `Autoscaler` says so.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from cordee.core import Job
from cordee.core.errors import JobError

LEAST_GAIN = 1.05  # by which a larger team must be faster, to stay
MOST_LOSS = 0.9  # of its speed that a smaller team must keep, to stay
FALLEN = 0.7  # of the best speed with as many workers: something takes their time
IDLING = 0.5  # of a step that workers compute; below, they mostly wait


@dataclass(frozen=True)
class Size:
    """A team: how many workers, with how many threads each; 0 where all cores are shared out among them."""

    workers: int
    threads: int

    def __str__(self) -> str:
        return f"{self.workers} workers" + (f" x {self.threads} threads" if self.threads > 1 else "")


@dataclass(frozen=True)
class Observation:
    """What was measured since the last decision. The global batch stays, so steps say how fast it is."""

    size: Size
    steps_per_s: float
    busy: float  # share of a step that the workers compute, 0 to 1, the mean of them
    free_cores: float  # of the host


@dataclass(frozen=True)
class Change:
    """What to do, and why."""

    size: Size
    reason: str


@dataclass
class Autoscaler:
    """Proposes sizes between the limits. Whoever asks must say when a proposal was `refused`."""

    min_workers: int
    max_workers: int
    best: dict[Size, float] = field(default_factory=dict)  # steps per second
    barred: set[Size] = field(default_factory=set)  # did not pay, or cannot be
    before: tuple[Size, float] | None = None  # the size and speed that the present one is compared with

    def decide(self, seen: Observation) -> Change | None:
        """Return a change, or None to leave the team as it is."""
        size, speed = seen.size, seen.steps_per_s
        if self.before is not None and (back := self._judge(size, speed)) is not None:
            return back
        best = self.best[size] = max(speed, self.best.get(size, 0.0))
        if seen.busy < IDLING and (change := self._propose(_fewer(size), seen, f"workers compute {seen.busy:.0%} of")):
            return change
        larger = _more(size)
        if speed < FALLEN * best and (change := self._propose(larger, seen, f"the speed fell from {best:.3g} to")):
            return change
        if seen.free_cores >= max(1, size.threads) and (change := self._propose(larger, seen, "cores are free:")):
            return change
        if size.threads and seen.free_cores >= size.workers and size.workers >= self.max_workers:
            return self._propose(Size(size.workers, size.threads + 1), seen, "cores are free, workers are enough:")
        return None

    def refused(self, size: Size) -> None:
        """Record that a proposal cannot be."""
        self.barred.add(size)
        self.before = None

    def _judge(self, size: Size, speed: float) -> Change | None:
        """Compare with the size before; return the way back if the change did not pay."""
        assert self.before is not None
        (old, old_speed), self.before = self.before, None
        if old == size:
            return None  # the change did not come about
        # 0 threads are as many as the job says, the same for both sizes.
        is_larger = size.workers * max(1, size.threads) > old.workers * max(1, old.threads)
        needed = old_speed * (LEAST_GAIN if is_larger else MOST_LOSS)
        if speed >= needed:
            if not is_larger:
                self.barred.add(old)  # as fast with fewer: back would only be forth again
            return None
        self.barred.add(size)
        return Change(old, f"{size} took {speed:.3g} steps a second, {old} took {old_speed:.3g}")

    def _propose(self, size: Size, seen: Observation, why: str) -> Change | None:
        if size in self.barred or not self.min_workers <= size.workers <= self.max_workers:
            return None
        self.before = (seen.size, seen.steps_per_s)
        return Change(size, _reason(why, seen))


def _reason(why: str, seen: Observation) -> str:
    if why.startswith("workers compute"):
        return f"{why} the time and wait for the rest"
    if why.startswith("the speed"):
        return f"{why} {seen.steps_per_s:.3g} steps a second"
    return f"{why} {seen.free_cores:.1f}"


def _fewer(size: Size) -> Size:
    return Size(size.workers - 1, size.threads)


def _more(size: Size) -> Size:
    return Size(size.workers + 1, size.threads)


log = logging.getLogger("cordee.scaling")


class Scaling:
    """Looks at one run. `scale` is what `cordee scale` comes to; it raises JobError for what cannot be."""

    def __init__(self, job: Job, num_slots: int, scale: Callable[[int, int, str], str]) -> None:
        self._scale = scale
        self._every_s = job.cluster.autoscale_every_s
        self._threads = job.training.num_threads  # 0: the cores are shared out
        self._is_fixed = job.training.reproducible
        self._num_cores = num_slots
        self._autoscaler = Autoscaler(job.cluster.min_workers, job.cluster.max_workers or num_slots)
        self._since: tuple[int, float] | None = None  # step and time at the start of what is measured
        self._own_s: dict[int, list[float]] = {}  # by worker: what its own part of a step took

    def begin(self, step: int, now_s: float) -> None:
        """Measure again: another generation has been formed, and its first steps are not like the others."""
        self._since, self._own_s = (step, now_s), {}
        psutil.cpu_percent()  # counts from here

    def record(self, worker: int, seconds: float) -> None:
        """Record how long a worker's own part of a step took."""
        self._own_s.setdefault(worker, []).append(seconds)

    def update(self, step: int, num_workers: int, threads: int, now_s: float) -> None:
        """Decide when it is time to, and have done what was decided. `num_workers` is 0 while some come or go."""
        if self._since is None:
            self.begin(step, now_s)
        assert self._since is not None
        since_step, since_s = self._since
        if now_s - since_s < self._every_s:
            return
        if not num_workers or step <= since_step or not self._own_s:
            self.begin(step, now_s)
            return
        steps_per_s = (step - since_step) / (now_s - since_s)
        own_s = statistics.mean(statistics.median(times) for times in self._own_s.values())
        seen = Observation(
            size=Size(num_workers, threads or self._threads),
            steps_per_s=steps_per_s,
            busy=min(1.0, own_s * steps_per_s),
            free_cores=self._num_cores * (1 - psutil.cpu_percent() / 100),
        )
        log.info("%s", seen)
        self.begin(step, now_s)
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
