"""What the workers of a federated run say to its coordinator, beside what members of every run say."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from cordee.cluster.messages import CHECKPOINTS, COMMON, PIECE_BYTES, FilePiece
from cordee.communication.messages import Count, Message, Name, Text
from cordee.communication.wire import Limits
from cordee.parameters.messages import Number
from cordee.runs.dispatched.messages import Leave

TaskKind = Literal["prepare", "client", "merge", "finish"]


class TakeTask(Message, frozen=True):
    """A worker is done with a task ("": with none) and wants the next. Answered by `Task` or `Leave`."""

    is_generational = False

    done: Literal["", "prepare", "client", "merge", "finish"] = ""
    round: Count = 0  # of the task that is done
    index: Count = 0
    refused: Text = ""  # why the client's update does not count
    result: Text = ""  # of "prepare" and "finish", encoded like the values of a checkpoint
    leaves: bool = False  # it was told to go, and wants no more work


class Task(Message, frozen=True):
    """Something to do.

    prepare: have the files of the first round ready. client: train a client. merge: sum a block of places. finish: sum
    the round, take the outer step, evaluate and save.
    """

    is_generational = False

    what: TaskKind
    round: Count
    index: Count = 0  # of the client's place, or of the block
    client: Number = -1
    base: Count = 0  # updates of the server that are in what the client is sent
    num_places: Count = 0  # of the round
    places: Annotated[tuple[Count, ...], Meta(max_length=1 << 20)] = ()  # that took part: of the block, or the round
    evaluate: bool = False
    save: bool = False
    oldest: Count = 0  # what clients were sent before this round is not needed any more
    progress: Text = ""  # for the checkpoint


class Ping(Message, frozen=True):
    """Does the coordinator know the sender? Answered by `Leave`, which means nothing here, or `Refused`."""

    is_generational = False


# Files of a member that has no access to the run directory. Requests may be made again, and count once.


class ReadRoundFile(Message, frozen=True):
    """Bytes of a file are wanted. Answered by `FilePiece`."""

    is_generational = False

    name: Name
    offset: Count


class AskRoundFiles(Message, frozen=True):
    """Which files are there? Answered by `RoundFileNames`."""

    is_generational = False

    folder: Annotated[str, Meta(max_length=128)]  # "" is that of the run


class RoundFileNames(Message, frozen=True):
    """The names in a folder."""

    is_generational = False

    names: tuple[Name, ...]
    problem: Text = ""  # why they cannot be read


class WriteRoundFile(Message, frozen=True):
    """Bytes of a file, in their order. Answered by `RoundFileTaken`."""

    is_generational = False

    member: Name
    incarnation: Count  # of the member: the coordinator takes nothing of one that was given up
    name: Name
    offset: Count
    content: Annotated[bytes, Meta(max_length=PIECE_BYTES)]
    is_last: bool


class RoundFileTaken(Message, frozen=True):
    """What became of a piece."""

    is_generational = False

    is_known: bool = True  # else what was before it is missing: send all again
    problem: Text = ""  # why it is not written


class ChangeRoundFiles(Message, frozen=True):
    """Files are to be removed. Answered by `RoundFilesChanged`."""

    is_generational = False

    member: Name
    incarnation: Count
    names: Annotated[tuple[Name, ...], Meta(max_length=1 << 14)] = ()
    is_clear: bool = False  # all of them


class RoundFilesChanged(Message, frozen=True):
    """They are gone, unless there is a problem."""

    is_generational = False

    problem: Text = ""


RoundFileRequest: TypeAlias = ReadRoundFile | AskRoundFiles | WriteRoundFile | ChangeRoundFiles

ROUND_FILES: tuple[type[Message], ...] = (
    ReadRoundFile, FilePiece, AskRoundFiles, RoundFileNames, WriteRoundFile, RoundFileTaken, ChangeRoundFiles,
    RoundFilesChanged,
)  # fmt: skip
FEDERATED: tuple[type[Message], ...] = (
    *COMMON, TakeTask, Task, Leave, Ping, *CHECKPOINTS,
    *(each for each in ROUND_FILES if each not in CHECKPOINTS),
)  # fmt: skip
LIMITS = Limits(max_header_bytes=1 << 22)
