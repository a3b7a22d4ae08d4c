"""The coordinator: registers workers, hears their heartbeats, gathers their events, tells them what to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from cordee.cluster.control import CONTROL_NAME
from cordee.cluster.membership import Membership, Trouble
from cordee.communication.channel import Peer, Received, ServerChannel
from cordee.communication.messages import (
    Accepted,
    Directive,
    Event,
    Failure,
    Goodbye,
    Heartbeat,
    Hello,
    Leaving,
    Member,
    Ready,
    Refused,
    Scale,
    Welcome,
)
from cordee.core.errors import CommunicationError, JobError

WORKER_PREFIX = "worker-"


class Coordinator:
    """Serves one run over a channel. Call `serve` again and again; it never blocks for longer than asked."""

    def __init__(
        self,
        channel: ServerChannel,
        membership: Membership,
        on_event: Callable[[str, dict[str, Any]], None],
        on_scale: Callable[[int], str] | None = None,
    ) -> None:
        """`on_scale` takes a wish for another number of workers and says what it does; it may raise JobError."""
        self._channel = channel
        self._membership = membership
        self._on_event = on_event
        self._on_scale = on_scale
        self._peers: dict[int, Peer] = {}
        self._members: dict[int, Member] = {}
        self._incarnations: dict[int, int] = {}

    def serve(self, timeout_s: float) -> None:
        """Handle what has come in, waiting at most `timeout_s` for the first message."""
        received = self._channel.receive(timeout_s)
        while received is not None:
            self._handle(received)
            received = self._channel.receive(0.0)

    def direct(self, action: str, workers: Iterable[int], reason: str = "") -> None:
        """Tell workers what to do. One that is gone by now is passed over: its exit will be heard of."""
        for index in workers:
            self._send(index, Directive(action, (), reason))  # type: ignore[arg-type]

    def form(self, members: list[int]) -> None:
        """Begin the next generation with these workers, in this order. Refuse what belongs to an earlier one."""
        self._membership.form(members)
        self._channel.generation = self._membership.generation
        team = tuple(self._members[index] for index in members)
        for index in members:
            self._send(index, Directive("new_generation", team))

    def fence(self, index: int) -> None:
        """Refuse whatever the present process of a worker still says: another takes its place."""
        if index in self._incarnations:
            self._channel.fence(f"{WORKER_PREFIX}{index}", self._incarnations.pop(index))

    def _send(self, index: int, directive: Directive) -> None:
        try:
            self._channel.send(self._peers[index], directive)
        except (CommunicationError, KeyError) as error:  # it died a moment ago, which its exit will tell
            action = directive.action
            self._on_event("warning", {"message": f"worker {index} could not be told to {action}: {error}"})

    def _handle(self, received: Received) -> None:
        if received.envelope.sender == CONTROL_NAME and isinstance(received.message, Scale):
            self._scale(received, received.message.num_workers)
            return
        index = self._index_of(received.envelope.sender)
        if index is None:
            self._channel.reply(received, Refused("unknown-member", received.envelope.sender))
            return
        now_s, membership = time.monotonic(), self._membership
        membership.hear(index, now_s)
        match received.message:
            case Hello(role=role, pid=pid, host=host):
                self._welcome(received, index, Member(received.envelope.sender, role, host, index))
                self._on_event("worker_started", {"worker": index, "pid": pid, "host": host, "role": role})
            case Heartbeat(step=step):
                membership.hear(index, now_s, step)
            case Event(type=kind, fields=fields):
                self._on_event(kind, dict(fields))
            case Ready(step=step, has_dropped=has_dropped, reason=reason):
                membership.wait(index, step, has_dropped=has_dropped, reason=reason)
            case Leaving():
                membership.records[index].is_leaving = True
            case Failure(step=step, error=error, traceback=text, is_consequence=is_consequence):
                membership.report(Trouble(index, step, error, text, is_consequence, at_s=now_s))
            case Goodbye():
                membership.finish(index)
            case other:
                self._channel.reply(received, Refused("unexpected", type(other).__name__))

    def _scale(self, received: Received, num_workers: int) -> None:
        if self._on_scale is None:
            self._channel.reply(received, Refused("unexpected", "this run cannot be scaled"))
            return
        try:
            self._channel.reply(received, Accepted(self._on_scale(num_workers)))
        except JobError as error:
            self._channel.reply(received, Refused("refused", str(error)))

    def _welcome(self, received: Received, index: int, member: Member) -> None:
        timeout_s = self._membership.failure_timeout_s
        self._channel.reply(received, Welcome(failure_timeout_s=timeout_s, heartbeat_s=timeout_s / 5))
        self._peers[index], self._members[index] = received.peer, member
        self._incarnations[index] = received.envelope.incarnation
        self._membership.register(index, time.monotonic())

    def _index_of(self, sender: str) -> int | None:
        number = sender.removeprefix(WORKER_PREFIX)
        is_known = sender.startswith(WORKER_PREFIX) and number.isdecimal()
        return int(number) if is_known and int(number) in self._membership.records else None
