"""What the workers of a federated run say to its coordinator, beside what members of every run say."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from cordee.cluster.messages import COMMON
from cordee.communication.messages import Count, Message, Text
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


FEDERATED: tuple[type[Message], ...] = (*COMMON, TakeTask, Task, Leave, Ping)
LIMITS = Limits(max_header_bytes=1 << 22)
