"""What a member reports to the coordinator of its run: events, and what the coordinator decides by.

An event is for people and their programs: it goes to `events.jsonl` and to the screen. The other messages are for the
coordinator alone. `Numbered` ones count up and are acknowledged once, in order, also by a coordinator that comes back;
a member sends them again until they are acknowledged. The others are soon out of date and may be lost.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

from cordee.communication.messages import COORDINATION, MEMBERSHIP, Bye, Count, Failure, Message, Name, Text
from cordee.monitoring.events import AnyEvent
from cordee.monitoring.summary import Summary
from cordee.monitoring.timeline import Line


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


class TimelineReport(Message, frozen=True):
    """What the sender did when, for the run directory, which it cannot reach. Soon out of date: it may be lost."""

    is_generational = False

    line: Line


# Checkpoints of a member that has no access to the run directory. Requests may be made again, and count once.

PIECE_BYTES = 1 << 19  # of a checkpoint, in one message


class CheckpointPiece(Message, frozen=True):
    """Bytes of a checkpoint to be saved, in the order of their numbers. Answered by `CheckpointTaken`."""

    is_generational = False

    member: Name
    incarnation: Count  # of the member: the coordinator takes nothing of one that was given up
    number: Count  # of the checkpoint, among those of the member
    index: Count  # of the piece
    step: Count
    file: Name
    content: Annotated[bytes, Meta(max_length=PIECE_BYTES)]


class CheckpointEnd(Message, frozen=True):
    """All pieces are sent: the checkpoint is to be saved if it is what was sent. Answered by `CheckpointTaken`."""

    is_generational = False

    member: Name
    incarnation: Count
    number: Count
    index: Count  # how many pieces there were
    files: Annotated[dict[Name, tuple[Count, Name]], Meta(max_length=64)]  # size and SHA-256 of each
    keep: Annotated[int, Meta(ge=1, le=2**63 - 1)]  # how many checkpoints are left
    protected: Annotated[tuple[Count, ...], Meta(max_length=1024)]  # steps whose checkpoints are left besides


class CheckpointTaken(Message, frozen=True):
    """What became of a piece, or of the whole checkpoint."""

    is_generational = False

    is_known: bool = True  # else pieces before it are missing, since another coordinator had them: send all again
    path: Text = ""  # of the checkpoint, when it is saved
    problem: Text = ""  # why it is not saved


class AskCheckpoints(Message, frozen=True):
    """Which checkpoints are there? Answered by `CheckpointNames`."""

    is_generational = False


class CheckpointNames(Message, frozen=True):
    """The checkpoints of the run, oldest first, whole or not."""

    is_generational = False

    names: tuple[Name, ...]
    problem: Text = ""  # why they cannot be read


class ReadPiece(Message, frozen=True):
    """Bytes of a checkpoint are wanted. Answered by `FilePiece`."""

    is_generational = False

    name: Name  # of the checkpoint
    file: Name
    offset: Count


class FilePiece(Message, frozen=True):
    """Bytes of a file from where they were asked for."""

    is_generational = False

    content: Annotated[bytes, Meta(max_length=PIECE_BYTES)]
    num_bytes: Count  # of the whole file
    problem: Text = ""  # why it cannot be read


CheckpointRequest: TypeAlias = CheckpointPiece | CheckpointEnd | AskCheckpoints | ReadPiece

Numbered: TypeAlias = Event | FirstStep | WorkerSummary | Failure | Bye
TeamReport: TypeAlias = FirstStep | WorkerSummary | StepTime | StepReached
COMMON: tuple[type[Message], ...] = (*MEMBERSHIP, Event, TimelineReport)
CHECKPOINTS: tuple[type[Message], ...] = (
    CheckpointPiece, CheckpointEnd, CheckpointTaken, AskCheckpoints, CheckpointNames, ReadPiece, FilePiece,
)  # fmt: skip
TEAM: tuple[type[Message], ...] = (
    *COORDINATION, Event, FirstStep, WorkerSummary, StepTime, StepReached, TimelineReport,
    *CHECKPOINTS,
)  # fmt: skip
