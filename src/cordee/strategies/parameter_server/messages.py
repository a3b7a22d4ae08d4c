"""What workers and servers of parameters say to each other."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from cordee.communication.messages import Count, Message, Name, Text
from cordee.communication.wire import Limits
from cordee.parameters.messages import Adopt, Client, Done, Load, Number, ServerMessage, Value


class Push(ServerMessage, frozen=True):
    """The gradient of one unit for one piece; the buffers are as the compression says. Answered by `Pushed`."""

    piece: Count
    unit: Count
    step: Count
    share: Count
    num_shares: Count
    count: float  # what it is the mean over: items, or their weights
    base: Count  # version of the parameters it was computed from
    floor: Count  # all units below it are committed
    unused: Annotated[tuple[Count, ...], Meta(max_length=65536)] = ()  # slices of the piece without a gradient
    worker: Client = ""  # whose it is, where a server passes it on to its follower
    level: Count = 0  # of a schedule that follows a metric


class Pushed(ServerMessage, frozen=True):
    """What became of a push: "applied", "staged" until the step is complete, "known" already, or "refused"."""

    outcome: Name
    # Of the slices of the gradient of the whole step, from the push that completed it; -1: without a gradient. Empty
    # where servers do not clip.
    norms: Annotated[tuple[float, ...], Meta(max_length=65536)] = ()
    detail: Text = ""


class Pull(ServerMessage, frozen=True):
    """The parameters of one piece, please, after step `apply_step` was applied, scaled, where it waits for that."""

    piece: Count
    has: Count = 0  # which of those that were sent to this worker came last
    apply_step: Number = -1
    scale: float = 1.0
    memory: Number = -1  # number of the shared memory that the worker has mapped; 0: it could map some; -1: it cannot


class Pulled(Value, frozen=True):
    """The parameters of a piece, or their change since the last."""

    sent: Count = 0  # how many times the worker has been sent them


class PushExtras(ServerMessage, frozen=True):
    """The buffers of a worker's model (running statistics), for the snapshot. Answered by `Done`."""

    unit: Count
    names: Annotated[tuple[Name, ...], Meta(max_length=4096)]
    worker: Client = ""
    step: Count = 0
    share: Count = 0
    num_shares: Count = 1


class PullExtras(ServerMessage, frozen=True):
    """The buffers that all workers start a step from, in reproducible mode. Answered by `Extras`."""

    apply_step: Number = -1


class Snapshot(ServerMessage, frozen=True):
    """Everything the server has of one piece, optimizer included. Answered by `Snapped`."""

    piece: Count
    apply_step: Number = -1
    scale: float = 1.0


class Snapped(ServerMessage, frozen=True):
    """The parameters of a piece, the tensors of its optimizer state by name, and the rest of that as JSON bytes."""

    version: Count
    names: Annotated[tuple[Name, ...], Meta(max_length=65536)]


class SnapshotExtras(ServerMessage, frozen=True):
    """The buffers of all workers' models, averaged, and how old gradients were. Answered by `Extras`."""

    apply_step: Number = -1


class Extras(ServerMessage, frozen=True):
    """Buffers by name, and a histogram: entry i counts gradients that i updates had overtaken."""

    names: Annotated[tuple[Name, ...], Meta(max_length=4096)]
    ages: Annotated[tuple[Count, ...], Meta(max_length=4096)]


class Fence(ServerMessage, frozen=True):
    """Nothing this worker says from now on counts. Answered by `Done`."""

    worker: Name
    incarnation: Count


class KeepResidual(ServerMessage, frozen=True):
    """What compression has left out of a worker's gradients of one piece, for the checkpoint. Answered by `Done`.

    The worker is sent the parameters of the piece whole the next time, as the first time in a run.
    """

    piece: Count
    step: Count  # of the job, that the servers have
    worker: Client = ""


class PullResiduals(ServerMessage, frozen=True):
    """What was left out of gradients of one piece: of one worker, or of all that sent it at `step`.

    Answered by `Residuals`.
    """

    piece: Count
    step: Number = -1
    worker: Client = ""


class Residuals(ServerMessage, frozen=True):
    """The workers; the buffers are theirs, in this order."""

    workers: Annotated[tuple[Name, ...], Meta(max_length=65536)]


class ApplyPending(ServerMessage, frozen=True):
    """For a follower: apply step `apply_step` to a piece, as the first is about to. Answered by `Done`."""

    piece: Number  # -1: the buffers of the workers' models
    apply_step: Number
    scale: float = 1.0
    seen_by: Client = ""  # the worker that is given the parameters


class LoadExtras(ServerMessage, frozen=True):
    """All that a server knows of the buffers of the workers' models: tensors, and their meaning as JSON bytes.

    What the receiver knew of them before is forgotten. Answered by `Done`.
    """

    names: Annotated[tuple[Name, ...], Meta(max_length=65536)]


PARAMETERS: tuple[type[Message], ...] = (
    Push, Pushed, Pull, Pulled, PushExtras, PullExtras, Snapshot, Snapped, SnapshotExtras, Extras, Fence, ApplyPending,
    KeepResidual, PullResiduals, Residuals, Adopt, Load, LoadExtras, Done,
)  # fmt: skip
LIMITS = Limits(max_header_bytes=8 << 20, max_buffers=65536, max_buffer_bytes=1 << 31)
