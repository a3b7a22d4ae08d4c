"""What follows when workers are lost, are too few, or hold the others up: decided without I/O."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cordee.core.settings import Cluster

JOINS_AGAIN = "if it is heard again it joins again"  # what is said of a worker that is given up and not replaced
MOST_LOSSES_IN_ONE_STEP = 3  # as many recoveries in a row without a step in between are no accident


@dataclass(frozen=True)
class FailureReport:
    """Why a worker cannot continue. A consequence is the loss of a peer, which was somebody else's doing."""

    worker_index: int
    step: int
    reason: str
    traceback: str = ""
    is_consequence: bool = False
    is_final: bool = True  # nothing better will be heard of it; an exit is followed by the worker's own account
    at_s: float = 0.0

    def describe(self) -> str:
        return f"worker {self.worker_index} {self.reason} (in step {self.step + 1})"


@dataclass
class Restarts:
    """Counts what was lost, and when."""

    max_restarts: int
    num_restarts: int = 0
    num_in_step: int = 0  # recoveries since the last step that was taken
    last_step: int = -2

    @property
    def can_replace(self) -> bool:
        """Whether there is a replacement left."""
        return self.num_restarts < self.max_restarts

    def may_replace(self) -> bool:
        """Return whether there is a replacement left, and count it."""
        if not self.can_replace:
            return False
        self.num_restarts += 1
        return True

    def recover(self, step: int, losses: Sequence[FailureReport], reason: str = "") -> str | None:
        """Record that a team ended after `step` steps (-1 for none); return why the run must end, if it must."""
        self.num_in_step = self.num_in_step + 1 if step <= self.last_step else 1
        self.last_step = max(step, self.last_step)
        if self.num_in_step < MOST_LOSSES_IN_ONE_STEP:
            return None
        if not losses:
            return f"the team could not take step {max(step, 0) + 1} in {self.num_in_step} attempts: {reason}"
        last = f"worker {losses[-1].worker_index} {losses[-1].reason}"
        return f"a worker was lost in each of {self.num_in_step} attempts at step {max(step, 0) + 1}; last {last}"


@dataclass(frozen=True)
class RemainingWorkers:
    """How many workers are left, and after which loss."""

    loss: str  # in words
    left: int
    needed: int

    def describe(self) -> str:
        return f"{self.loss}; {self.left} of at least {self.needed} workers are left"

    def describe_end(self, cluster: Cluster) -> str:
        """Return why the run cannot continue."""
        return f"{self.describe()}, and all {cluster.max_restarts} replacements are used up (cluster.max_restarts)"

    def describe_wait(self, cluster: Cluster, run_dir: Path) -> str:
        """Return what is waited for, and how it comes about; nothing if the run does not wait."""
        wait_s, run = cluster.wait_for_workers_s, shlex.quote(str(run_dir))
        if not wait_s:
            return ""
        how = f"`cordee scale {run} {self.needed}` or `cordee join {run}`"
        return f"{self.describe()}; waiting {wait_s:g} s for others, who come with {how}"


@dataclass(frozen=True)
class Shortage:
    """Others are waited for. Written down, so that a coordinator that comes back waits no longer."""

    end_reason: str  # of the run when nobody has come
    until_s: float

    @classmethod
    def begin(cls, end_reason: str, cluster: Cluster, now_s: float) -> Shortage:
        return cls(end_reason, now_s + cluster.wait_for_workers_s)

    def is_past(self, now_s: float) -> bool:
        """Whether nobody has come in time."""
        return now_s >= self.until_s


RATIO = 5.0  # times the median of the others
NUM_STEPS = 3  # in a row: once or twice may be an accident
LEAST_EXCESS_S = 0.02  # below, what the system does beside the training is of the same size


@dataclass(frozen=True)
class Straggler:
    """A worker that is much slower than the others."""

    worker: str
    step: int
    seconds: float  # that its last step took, without waiting for others
    median_s: float  # of the others

    def describe(self) -> str:
        return (
            f"{self.worker.replace('-', ' ')} is slow: step {self.step} took it {self.seconds:.2g} s, "
            f"{self.seconds / self.median_s:.1f} times the median of the others"
        )


@dataclass
class Stragglers:
    """Compares the workers of a team, step by step."""

    _last_s: dict[str, float] = field(default_factory=dict)
    _num_slow: dict[str, int] = field(default_factory=dict)  # steps in a row

    def record(self, worker: str, step: int, seconds: float) -> Straggler | None:
        """Record a worker's own time for a step. Returns it once when it turns out to be a straggler."""
        self._last_s[worker] = seconds
        others = [value for name, value in self._last_s.items() if name != worker]
        if not others:
            return None
        median_s = statistics.median(others)
        if seconds < max(RATIO * median_s, median_s + LEAST_EXCESS_S):
            self._num_slow[worker] = 0
            return None
        self._num_slow[worker] = self._num_slow.get(worker, 0) + 1
        if self._num_slow[worker] != NUM_STEPS:
            return None
        return Straggler(worker, step, seconds, max(median_s, 1e-6))

    def forget(self, worker: str | None = None) -> None:
        """Leave a worker that is gone out, or begin again with another team."""
        if worker is None:
            self._last_s.clear()
            self._num_slow.clear()
        else:
            self._last_s.pop(worker, None)
            self._num_slow.pop(worker, None)
