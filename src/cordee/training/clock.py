"""How long one worker trains: in all, without evaluating and saving, and its own part of a step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

STEP_TIME_EVERY_S = 0.02  # at most so often a worker tells how long its own computing takes: about 0.2 % of the time


class TrainingClock:
    """Measures the calls of a trainer's `run`, one after the other."""

    def __init__(self) -> None:
        self._base_elapsed_s = 0.0  # of the run, before this call
        self._started_s = time.perf_counter()
        self._away_s = 0.0  # spent evaluating and saving in this call
        self._reported = (0, self._started_s)  # samples and time at the last step event
        self._agreed_s: float | None = None  # when this worker last had what the others computed, on its own clock
        self._next_step_time_s = 0.0
        self.training_s = 0.0  # spent in earlier calls, but for evaluating and saving
        self.own_s = 0.0  # that this worker's own part of the last step took

    def begin(self, elapsed_s: float, samples: int) -> None:
        """Begin a call, where the run has taken `elapsed_s` and `samples`."""
        self._base_elapsed_s = elapsed_s
        self._started_s = time.perf_counter()
        self._reported = (samples, self._started_s)

    def end(self) -> None:
        """End the call."""
        self.training_s += time.perf_counter() - self._started_s - self._away_s
        self._away_s = 0.0

    @property
    def elapsed_s(self) -> float:
        """How long the run has taken, over all attempts."""
        return self._base_elapsed_s + time.perf_counter() - self._started_s

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Keep the time spent inside out of the training throughput."""
        started = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - started
            self._away_s += spent
            self._reported = (self._reported[0], self._reported[1] + spent)

    def samples_per_second(self, samples: int, *, is_recorded: bool) -> float:
        """Return the throughput since the last step that was recorded."""
        (samples_before, since_s), now_s = self._reported, time.perf_counter()
        if is_recorded:
            self._reported = (samples, now_s)
        return (samples - samples_before) / (now_s - since_s)

    # This worker's own part of a step -----------------------------------------------------------------------------

    def enter_team(self) -> None:
        """Forget when members agreed last: they are others now."""
        self._agreed_s = None

    def record_computed(self) -> None:
        """This worker has computed its part of a step, and is about to wait for the others."""
        self.own_s = time.perf_counter() - self._away_s - (self._agreed_s or 0.0)

    def record_agreed(self) -> bool:
        """This worker has what the others computed. Returns whether `own_s` is known, and worth telling again."""
        now_s = time.perf_counter()
        is_known, self._agreed_s = self._agreed_s is not None, now_s - self._away_s
        return is_known and now_s >= self._next_step_time_s

    def record_told(self) -> None:
        """`own_s` was told: not again for a while."""
        self._next_step_time_s = time.perf_counter() + STEP_TIME_EVERY_S
