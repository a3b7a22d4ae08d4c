"""What workers and servers of parameters say to each other."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from cordee.communication.messages import Count, Message, Name, Text
from cordee.communication.wire import Limits
from cordee.parameters.messages import Adopt, Load, Memory

Number = Annotated[int, Meta(ge=-1, le=2**62)]


class Push(Message, frozen=True):
    """The gradient of one unit for one piece; the buffers are as the compression says. Answered by `Pushed`."""

    is_generational = False

    piece: Count
    unit: Count
    step: Count
    share: Count
    num_shares: Count
    count: float  # what it is the mean over: items, or their weights
    base: Count  # version of the parameters it was computed from
    floor: Count  # all units below it are committed
    unused: Annotated[tuple[Count, ...], Meta(max_length=65536)] = ()  # slices of the piece without a gradient
    worker: Annotated[str, Meta(max_length=128)] = ""  # whose it is, where a server passes it on to its second


class Pushed(Message, frozen=True):
    """What became of a push: "applied", "staged" until the step is complete, "known" already, or "refused"."""

    is_generational = False

    outcome: Name
    # Of the slices of the gradient of the whole step, from the push that completed it; -1: without a gradient. Empty
    # where servers do not clip.
    norms: Annotated[tuple[float, ...], Meta(max_length=65536)] = ()
    detail: Text = ""


class Pull(Message, frozen=True):
    """The parameters of one piece, please, after step `settles` was applied, scaled, where it waits for that."""

    is_generational = False

    piece: Count
    has: Count = 0  # stamp of what this worker got last
    settles: Number = -1
    scale: float = 1.0
    memory: Number = -1  # number of the shared memory that the worker has mapped; 0: it could map some; -1: it cannot


class Pulled(Message, frozen=True):
    """The parameters of a piece, or their change since the last; `version` counts the updates in them.

    With `read_at` they are not sent: the worker reads them in the memory that it has mapped, where this stamp must be.
    """

    is_generational = False

    version: Count
    stamp: Count = 0
    read_at: Number = -1
    memory: Memory | None = None  # where the worker finds the parameters next time


class PushExtras(Message, frozen=True):
    """The buffers of a worker's model (running statistics), for the snapshot. Answered by `Pushed`."""

    is_generational = False

    unit: Count
    names: Annotated[tuple[Name, ...], Meta(max_length=4096)]
    worker: Annotated[str, Meta(max_length=128)] = ""
    step: Count = 0
    share: Count = 0
    num_shares: Count = 1


class PullExtras(Message, frozen=True):
    """The buffers that all workers start a step from, in reproducible mode. Answered by `Extras`."""

    is_generational = False

    settles: Number = -1


class Snapshot(Message, frozen=True):
    """Everything the server has of one piece, optimizer included. Answered by `Snapped`."""

    is_generational = False

    piece: Count
    settles: Number = -1
    scale: float = 1.0


class Snapped(Message, frozen=True):
    """The parameters of a piece, the tensors of its optimizer state by name, and the rest of that as JSON bytes."""

    is_generational = False

    version: Count
    names: Annotated[tuple[Name, ...], Meta(max_length=65536)]


class SnapshotExtras(Message, frozen=True):
    """The buffers of all workers' models, averaged, and how old gradients were. Answered by `Extras`."""

    is_generational = False

    settles: Number = -1


class Extras(Message, frozen=True):
    """Buffers by name, and a histogram: entry i counts gradients that i updates had overtaken."""

    is_generational = False

    names: Annotated[tuple[Name, ...], Meta(max_length=4096)]
    ages: Annotated[tuple[Count, ...], Meta(max_length=4096)]


class Fence(Message, frozen=True):
    """Nothing this worker says from now on counts. Answered by `Pushed`."""

    is_generational = False

    worker: Name
    incarnation: Count


class Settle(Message, frozen=True):
    """For a second server: apply step `settles` to a piece, as the first is about to. Answered by `Pushed`."""

    is_generational = False

    piece: Number  # -1: the buffers of the workers' models
    settles: Number
    scale: float = 1.0
    seen_by: Annotated[str, Meta(max_length=128)] = ""  # the worker that is given the parameters


class LoadExtras(Message, frozen=True):
    """All that a server knows of the buffers of the workers' models: tensors, and their meaning as JSON bytes.

    What the receiver knew of them before is forgotten. Answered by `Pushed`.
    """

    is_generational = False


PARAMETERS: tuple[type[Message], ...] = (
    Push, Pushed, Pull, Pulled, PushExtras, PullExtras, Snapshot, Snapped, SnapshotExtras, Extras, Fence, Settle,
    Adopt, Load, LoadExtras,
)  # fmt: skip
LIMITS = Limits(max_header_bytes=8 << 20, max_buffers=65536, max_buffer_bytes=1 << 31)
