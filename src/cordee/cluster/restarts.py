"""Whether a lost worker is replaced, or the run has to end: decided without I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cordee.cluster.members import Trouble

MOST_LOSSES_IN_ONE_STEP = 3  # as many recoveries in a row without a step in between are no accident


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

    def recover(self, step: int, losses: Sequence[Trouble], reason: str = "") -> str | None:
        """Take note that a team ended after `step` steps (-1 for none); return why the run must end, if it must."""
        self.num_in_step = self.num_in_step + 1 if step <= self.last_step else 1
        self.last_step = max(step, self.last_step)
        if self.num_in_step < MOST_LOSSES_IN_ONE_STEP:
            return None
        if not losses:
            return f"the team could not take step {max(step, 0) + 1} in {self.num_in_step} attempts: {reason}"
        last = f"worker {losses[-1].worker_index} {losses[-1].reason}"
        return f"a worker was lost in each of {self.num_in_step} attempts at step {max(step, 0) + 1}; last {last}"
