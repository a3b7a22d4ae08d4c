"""What a member reports to the coordinator of its run: events, and what the coordinator decides by.

An event is for people and their programs: it goes to `events.jsonl` and to the screen. The other messages are for the
coordinator alone. `Numbered` ones count up and are noted once, in order, also by a coordinator that comes back; a
member sends them again until they are noted. The others are soon out of date and may be lost.
"""

from __future__ import annotations

from typing import TypeAlias

from cordee.communication.messages import COORDINATION, MEMBERSHIP, Bye, Count, Failure, Message, Text
from cordee.monitoring.events import AnyEvent
from cordee.monitoring.summary import Summary


class Event(Message, frozen=True):
    """Something that happened in the sender, with its time and place."""

    is_generational = False

    record: AnyEvent
    number: Count = 0


class FirstStep(Message, frozen=True):
    """The team has taken its first step. The first member tells: this ends the recovery from a loss."""

    is_generational = False

    step: Count
    number: Count = 0


class DataFingerprint(Message, frozen=True):
    """What the run's data is known by: members on other hosts must have the same."""

    is_generational = False

    fingerprint: Text
    number: Count = 0


class WorkerSummary(Message, frozen=True):
    """What came out of training in this worker. All of the last team send one; the run's summary is made of them."""

    is_generational = False

    summary: Summary
    number: Count = 0


class StepTime(Message, frozen=True):
    """How long the sender computed its own part of a step. By this the slow ones are found."""

    is_generational = False

    step: Count
    seconds: float


class StepReached(Message, frozen=True):
    """Where training is, for the progress bar."""

    is_generational = False

    step: Count
    loss: float | None


Numbered: TypeAlias = Event | FirstStep | DataFingerprint | WorkerSummary | Failure | Bye
TeamReport: TypeAlias = FirstStep | DataFingerprint | WorkerSummary | StepTime | StepReached
COMMON: tuple[type[Message], ...] = (*MEMBERSHIP, Event)
TEAM: tuple[type[Message], ...] = (
    *COORDINATION, Event, FirstStep, DataFingerprint, WorkerSummary, StepTime, StepReached,
)  # fmt: skip
