"""The generations of a team: tells workers to pause, to form the next one, to leave, and to end."""

from __future__ import annotations

import time

from cordee.cluster.launcher_link import LauncherLink
from cordee.cluster.members import MemberRecord
from cordee.cluster.rendezvous import COULD_NOT_FORM
from cordee.core.errors import TrainingError
from cordee.core.fault_points import reach
from cordee.monitoring import events
from cordee.runs.team.losses import Losses
from cordee.runs.team.member_channel import TeamChannel
from cordee.runs.team.membership import Membership
from cordee.runs.team.recoveries import Recoveries
from cordee.runs.team.state import DirectiveState
from cordee.runs.team.workers import Workers


class Generations:
    """Directs the workers of one run. Call `direct` each turn, when losses have been borne."""

    def __init__(
        self,
        launcher: LauncherLink,
        channel: TeamChannel,
        workers: Workers,
        losses: Losses,
        recoveries: Recoveries,
        state: DirectiveState,
    ) -> None:
        self._launcher = launcher
        self._channel = channel
        self._workers = workers
        self._losses = losses
        self._recoveries = recoveries
        self._state = state
        self._ended_generation = 0  # the last generation whose members were told that it is over; heartbeats tell again

    def resend_directives(self) -> None:
        """Say again what workers may not have heard of an earlier coordinator, and do not ask for by themselves."""
        self._state.is_pause_sent = False
        if self._state.is_stop_sent:
            self._state.is_stop_sent = not self._membership.members  # those that have halted are told to finish

    def direct(self) -> bool:
        """Tell the workers what to do next; return whether they form another generation.

        Raises TrainingError when one is lost again and again in one step.
        """
        membership, state = self._membership, self._state
        if membership.failures:
            return False  # the run is about to fail
        self._losses.check_shortage()
        self._drop_late()
        if membership.why_broken and self._ended_generation < membership.generation:
            self._ended_generation = membership.generation
            self._channel.direct("end_generation", membership.members, membership.why_broken)
        leaving = membership.dispensable
        if leaving and not membership.is_complete:
            self._release(leaving)
        is_formed = False
        members = membership.next_members()
        if members is not None:
            is_formed = self._form(members)
        elif (membership.needs_pause or (self._workers.is_reform_wanted and membership.is_complete)) and not (
            state.is_pause_sent or membership.why_broken  # then they halt without being told
        ):
            state.is_pause_sent = True
            self._channel.direct("pause", membership.members)
            reach("generations.pause")
        wants_stop = self._launcher.should_stop() or self._losses.end_reason is not None
        if wants_stop and membership.is_complete and not state.is_stop_sent:
            state.is_stop_sent = True
            self._channel.direct("stop", membership.members, "interrupted")
        return is_formed

    @property
    def _membership(self) -> Membership:
        return self._channel.members

    def _drop_late(self) -> None:
        membership = self._membership
        for index in membership.drop_late():
            self._workers.kill(index)
            if (record := membership.of(index)).is_external and record.incarnation:
                self._channel.direct("leave", [index])

    def _release(self, leaving: list[int]) -> None:
        membership = self._membership
        if membership.is_too_small:
            # Nobody could continue: the leaving ones, who say so with each heartbeat, stay for as long as it takes to
            # save.
            if self._losses.end_reason is None:
                self._losses.end_early(f"workers {leaving} were told to leave, and too few are left to continue")
            for index in leaving:
                membership.of(index).is_leaving = False
            return
        self._channel.direct("leave", leaving)
        reach("generations.leave")
        for index in leaving:
            membership.finish(index)
            self._launcher.emit(events.WorkerLeft(worker=index, step=membership.step))

    def _form(self, members: list[int]) -> bool:
        """Begin the next generation, or end the run if that is what the members halted for."""
        membership, recoveries = self._membership, self._recoveries
        furthest = max(
            (membership.of(i) for i in members), key=lambda record: record.ready_step
        )  # the others get its state
        is_halt = all(
            (r := membership.of(i)).ready_step == furthest.ready_step >= 0 and not r.has_dropped for i in members
        )
        has_losses = recoveries.last_loss is not None
        if self._state.is_stop_sent and is_halt and not has_losses and not recoveries.is_under_way:
            self._channel.direct("finish", members)
            reach("generations.finish")
            for index in members:
                membership.of(index).phase = "member"
            return False
        reason = next((r.reason for i in members if (r := membership.of(i)).reason), "")
        if COULD_NOT_FORM in reason and membership.has_other_hosts(members[0]) and not has_losses:
            self._expel_unreachable(members[0], reason)
            for index in members:
                membership.of(index).reason = ""
            return False
        if has_losses or reason:
            self._recover(furthest, reason)
        self._channel.form(members, self._workers.threads)
        reach("generations.formed")
        self._workers.record_formed()
        self._state.is_pause_sent = self._state.is_stop_sent = False
        # Where a part of the model is lost with its worker, a new team always loads what was saved.
        continues = membership.is_elastic and furthest.ready_step >= 0
        self._launcher.emit(
            events.Generation(
                generation=membership.generation,
                members=members,
                step=furthest.ready_step if continues else None,
            )
        )
        return True

    def _recover(self, furthest: MemberRecord, reason: str) -> None:
        last = self._recoveries.last_loss
        problem = self._recoveries.begin(furthest, reason, self._membership.step, time.monotonic())
        if problem is not None:
            where = f"; its log is {self._workers.log_file(last.worker_index)}" if last is not None else ""
            raise TrainingError(f"{problem}{where}")

    def _expel_unreachable(self, first: int, reason: str) -> None:
        """Continue without workers of other hosts than the first's: they would keep the others waiting for ever.

        `reason` is what the members said: who dialled which address, and what came of it.
        """
        membership = self._membership
        others = [i for i in membership.active if membership.of(i).host_id != membership.of(first).host_id]
        late = [i for i in others if i not in self._recoveries.trained] or others
        if not late:
            return
        kept = [i for i in membership.active if i not in late]
        ends = [", ".join(f"{membership.of(i).host} (worker {i})" for i in side) for side in (kept, late)]
        tried = reason.rpartition(f"{COULD_NOT_FORM}: ")[2]
        message = (
            f"{' and '.join(ends)} could not connect to each other: workers exchange gradients over TCP at ports that "
            f"the system chooses, which a firewall between the hosts must let through. {tried[:1].upper()}{tried[1:]}"
        )
        self._channel.direct("leave", late, message)
        for index in late:
            membership.of(index).is_leaving = True
            membership.finish(index)
        self._launcher.emit(events.Warned(message=message))
