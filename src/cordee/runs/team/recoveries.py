"""Recoveries of a team: from the loss of workers to the first step of those left. Decided without I/O."""

from __future__ import annotations

from dataclasses import dataclass

from cordee.cluster.members import MemberRecord
from cordee.cluster.policies import Restarts, Trouble
from cordee.runs.team.state import Recovery, RecoveryState


@dataclass(frozen=True)
class Recovered:
    """A recovery that is complete."""

    lost: list[int]
    seconds: float
    steps_redone: int


class Recoveries:
    """Counts those of one run; at most one is under way."""

    def __init__(self, memory: RecoveryState) -> None:
        self._memory = memory

    @property
    def restarts(self) -> Restarts:
        """How many replacements are left."""
        return self._memory.restarts

    @property
    def met(self) -> list[int]:
        """The members of the last generation that took a step."""
        return self._memory.met

    @property
    def last_loss(self) -> Trouble | None:
        """The last worker that was lost since the present generation was formed."""
        return self._memory.lost[-1] if self._memory.lost else None

    @property
    def is_under_way(self) -> bool:
        """Whether no step was taken since the last loss that a generation was formed after."""
        return self._memory.under_way is not None

    def take(self, loss: Trouble, *, is_external: bool) -> None:
        """Take note of a loss. A external worker that never took part leaves nothing to recover from."""
        if loss.worker_index in self._memory.met or not is_external:
            self._memory.lost.append(loss)

    def begin(self, first: MemberRecord, reason: str, team_step: int, now_s: float) -> str | None:
        """Take note that a generation is formed after losses, or for another `reason`.

        `first` is the member whose state the others get. Returns why the run must end, if that happens again and
        again in one step.
        """
        memory = self._memory
        verdict = memory.restarts.recover(first.ready_step, memory.lost, reason)
        if verdict is not None:
            return verdict
        reached = first.ready_step + first.has_dropped if first.ready_step >= 0 else team_step
        lost = [loss.worker_index for loss in memory.lost]
        started_s = min([now_s, *(loss.at_s for loss in memory.lost)])
        if (earlier := memory.under_way) is not None:  # nobody has taken a step since
            lost = earlier.lost + lost
            started_s, reached = min(started_s, earlier.started_s), max(reached, earlier.reached_step)
        memory.under_way = Recovery(lost, started_s, reached)
        memory.lost = []
        return None

    def complete(self, step: int, members: list[int], now_s: float) -> Recovered | None:
        """Take note that members have taken their first step; return the recovery that ends with it."""
        memory = self._memory
        memory.met = list(members)
        recovery, memory.under_way = memory.under_way, None
        if recovery is None:
            return None
        redone = max(0, recovery.reached_step - (step - 1))
        memory.num_complete += 1
        memory.steps_redone += redone
        return Recovered(recovery.lost, now_s - recovery.started_s, redone)
