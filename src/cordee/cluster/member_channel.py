"""The coordinator's channel to the members of a run: registers and hears them, and answers, whatever the kind of run.

Nothing is sent before `flush`, so that what it follows from can be written down first. A coordinator that comes back
has the registry of the one before; members send again what was not acknowledged, and ask again for what they did
not hear.

A heartbeat has nothing written down: when a member was last heard, and how far it was, it says again to the next
coordinator. What its answer acknowledges is in the journal before the answer is sent.
"""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from cordee.cluster.control import CONTROL_NAME, NOT_YET, NotYetError
from cordee.cluster.members import NOT_JOINED, REPLACED, UNKNOWN, MemberRecord, Members
from cordee.cluster.messages import (
    Event,
    FirstStep,
    Numbered,
    TeamReport,
    TimelineReport,
    WorkerSummary,
)
from cordee.communication.channel import Received, ServerChannel
from cordee.communication.messages import (
    Accepted,
    Acknowledged,
    Bye,
    Failure,
    Heartbeat,
    Join,
    Joined,
    JoinRequest,
    Message,
    Refused,
    Scale,
)
from cordee.core.errors import CommunicationError, JobError, StorageError
from cordee.core.fault_points import reach
from cordee.monitoring.events import AnyEvent, Warned, WorkerStarted
from cordee.monitoring.timeline import Line


@dataclass
class MemberChannel(abc.ABC):
    """Serves one run over a channel. Call `serve` again and again; it never blocks for longer than asked."""

    channel: ServerChannel
    members: Members
    emit: Callable[[AnyEvent], None]  # takes what is to be recorded
    # Does what somebody with the control file wants, and returns what is said to them. Raises JobError.
    handle_request: Callable[[Scale | JoinRequest], str]

    def __post_init__(self) -> None:
        self._replies: list[tuple[Received, Message]] = []
        self.keep_timeline: Callable[[str, Line], None] = lambda member, line: None
        self._has_decided = False  # some of the replies follow from what is not written down yet
        self.members.resume(time.monotonic(), self.channel.fence)

    @abc.abstractmethod
    def _handle_own(self, received: Received, record: MemberRecord) -> None:
        """Handle a message that only this kind of run has."""

    @abc.abstractmethod
    def _take_join(self, record: MemberRecord, join: Join) -> None:
        """Take a member that has just joined."""

    @abc.abstractmethod
    def _take_failure(self, record: MemberRecord, failure: Failure) -> None:
        """Take what a member says that it ends with."""

    @abc.abstractmethod
    def _take_bye(self, record: MemberRecord) -> None:
        """Take a member that is done."""

    def _take_report(self, record: MemberRecord, report: TeamReport) -> None:
        """Take what only members of some kinds of run report."""
        raise AssertionError(f"{report} does not belong to this kind of run")

    def _take_heartbeat(self, record: MemberRecord, step: int) -> None:
        """Take a sign of life, and how far the member is."""
        record.step = max(record.step, step)

    def _handle_unknown(self, received: Received) -> None:
        """Handle a message of somebody who is not in the registry."""
        self._reply(received, Refused(UNKNOWN, received.envelope.sender))

    def _reach(self, message: Message) -> None:
        """Reach the fault point before a reply is sent."""
        reach("coordinator.reply")

    def serve(self, timeout_s: float) -> None:
        """Handle what has come in, waiting at most `timeout_s` for the first message."""
        received = self.channel.receive(timeout_s)
        while received is not None:
            self._handle(received)
            received = self.channel.receive(0.0)

    @property
    def has_pending(self) -> bool:
        """Whether anything waits to be sent that follows from what must be written down first."""
        return self._has_decided

    def flush(self) -> None:
        """Send what is to be sent. One that is gone is passed over: its exit will be heard of, or it asks again."""
        replies, self._replies, self._has_decided = self._replies, [], False
        for received, message in replies:
            with contextlib.suppress(CommunicationError):
                self._reach(message)
                self.channel.reply(received, message)

    def _reply(self, received: Received, message: Message) -> None:
        self._replies.append((received, message))
        self._has_decided = True

    def _reply_unwritten(self, received: Received, message: Message) -> None:
        """Reply with what is not for the journal, or is in it: the answer alone has nothing written down."""
        self._replies.append((received, message))

    def _handle(self, received: Received) -> None:
        sender, message = received.envelope.sender, received.message
        record = self.members.records.get(sender)
        if sender == CONTROL_NAME and isinstance(message, Scale | JoinRequest):
            self._answer_request(received, message)
        elif record is None:
            self._handle_unknown(received)
        elif isinstance(message, Join):
            self._join(received, record, message)
        elif not record.may_send:
            self._reply(received, Refused(NOT_JOINED, f"{type(message).__name__} before Join"))
        else:
            record.heard_s = time.monotonic()
            match message:
                case Heartbeat(step=step):
                    self._take_heartbeat(record, step)
                    self._reply_unwritten(received, Acknowledged(record.num_acknowledged))
                case TimelineReport(line=line):
                    with contextlib.suppress(StorageError):  # events tell of a full disk
                        self.keep_timeline(record.name, line)
                case Event() | Failure() | Bye() | FirstStep() | WorkerSummary():
                    self._take_numbered(record, message)
                    self._reply(received, Acknowledged(record.num_acknowledged))
                case _:
                    self._handle_own(received, record)

    def _take_numbered(self, record: MemberRecord, message: Numbered) -> None:
        """Take what must not be lost: once, and in order. The member says again what is missing."""
        if message.number != record.num_acknowledged + 1:
            return
        record.num_acknowledged += 1
        match message:
            case Event(record=event):
                self.emit(event)
            case Failure():
                self._take_failure(record, message)
            case Bye():
                self._take_bye(record)
            case report:
                self._take_report(record, report)

    def _join(self, received: Received, record: MemberRecord, join: Join) -> None:
        timeout_s, incarnation = self.members.failure_timeout_s, received.envelope.incarnation
        has_joined = record.may_send and record.incarnation == incarnation  # it has not heard the first time
        if not has_joined and not record.may_join:
            self._reply(received, Refused(REPLACED, f"another process is {record.name} now"))
            return
        self._reply(received, Joined(timeout_s, timeout_s / 5, time.time()))
        if has_joined:
            return
        self.members.join(record, incarnation, time.monotonic())
        record.host, record.host_id, record.storage_problem = join.host, join.host_id, join.storage_problem
        if record.storage_problem and self.members.is_staffed:  # too late to refuse the run for it
            note = f"{record.name} on host {join.host} cannot read the storage: {record.storage_problem}"
            self.emit(Warned(message=f"{note}; training continues"))
        self._take_join(record, join)
        self.emit(WorkerStarted(worker=record.index, pid=join.pid, host=join.host, role=record.role))

    def _answer_request(self, received: Received, request: Scale | JoinRequest) -> None:
        try:
            self._reply(received, Accepted(self.handle_request(request)))
        except JobError as error:
            reason = NOT_YET if isinstance(error, NotYetError) else "refused"
            self._reply(received, Refused(reason, str(error)))
