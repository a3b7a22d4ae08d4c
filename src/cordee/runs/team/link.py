"""A worker's side of the run of a team: joins, shows that it lives, passes events on, hears what to do."""

from __future__ import annotations

import contextlib
import logging
import queue
from collections import deque
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import msgspec

from cordee.cluster.member_link import LONGEST_ABSENCE_S, MemberLink, MemberSpec
from cordee.cluster.members import GIVEN_UP
from cordee.cluster.messages import TEAM, Numbered, StepReached, StepTime, TeamReport
from cordee.communication.channel import Received, RefusedError
from cordee.communication.messages import (
    Acknowledged,
    Bye,
    Directive,
    Failure,
    Heartbeat,
    Leaving,
    Message,
    Ready,
    Refused,
)
from cordee.communication.wire import Codec
from cordee.core.errors import CommunicationError
from cordee.core.fault_points import reach

log = logging.getLogger("cordee.worker")

LONGEST_NAP_S = 0.25  # between two looks at whether this worker wants to leave


class Answer(NamedTuple):
    """What a worker that was ready is told to do."""

    directive: Directive
    generation: int


class TeamLink(MemberLink):
    """A worker's connection to the coordinator. It does not wait: what is not acknowledged is sent again."""

    def __init__(self, spec: MemberSpec) -> None:
        super().__init__(spec, Codec(TEAM))
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._ready: Ready | None = None  # asked and not answered
        self._num_asked = 0
        self._outbox: deque[Numbered] = deque()  # sent and not acknowledged
        self._last_beat = (0, 0)  # its sequence, and how many numbered messages were sent before it
        self._is_stop_asked = False
        self._is_pause_asked = False
        self._ended_generation = (0, "")  # the last generation that is known to be over, and why
        self._on_generation_end: Callable[[], None] = lambda: None
        self._wants_to_leave = False
        self._refusal = ""  # why this worker is not one any more
        self.num_returns = 0  # how often it was given up and joined again: the others continued without it

    @property
    def is_stop_asked(self) -> bool:
        return self._is_stop_asked

    @property
    def is_pause_asked(self) -> bool:
        """Whether the team is to be formed again after this step."""
        return self._is_pause_asked

    def why_generation_ended(self, generation: int) -> str:
        """Why a generation cannot come about, as far as the coordinator has said so."""
        last, reason = self._ended_generation
        return reason if generation <= last else ""

    def join(self) -> None:
        """Register, and show signs of life from now on."""
        joined = self._join(self._spec.startup_timeout_s)
        reach("link.joined")
        self._start_heartbeats(joined.heartbeat_s)

    def _reach(self, when: Literal["ask", "answered"], message: Message) -> None:
        if when == "ask":
            reach("link.join")

    def await_generation(self, step: int, *, has_dropped: bool, reason: str = "") -> Answer:
        """Say that this worker is ready, with `step` steps taken or -1 for nothing, and wait for what to do.

        Waits as long as it takes: the others may still be loading their data. If the launcher dies, so do we.
        """
        if self._refusal:
            return Answer(Directive("leave"), 0)
        self._num_asked += 1
        ready = self._ready = Ready(step, has_dropped, reason[:4000], self._num_asked, self._num_sent)
        self._send(ready)
        reach("link.ready")
        answer = self._answers.get()
        reach("link.answered")
        return answer

    @contextlib.contextmanager
    def on_generation_end(self, generation: int, act: Callable[[], None]) -> Iterator[None]:
        """Inside, have `act` called, by another thread, when the generation is known to be over."""
        self._on_generation_end = act
        try:
            if self.why_generation_ended(generation):
                act()
            yield
        finally:
            self._on_generation_end = lambda: None

    def _end_generation(self, generation: int, reason: str) -> None:
        self._ended_generation = max(self._ended_generation, (generation, reason))
        if generation >= self._channel.generation:
            self._on_generation_end()

    def ask_to_leave(self) -> None:
        """Have the coordinator told that this worker must go. For signal handlers: returns at once."""
        self._wants_to_leave, self._beat_by_s = True, 0.0

    def report(self, report: TeamReport) -> None:
        """Tell the coordinator how training goes: now or when it is back, or not at all if that is soon out of date."""
        if isinstance(report, StepTime | StepReached):
            self._send(report)
        else:
            self._send_numbered(report)

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self._await_acknowledged(2 * self._spec.failure_timeout_s)

    def leave(self) -> None:
        if self._refusal:
            return
        super().leave()
        reach("link.goodbye")
        self._await_acknowledged(max(LONGEST_ABSENCE_S, 4 * self._spec.failure_timeout_s))

    def _send(self, message: Message) -> None:
        """Send without waiting; whatever matters is said again."""
        with contextlib.suppress(CommunicationError):
            _reach_point_of(message)
            self._channel.send(message, timeout_s=0.0)

    def _deliver(self, message: Numbered) -> None:
        self._outbox.append(message)
        self._send(message)

    def _await_acknowledged(self, timeout_s: float) -> None:
        with self._outbox_changed:
            self._outbox_changed.wait_for(lambda: not self._outbox, timeout_s)

    def _await_message(self, timeout_s: float) -> Received | None:
        return self._channel.receive(min(timeout_s, LONGEST_NAP_S))  # no other thread asks

    def _take(self, received: Received) -> None:
        match received.message:
            case Directive() as directive:
                self._handle_request(directive, received.envelope.generation)
            case Acknowledged(number=number):
                self._take_acknowledgement(number, received.envelope.reply_to)
            case Refused() as refused if not self._refusal:
                self._rejoin(refused, received.envelope.reply_to)

    def _rejoin(self, refused: Refused, reply_to: int) -> None:
        """This worker was given up while it could not speak: join again, or learn that another has its place."""
        if refused.reason not in GIVEN_UP or reply_to != self._last_beat[0]:  # earlier messages are refused as well
            return
        with self._outbox_changed:  # what it had to say is of the past
            self._outbox.clear()
            self._num_sent, self._last_beat, self._num_asked = 0, (0, 0), 1
            incarnation = self._channel.speaker.incarnation + 1
            self._channel.speaker = msgspec.structs.replace(self._channel.speaker, incarnation=incarnation)
            if self._ready is not None:
                self._ready = msgspec.structs.replace(self._ready, step=-1, has_dropped=False, number=1, num_sent=0)
            self.num_returns += 1
            self._outbox_changed.notify_all()
        self._end_generation(self._channel.generation, "this worker was given up")
        reach("link.given_up")
        try:
            self._join(LONGEST_ABSENCE_S)
            log.warning("this worker was given up because it could not be heard; it has joined again")
        except RefusedError as error:
            self._refusal = error.detail or str(error)
            log.warning("this worker was given up because it could not be heard, and leaves: %s", self._refusal)
            self._ready = None
            self._answers.put(Answer(Directive("leave"), 0))

    def _beat(self) -> None:
        """Show that this worker lives, and say again what was not answered."""
        with self._outbox_changed:
            num_sent = self._num_sent
            sequence = self._channel.send(Heartbeat(self.step), timeout_s=0.0)
            self._last_beat = (sequence, num_sent)
        if self._wants_to_leave:
            self._send(Leaving())
        if (ready := self._ready) is not None:
            self._send(ready)

    def _take_acknowledgement(self, number: int, reply_to: int) -> None:
        """Forget what has been acknowledged; send again what was sent before the last heartbeat and was not."""
        with self._outbox_changed:
            while self._outbox and self._outbox[0].number <= number:
                self._outbox.popleft()
            beat, num_sent = self._last_beat
            if reply_to == beat and number < num_sent:
                for message in self._outbox:
                    self._send(message)
            self._outbox_changed.notify_all()

    def _handle_request(self, directive: Directive, generation: int) -> None:
        if directive.action == "stop":
            reach("link.stop")
            self._is_stop_asked = True
        elif directive.action == "pause":
            reach("link.pause")
            self._is_pause_asked = generation >= self._channel.generation  # not one of an earlier generation
        elif directive.action == "end_generation":
            reach("link.generation_ended")
            self._end_generation(directive.generation, directive.reason)
        elif self._ready is not None and directive.answers == self._ready.number:
            self._ready = None
            self._is_pause_asked = False
            self._channel.generation = max(self._channel.generation, directive.generation)
            self._answers.put(Answer(directive, directive.generation))


def _reach_point_of(message: Message) -> None:
    match message:
        case Ready():
            reach("link.send_ready")
        case Leaving():
            reach("link.send_leaving")
        case Failure():
            reach("link.send_failure")
        case Bye():
            reach("link.send_goodbye")
