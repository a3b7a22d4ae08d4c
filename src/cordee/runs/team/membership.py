"""Who failed first in a team, and who forms the next generation: decided without I/O.

A worker that is killed or frozen is a loss: the others continue without it. One that raises or exits by itself is a
failure that would come again: the run ends. A failing worker makes others fail: they lose a peer in the middle of
an exchange and say so, often before the failing one was heard of. `first_failure` tells cause and consequence apart.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from cordee.cluster.members import WORKER_PREFIX, MemberRecord, Members, Phase
from cordee.cluster.policies import FailureReport

CAUSE_WAIT_S = 1.0  # how long the first sign of a failure waits for what the workers themselves say of it


class Membership(Members, kw_only=True):
    """The workers of a team, from the first sign of life to the last."""

    num_workers: int  # how many there are to be
    min_workers: int = 1
    is_elastic: bool = False  # every worker has all that is needed to continue, so that a team can lose some
    generation: int = 0
    broken: tuple[int, str] = (0, "")  # the last generation that cannot continue as it is, and why
    reported_step: int = 0  # of the last step that was reported as such
    failures: list[FailureReport] = msgspec.field(default_factory=list)
    losses: list[FailureReport] = msgspec.field(default_factory=list)  # not yet taken care of

    def of(self, index: int) -> MemberRecord:
        return self.records[f"{WORKER_PREFIX}{index}"]

    def _in(self, *phases: Phase) -> list[int]:
        return [record.index for record in self.records.values() if record.phase in phases]

    def record_heartbeat(self, index: int, now_s: float, step: int | None = None) -> None:
        """Record a sign of life."""
        record = self.of(index)
        record.heard_s = now_s
        if step is not None:
            record.step = max(record.step, step)

    def wait(self, index: int, step: int, *, has_dropped: bool, reason: str = "") -> None:
        """Record that a worker waits for a generation, with `step` steps taken or -1 for nothing at all."""
        record = self.of(index)
        if record.phase == "member" and reason:
            self.broken = (self.generation, f"worker {index}: {reason}")
        record.phase, record.ready_step, record.has_dropped, record.reason = "ready", step, has_dropped, reason
        record.step = max(record.step, step)

    def finish(self, index: int) -> None:
        record = self.of(index)
        record.phase = "left" if record.is_leaving else "finished"

    def report(self, failure: FailureReport) -> None:
        """Record a failure; the first of each worker counts, but its own account more than its exit."""
        if self.of(failure.worker_index).is_external:
            self.exit(failure.worker_index, failure.reason, failure.at_s, is_killed=True)
            return
        for at, known in enumerate(self.failures):
            if known.worker_index == failure.worker_index:
                if failure.is_final and not known.is_final:
                    self.failures[at] = replace(failure, at_s=known.at_s)
                return
        self.failures.append(failure)

    def exit(self, index: int, how: str, now_s: float, *, is_killed: bool = False) -> None:
        """Record that the process of a worker has ended. One that was killed is a loss, others a failure."""
        record = self.of(index)
        if not record.is_active:
            return
        failure = FailureReport(index, record.step, record.loss_reason or how, is_final=is_killed, at_s=now_s)
        if record.phase == "member":
            self.broken = (self.generation, f"worker {index} {failure.reason}")
        record.phase = "gone"
        if not is_killed and not record.is_external:
            self.report(failure)
        elif any(known.worker_index == index for known in self.failures):
            pass  # it had said what was wrong
        elif not self._in("finished"):
            self.losses.append(failure)  # nobody finishes before all have done their last step

    def take_losses(self) -> list[FailureReport]:
        """Return the workers lost since this was last asked."""
        losses, self.losses = self.losses, []
        return losses

    @property
    def active(self) -> list[int]:
        """The workers that are or will be members, but those that are leaving."""
        return [record.index for record in self.records.values() if record.is_active and not record.is_leaving]

    def is_free(self, index: int) -> bool:
        """Whether a new worker may have this number."""
        known = self.records.get(f"{WORKER_PREFIX}{index}")
        return known is None or (known.phase in ("gone", "left") and not known.is_away)

    @property
    def num_pending(self) -> int:
        """How many are on their way to being ready for the first time."""
        return sum(self.of(i).phase in ("starting", "joined") for i in self.active)

    @property
    def members(self) -> list[int]:
        """Those who train in the present generation."""
        return self._in("member")

    def has_other_hosts(self, index: int) -> bool:
        """Whether a worker of another host than this one's takes part, or has just been lost."""
        return not {record.host_id for record in self.records.values()} <= {self.of(index).host_id, ""}

    @property
    def is_complete(self) -> bool:
        """Whether a generation is training."""
        return bool(self.members)

    @property
    def why_broken(self) -> str:
        """Why the present generation cannot continue; nothing if it can."""
        generation, reason = self.broken
        return reason if generation == self.generation > 0 else ""

    def drop_late(self) -> list[int]:
        """Return those who were to join a run that has ended for others: they are of no use any more."""
        if not self._in("finished"):
            return []
        late = self._in("starting", "joined", "ready")
        for index in late:
            self.of(index).phase = "left"
        return late

    @property
    def is_over(self) -> bool:
        """Whether every worker has ended well."""
        return bool(self._in("finished")) and not any(record.is_active for record in self.records.values())

    @property
    def needs_pause(self) -> bool:
        """Whether the members should stop for a moment: somebody waits to join, or wants to leave."""
        states = {(record.phase, record.is_leaving) for record in self.records.values()}
        has_members, has_heirs = bool(self.members), ("ready", False) in states
        return (has_members and has_heirs) or (
            ("member", True) in states and (("member", False) in states or self.is_too_small)
        )

    @property
    def dispensable(self) -> list[int]:
        """Those who wait, want to leave, and may: somebody who stays is as far as they are, or nobody is to stay."""
        stays = [r.ready_step for r in self.records.values() if r.phase == "ready" and not r.is_leaving]
        furthest = max(stays, default=-1)
        leaving = [r for r in self.records.values() if r.phase == "ready" and r.is_leaving]
        return [record.index for record in leaving if record.ready_step <= furthest or self.is_too_small]

    def next_members(self) -> list[int] | None:
        """Return who forms the next generation; None while it is too early for one.

        Members of one host are side by side; the host of the lowest number comes first. That is the run's own host as a
        rule, and the first member saves. On a host those that are furthest come first.
        """
        leaves = self.dispensable
        ready = [i for i in self._in("ready") if i not in leaves]
        if self.is_complete or not ready:
            return None
        has_survivor = any(self.of(i).ready_step >= 0 for i in ready)
        is_whole_needed = self.generation == 0 or not has_survivor or not self.is_elastic
        if (is_whole_needed and self.num_pending) or len(ready) < self.min_workers:
            return None
        if not self.is_elastic and len(ready) != self.num_workers:
            return None
        lowest: dict[str, int] = {}
        for index in sorted(ready):
            lowest.setdefault(self.of(index).host_id, index)
        return sorted(ready, key=lambda i: (lowest[self.of(i).host_id], -self.of(i).ready_step, i))

    @property
    def is_too_small(self) -> bool:
        """Whether those left are fewer than can continue, and nobody is on the way."""
        return len(self.active) < (self.min_workers if self.is_elastic else self.num_workers)

    def form(self, members: list[int]) -> None:
        """Begin the next generation."""
        self.generation += 1
        for index in members:
            self.of(index).phase = "member"

    @property
    def step(self) -> int:
        """The highest step that any worker is known to have taken."""
        return max([self.reported_step, *(record.step for record in self.records.values())])

    def first_failure(self, now_s: float) -> FailureReport | None:
        """Return the failure to report, once it is known: a cause at once, a consequence after some time."""
        causes = [failure for failure in self.failures if not failure.is_consequence]
        if causes:
            first = min(causes, key=lambda failure: failure.at_s)
            if first.traceback:
                return first
            if now_s - first.at_s <= CAUSE_WAIT_S and not self._has_all_accounts:
                return None
            # What it was last heard of is old; those who lost it in the same step know better.
            return replace(first, step=max([self.step, *(failure.step for failure in self.failures)]))
        is_anybody_left = any(record.is_active for record in self.records.values())
        limit_s = CAUSE_WAIT_S + (self.failure_timeout_s if is_anybody_left else 0.0)
        if self.failures and now_s - self.failures[0].at_s > limit_s:
            return self.failures[0]
        return None

    @property
    def _has_all_accounts(self) -> bool:
        """Whether every worker has ended well, waits, or said what is wrong: nobody's account is awaited."""
        known = {failure.worker_index for failure in self.failures if failure.is_final}
        return all(r.index in known or r.phase in ("finished", "left", "ready") for r in self.records.values())
