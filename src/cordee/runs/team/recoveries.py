"""Recoveries of a team: from the loss of workers to the first step of those left. Decided without I/O."""

from __future__ import annotations

from dataclasses import dataclass

from cordee.cluster.members import MemberRecord
from cordee.cluster.policies import FailureReport, Restarts
from cordee.runs.team.state import Recovery, RecoveryState


@dataclass(frozen=True)
class Recovered:
    """A recovery that is complete."""

    lost: list[int]
    seconds: float
    steps_redone: int


class Recoveries:
    """Counts those of one run; at most one is under way."""

    def __init__(self, state: RecoveryState) -> None:
        self._state = state

    @property
    def restarts(self) -> Restarts:
        """How many replacements are left."""
        return self._state.restarts

    @property
    def trained(self) -> list[int]:
        """The members of the last generation that took a step."""
        return self._state.trained

    @property
    def last_loss(self) -> FailureReport | None:
        """The last worker that was lost since the present generation was formed."""
        return self._state.lost[-1] if self._state.lost else None

    @property
    def is_under_way(self) -> bool:
        """Whether no step was taken since the last loss that a generation was formed after."""
        return self._state.under_way is not None

    def take(self, loss: FailureReport, *, is_external: bool) -> None:
        """Record a loss. An external worker that never took part leaves nothing to recover from."""
        if loss.worker_index in self._state.trained or not is_external:
            self._state.lost.append(loss)

    def begin(self, furthest: MemberRecord, reason: str, team_step: int, now_s: float) -> str | None:
        """Record that a generation is formed after losses, or for another `reason`.

        `furthest` is the member whose state the others get. Returns why the run must end, if that happens again and
        again in one step.
        """
        state = self._state
        problem = state.restarts.recover(furthest.ready_step, state.lost, reason)
        if problem is not None:
            return problem
        reached = furthest.ready_step + furthest.has_dropped if furthest.ready_step >= 0 else team_step
        lost = [loss.worker_index for loss in state.lost]
        started_s = min([now_s, *(loss.at_s for loss in state.lost)])
        if (earlier := state.under_way) is not None:  # nobody has taken a step since
            lost = earlier.lost + lost
            started_s, reached = min(started_s, earlier.started_s), max(reached, earlier.reached_step)
        state.under_way = Recovery(lost, started_s, reached)
        state.lost = []
        return None

    def complete(self, step: int, members: list[int], now_s: float) -> Recovered | None:
        """Record that members have taken their first step; return the recovery that ends with it."""
        state = self._state
        state.trained = list(members)
        recovery, state.under_way = state.under_way, None
        if recovery is None:
            return None
        redone = max(0, recovery.reached_step - (step - 1))
        state.num_complete += 1
        state.steps_redone += redone
        return Recovered(recovery.lost, now_s - recovery.started_s, redone)
