"""The coordinator's channel to the workers of a team: what it tells them to do, and what they ask."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from cordee.cluster.member_channel import MemberChannel
from cordee.cluster.members import MemberRecord
from cordee.cluster.messages import CheckpointRequest, StepReached, StepTime, TeamReport
from cordee.cluster.policies import FailureReport
from cordee.cluster.rendezvous import GenerationStore
from cordee.communication.channel import Peer, Received
from cordee.communication.messages import (
    Directive,
    Failure,
    Join,
    Leaving,
    Member,
    Ready,
    Refused,
    StoreRequest,
)
from cordee.core.errors import CommunicationError
from cordee.core.fault_points import reach
from cordee.monitoring.events import Warned
from cordee.runs.checkpoints import CheckpointReceiver
from cordee.runs.team.membership import Membership


@dataclass
class TeamChannel(MemberChannel):
    """Serves one team."""

    members: Membership
    on_report: Callable[[int, TeamReport], None]  # takes what a worker tells of the training
    checkpoints: CheckpointReceiver

    def __post_init__(self) -> None:
        super().__post_init__()
        self._peers: dict[int, Peer] = {}
        self._directives: list[tuple[int, Directive]] = []
        self._standing: dict[int, Directive] = {}  # to members, which do not ask for it: said until they halt
        self._stored = GenerationStore()  # by the members of the generation, if they are on several hosts
        self.channel.generation = self.members.generation

    @property
    def has_pending(self) -> bool:
        return super().has_pending or bool(self._directives)

    def flush(self) -> None:
        super().flush()
        directives, self._directives = self._directives, []
        for index, directive in directives:
            if index not in self._peers:  # not heard since this coordinator came back: it asks again when it does
                continue
            try:
                reach("coordinator.directive")
                self.channel.send(self._peers[index], directive)
            except CommunicationError as error:
                if directive.action == "end_generation":  # maybe it is the one that was lost
                    continue
                warning = f"worker {index} could not be told to {directive.action}: {error}"
                self.emit(Warned(message=warning))
            reach("coordinator.directed")

    def direct(self, action: str, workers: Iterable[int], reason: str = "") -> None:
        """Tell workers what to do."""
        for index in workers:
            directive = Directive(action, (), reason, self.members.generation)  # type: ignore[arg-type]
            if action in ("finish", "leave"):
                directive = self._answer(index, directive)
            elif action in ("pause", "stop"):
                self._standing[index] = directive
            self._directives.append((index, directive))

    def form(self, members: list[int], threads: int = 0) -> None:
        """Begin the next generation with these workers, in this order. Refuse what belongs to an earlier one."""
        self.members.form(members)
        generation = self.channel.generation = self.members.generation
        self._stored, self._standing = GenerationStore(), {}
        team = tuple(_describe(self.members.of(index)) for index in members)
        for index in members:
            directive = self._answer(index, Directive("new_generation", team, "", generation, threads=threads))
            self._directives.append((index, directive))

    def _answer(self, index: int, directive: Directive) -> Directive:
        """Make a directive the answer to what a worker asked, to be given again if it asks again."""
        known = self.members.of(index)
        known.answer = msgspec.structs.replace(directive, answers=known.ready)
        return known.answer

    def fence(self, record: MemberRecord) -> None:
        """Refuse whatever the present process of a worker still says: it was given up."""
        self._peers.pop(record.index, None)
        self.channel.fence(record.name, record.fenced)

    def _handle(self, received: Received) -> None:
        if (record := self.members.records.get(received.envelope.sender)) is not None and record.may_send:
            self._peers[record.index] = received.peer  # another one after each connection
        super()._handle(received)

    def _handle_unknown(self, received: Received) -> None:
        if isinstance(received.message, StoreRequest):
            self._pass_on(received, received.message)
        elif isinstance(received.message, CheckpointRequest):
            self._reply_unwritten(received, self.checkpoints.handle(received.message))
        else:
            super()._handle_unknown(received)

    def _handle_own(self, received: Received, record: MemberRecord) -> None:
        match received.message:
            case Ready() as ready:
                self._take_ready(record, ready)
            case Leaving():
                record.is_leaving = True
            case StepTime() | StepReached() as report:
                self.on_report(record.index, report)
            case other:
                self._reply(received, Refused("unexpected", type(other).__name__))

    def _take_join(self, record: MemberRecord, join: Join) -> None:
        self._peers.pop(record.index, None)  # of an earlier process

    def _take_heartbeat(self, record: MemberRecord, step: int) -> None:
        super()._take_heartbeat(record, step)
        if record.phase == "member":  # it may not have heard what it was told
            if self.members.why_broken:
                self.direct("end_generation", [record.index], self.members.why_broken)
            elif record.index in self._standing:
                self._directives.append((record.index, self._standing[record.index]))

    def _take_failure(self, record: MemberRecord, failure: Failure) -> None:
        details = failure.step, failure.error, failure.traceback, failure.is_consequence
        self.members.report(FailureReport(record.index, *details, at_s=time.monotonic()))

    def _take_bye(self, record: MemberRecord) -> None:
        self.members.finish(record.index)

    def _take_report(self, record: MemberRecord, report: TeamReport) -> None:
        self.on_report(record.index, report)

    def _take_ready(self, known: MemberRecord, ready: Ready) -> None:
        if known.answer is not None and ready.number <= known.answer.answers:
            if ready.number == known.answer.answers:  # it has not heard
                self._directives.append((known.index, known.answer))
            return
        if ready.num_sent > known.num_acknowledged:
            return  # what it did before comes first: it says both again
        known.ready = ready.number
        is_new = known.answer is None  # why one that comes back was given up is known
        has_dropped, reason = (False, "") if is_new else (ready.has_dropped, ready.reason)
        self.members.wait(known.index, ready.step, has_dropped=has_dropped, reason=reason)

    def _pass_on(self, received: Received, message: StoreRequest) -> None:
        """Let members of the generation that meets find each other. Not written down: they say it again if need be."""
        if message.generation != self.members.generation:
            refused = Refused("stale-generation", f"generation {message.generation} is over")
            self._reply_unwritten(received, refused)
        else:
            self._reply_unwritten(received, self._stored.handle(received.envelope.sender, message))


def _describe(record: MemberRecord) -> Member:
    return Member(record.name, record.role, record.host, record.index, record.host_id)
