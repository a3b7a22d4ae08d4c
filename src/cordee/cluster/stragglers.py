"""Who holds the others up: decided from the time that each worker's own computing takes, without I/O."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

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
            f"{self.worker} is slow: step {self.step} took it {self.seconds:.2g} s, "
            f"{self.seconds / self.median_s:.1f} times the median of the others"
        )


@dataclass
class Stragglers:
    """Compares the workers of a team, step by step."""

    _last_s: dict[str, float] = field(default_factory=dict)
    _num_slow: dict[str, int] = field(default_factory=dict)  # steps in a row

    def hear(self, worker: str, step: int, seconds: float) -> Straggler | None:
        """Take note of a worker's own time for a step. Returns it once when it turns out to be a straggler."""
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
        """Leave a worker that is gone out, or begin anew with another team."""
        if worker is None:
            self._last_s.clear()
            self._num_slow.clear()
        else:
            self._last_s.pop(worker, None)
            self._num_slow.pop(worker, None)
