"""What the members of a dispatched run say to its dispatcher, beside what members of every run say."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from cordee.cluster.messages import CHECKPOINTS, COMMON
from cordee.communication.messages import Count, Message, Name, Text
from cordee.communication.wire import Limits
from cordee.core.errors import CommunicationError
from cordee.parameters.messages import FollowerLost, Number


class AskServers(Message, frozen=True):
    """Where are the servers? Answered by `Servers` once all of them serve."""

    is_generational = False


class ServerAddress(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a server listens."""

    host_id: Name
    local: Name  # for processes of its host
    public: Annotated[str, Meta(max_length=256)] = ""  # for those of other hosts; empty if they cannot reach it

    def seen_from(self, host_id: str) -> str:
        """Return the address for processes of a host. Raises CommunicationError if they cannot reach the server."""
        address = self.local if host_id == self.host_id else self.public
        if not address:
            raise CommunicationError("the server listens for its own host only: cluster.address is not set")
        return address


class Servers(Message, frozen=True):
    """The addresses of the servers, in order."""

    is_generational = False

    addresses: Annotated[tuple[ServerAddress, ...], Meta(max_length=4096)]


class HandOver(Message, frozen=True):
    """A server was told to leave. Answered by `Leave` once another has its part, else by `Accepted`: ask again."""

    is_generational = False

    has_retired: bool  # its follower has everything, and it answers nobody


class TakeWork(Message, frozen=True):
    """A worker is done with a unit (-1: with none) and wants the next. Answered by `Work` or `Leave`."""

    is_generational = False

    done: Number = -1
    loss_sum: float = 0.0
    count: float = 0.0  # that the loss is the mean over: items, or their weights
    num_items: Count = 0  # that `num_correct` is out of
    num_correct: Number = -1
    num_samples: Count = 0
    # Of the gradients of pieces that this unit completed, where servers clip: number of the parameter, norm.
    norms: Annotated[tuple[tuple[Count, float], ...], Meta(max_length=65536)] = ()
    refused: Text = ""  # why a server did not take the gradient
    leaves: bool = False  # it was told to go, and wants no more work
    attempt: Count = 0  # of the work that is done
    kept: Number = -1  # the step of the `SaveResiduals` that is carried out


class SaveResiduals(Message, frozen=True):
    """The servers are to have what compression left out of this worker's gradients; then it wants work again."""

    is_generational = False

    step: Count


class Work(Message, frozen=True):
    """A unit of work."""

    is_generational = False

    unit: Count
    step: Count
    share: Count
    num_shares: Count
    epoch: Count
    start: Count
    stop: Count
    first_batch: Count  # steps of the job before it
    num_batches: Count  # steps of the job in it
    floor: Count  # units below it are committed
    apply_step: Number = -1  # step that the servers apply, scaled, before this one is computed
    scale: float = 1.0
    attempt: Count = 0  # what is done of an earlier one does not count
    level: Count = 0  # of a schedule that follows a metric


class Leave(Message, frozen=True):
    """There is nothing more to do."""

    is_generational = False


class AskEvaluatorTask(Message, frozen=True):
    """The evaluator is free. Answered by `EvaluatorTask` or `Leave`."""

    is_generational = False


class EvaluatorTask(Message, frozen=True):
    """Read a snapshot, evaluate it, save it."""

    is_generational = False

    number: Count
    step: Count
    evaluate: bool
    save: bool
    is_last: bool  # of the run
    progress: Text  # encoded like the values of a checkpoint, for the checkpoint
    apply_step: Number = -1
    scale: float = 1.0
    residuals: bool = False  # the servers have what compression left out


class SnapshotTaken(Message, frozen=True):
    """The evaluator has read the snapshot: the servers may continue. Answered by `Accepted`."""

    is_generational = False

    ages: Annotated[tuple[Count, ...], Meta(max_length=4096)]


class EvaluatorTaskDone(Message, frozen=True):
    """A task is carried out; `metrics` is empty if none were asked for. Answered by `Accepted`."""

    is_generational = False

    step: Count
    metrics: Text  # encoded like the values of a checkpoint
    weights_sha256: Text
    path: Text = ""
    seconds: float = 0.0
    problem: Text = ""
    number: Count = 0  # of the task


DISPATCHED: tuple[type[Message], ...] = (
    *COMMON, AskServers, Servers, FollowerLost, HandOver, TakeWork, Work, SaveResiduals, Leave, AskEvaluatorTask,
    EvaluatorTask, SnapshotTaken, EvaluatorTaskDone, *CHECKPOINTS,
)  # fmt: skip
LIMITS = Limits(max_header_bytes=1 << 20)
