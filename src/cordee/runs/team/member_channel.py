"""The coordinator's channel to the workers of a team: registers and hears them, and tells them what to do.

Nothing is sent before `flush`, so that what it follows from can be written down first. A coordinator that comes back
has the `Membership` of the one before; workers say again what was not noted, and ask again for what they did not hear.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable

import msgspec

from cordee.cluster.control import CONTROL_NAME, NOT_YET, NotYetError
from cordee.cluster.members import REPLACED, MemberRecord
from cordee.cluster.messages import (
    DataFingerprint,
    Event,
    FirstStep,
    Numbered,
    StepReached,
    StepTime,
    TeamReport,
    WorkerSummary,
)
from cordee.cluster.policies import Trouble
from cordee.communication.channel import Peer, Received, ServerChannel
from cordee.communication.messages import (
    Accepted,
    Ask,
    Directive,
    Failure,
    Goodbye,
    Heartbeat,
    Hello,
    JoinRequest,
    Leaving,
    Member,
    Message,
    Noted,
    Put,
    Ready,
    Refused,
    Said,
    Scale,
    Welcome,
)
from cordee.core.errors import CommunicationError, JobError
from cordee.core.fault_points import reach
from cordee.monitoring.events import AnyEvent, Warned, WorkerStarted
from cordee.runs.team.membership import Membership


class MemberChannel:
    """Serves one run over a channel. Call `serve` again and again; it never blocks for longer than asked."""

    def __init__(
        self,
        channel: ServerChannel,
        membership: Membership,
        on_event: Callable[[AnyEvent], None],
        on_report: Callable[[int, TeamReport], None],
        on_scale: Callable[[int, int], str] | None = None,
        on_enlist: Callable[[JoinRequest], str] | None = None,
    ) -> None:
        """`on_event` takes what is to be recorded, `on_report` what a worker tells of the training.

        `on_scale` takes a wish for numbers of workers and of threads and says what it does, `on_enlist` one to join
        and returns what the new worker is told; both may raise JobError.
        """
        self._channel = channel
        self.membership = membership
        self._on_event = on_event
        self._on_report = on_report
        self._on_scale = on_scale
        self._on_enlist = on_enlist
        self._peers: dict[int, Peer] = {}
        self._replies: list[tuple[Received, Message]] = []
        self._directives: list[tuple[int, Directive]] = []
        self._standing: dict[int, Directive] = {}  # to members, which do not ask for it: said until they halt
        self._said: dict[str, bytes] = {}  # by the members of the generation that meets, if they are on several hosts
        channel.generation = membership.generation
        membership.take_up(time.monotonic(), channel.fence)

    def serve(self, timeout_s: float) -> None:
        """Handle what has come in, waiting at most `timeout_s` for the first message."""
        received = self._channel.receive(timeout_s)
        while received is not None:
            self._handle(received)
            received = self._channel.receive(0.0)

    @property
    def has_pending(self) -> bool:
        """Whether anything waits to be sent."""
        return bool(self._replies or self._directives)

    def flush(self) -> None:
        """Send what is to be sent. One that is gone by now is passed over: its exit will be heard of."""
        replies, self._replies = self._replies, []
        directives, self._directives = self._directives, []
        for received, message in replies:
            with contextlib.suppress(CommunicationError):
                reach("coordinator.reply")
                self._channel.reply(received, message)
        for index, directive in directives:
            if index not in self._peers:  # not heard since this coordinator came back: it asks again when it does
                continue
            try:
                reach("coordinator.directive")
                self._channel.send(self._peers[index], directive)
            except CommunicationError as error:
                if directive.action == "disband":  # maybe it is the one that was lost
                    continue
                warning = f"worker {index} could not be told to {directive.action}: {error}"
                self._on_event(Warned(message=warning))
            reach("coordinator.directed")

    def direct(self, action: str, workers: Iterable[int], reason: str = "") -> None:
        """Tell workers what to do."""
        for index in workers:
            directive = Directive(action, (), reason, self.membership.generation)  # type: ignore[arg-type]
            if action in ("finish", "leave"):
                directive = self._answer(index, directive)
            elif action in ("pause", "stop"):
                self._standing[index] = directive
            self._directives.append((index, directive))

    def form(self, members: list[int], threads: int = 0) -> None:
        """Begin the next generation with these workers, in this order. Refuse what belongs to an earlier one."""
        self.membership.form(members)
        generation = self._channel.generation = self.membership.generation
        self._said, self._standing = {}, {}
        team = tuple(_describe(self.membership.of(index)) for index in members)
        for index in members:
            directive = self._answer(index, Directive("new_generation", team, "", generation, threads=threads))
            self._directives.append((index, directive))

    def _answer(self, index: int, directive: Directive) -> Directive:
        """Make a directive the answer to what a worker asked, to be given again if it asks again."""
        known = self.membership.of(index)
        known.answer = msgspec.structs.replace(directive, answers=known.ready)
        return known.answer

    def fence(self, record: MemberRecord) -> None:
        """Refuse whatever the present process of a worker still says: it was given up."""
        self._peers.pop(record.index, None)
        self._channel.fence(record.name, record.fenced)

    def _handle(self, received: Received) -> None:
        if received.envelope.sender == CONTROL_NAME and isinstance(received.message, Scale | JoinRequest):
            self._handle_request(received, received.message)
            return
        if isinstance(received.message, Put | Ask):
            self._pass_on(received, received.message)
            return
        known = self.membership.records.get(received.envelope.sender)
        if known is None:
            self._reply(received, Refused("unknown-member", received.envelope.sender))
            return
        if isinstance(received.message, Hello):
            self._welcome(received, known, received.message)
            return
        if not known.may_speak:
            self._reply(received, Refused("unexpected", f"{type(received.message).__name__} before Hello"))
            return
        index, now_s, membership = known.index, time.monotonic(), self.membership
        self._peers[index] = received.peer  # another one after each connection
        membership.hear(index, now_s)
        match received.message:
            case Heartbeat(step=step):
                membership.hear(index, now_s, step)
                if known.phase == "member":  # again: it may not have heard
                    if membership.why_broken:
                        self.direct("disband", [index], membership.why_broken)
                    elif index in self._standing:
                        self._directives.append((index, self._standing[index]))
                self._reply(received, Noted(known.num_noted))
            case Ready() as ready:
                self._take_ready(known, ready)
            case Leaving():
                known.is_leaving = True
            case StepTime() | StepReached() as report:
                self._on_report(index, report)
            case Event() | FirstStep() | DataFingerprint() | WorkerSummary() | Failure() | Goodbye() as told:
                self._take_note(received, known, told)
            case other:
                self._reply(received, Refused("unexpected", type(other).__name__))

    def _take_note(self, received: Received, known: MemberRecord, told: Numbered) -> None:
        """Take what must not be lost: once, and in order. The worker sends again what is missing."""
        index = known.index
        if told.number == known.num_noted + 1:
            known.num_noted += 1
            match told:
                case Event(record=event):
                    self._on_event(event)
                case Failure(step=step, error=error, traceback=text, is_consequence=is_consequence):
                    self.membership.report(Trouble(index, step, error, text, is_consequence, at_s=time.monotonic()))
                case Goodbye():
                    self.membership.finish(index)
                case report:
                    self._on_report(index, report)
        if isinstance(told, Failure | Goodbye):  # the worker waits for it before it ends
            self._reply(received, Noted(known.num_noted))

    def _take_ready(self, known: MemberRecord, ready: Ready) -> None:
        if known.answer is not None and ready.number <= known.answer.answers:
            if ready.number == known.answer.answers:  # it has not heard
                self._directives.append((known.index, known.answer))
            return
        if ready.told > known.num_noted:
            return  # what it did before comes first: it says both again
        known.ready = ready.number
        is_new = known.answer is None  # why one that comes back was given up is known
        has_dropped, reason = (False, "") if is_new else (ready.has_dropped, ready.reason)
        self.membership.wait(known.index, ready.step, has_dropped=has_dropped, reason=reason)

    def _pass_on(self, received: Received, message: Put | Ask) -> None:
        """Let members of the generation that meets find each other. Not written down: they say it again if need be."""
        if message.meeting != self.membership.generation:
            self._reply(received, Refused("stale-generation", f"generation {message.meeting} is over"))
        elif isinstance(message, Ask):
            self._reply(received, Said(self._said.get(message.key)))
        else:
            self._said[message.key] = message.value
            self._reply(received, Accepted())

    def _handle_request(self, received: Received, wish: Scale | JoinRequest) -> None:
        """Do what somebody with the run's control file wants."""
        try:
            if isinstance(wish, Scale) and self._on_scale is not None:
                self._reply(received, Accepted(self._on_scale(wish.num_workers, wish.threads)))
            elif isinstance(wish, JoinRequest) and self._on_enlist is not None:
                self._reply(received, Accepted(self._on_enlist(wish)))
            else:
                self._reply(received, Refused("unexpected", "this run cannot do that"))
        except JobError as error:
            reason = NOT_YET if isinstance(error, NotYetError) else "refused"
            self._reply(received, Refused(reason, str(error)))

    def _welcome(self, received: Received, known: MemberRecord, hello: Hello) -> None:
        timeout_s = self.membership.failure_timeout_s
        incarnation = received.envelope.incarnation
        if known.may_speak and known.incarnation == incarnation:
            self._reply(received, Welcome(failure_timeout_s=timeout_s, heartbeat_s=timeout_s / 5))
            return  # it has not heard the first time
        if not known.may_join:
            self._reply(received, Refused(REPLACED, f"another process is {received.envelope.sender} now"))
            return
        self._reply(received, Welcome(failure_timeout_s=timeout_s, heartbeat_s=timeout_s / 5))
        self._peers[known.index] = received.peer
        known.host, known.host_id = hello.host, hello.host_id
        self.membership.join(known, incarnation, time.monotonic())
        self._on_event(WorkerStarted(worker=known.index, pid=hello.pid, host=hello.host, role=hello.role))

    def _reply(self, received: Received, message: Message) -> None:
        self._replies.append((received, message))


def _describe(record: MemberRecord) -> Member:
    return Member(record.name, record.role, record.host, record.index, record.host_id)
