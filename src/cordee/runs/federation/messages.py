"""What a federation's server and its clients say to each other.

Clients ask and the server answers, so that clients need no open port. A client that waits for work asks by `Poll`, and
the server answers when there is work. Every message may be sent again: the server counts what it has once.
"""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from cordee.cluster.engines.agent_messages import Versions
from cordee.communication.messages import Accepted, Count, Message, Name, Refused, Text
from cordee.communication.wire import Limits
from cordee.core.errors import JobError

TaskStage: TypeAlias = Literal["train", "keys", "shares", "masked", "revealed"]
MOST_CLIENTS = 4096
_Key = Annotated[bytes, Meta(min_length=32, max_length=32)]
_Sealed = Annotated[bytes, Meta(max_length=256)]
_Share = Annotated[bytes, Meta(min_length=16, max_length=16)]
_Keys = Annotated[dict[Name, tuple[_Key, _Key]], Meta(max_length=MOST_CLIENTS)]
_SealedShares = Annotated[dict[Name, _Sealed], Meta(max_length=MOST_CLIENTS)]
_Shares = Annotated[dict[Name, _Share], Meta(max_length=MOST_CLIENTS)]
_Round = Annotated[int, Meta(ge=-1, le=2**63 - 1)]

# Why the server refuses: the client ends, or asks for its next task.
NOT_INVITED, REVOKED, ANOTHER_MODEL, WRONG_UPDATE, LATE = (
    "not-invited",
    "revoked",
    "another-model",
    "wrong-update",
    "late",
)
NOT_READY = "not-ready"  # the server has started again, and does not know the client's model yet
ENDS_CLIENT = (NOT_INVITED, REVOKED, ANOTHER_MODEL)


class Invitation(msgspec.Struct, frozen=True, kw_only=True):
    """What a client is invited with. Good for one client, which makes its own pair of keys."""

    run: str
    name: str
    address: str  # HOST:PORT of the server
    server_key: str  # public, in hexadecimal
    ticket: str

    def to_text(self) -> str:
        """Return one line of letters, digits, '-', '_' and '='."""
        return base64.urlsafe_b64encode(msgspec.json.encode(self)).decode()

    @classmethod
    def from_text(cls, text: str) -> Invitation:
        """Raises JobError if this is not what `to_text` wrote."""
        try:
            content = base64.b64decode(text.strip(), altchars=b"-_", validate=True)
            return msgspec.json.decode(content, type=cls)
        except (binascii.Error, ValueError):
            raise JobError("the token is damaged: it was cut or changed; copy the whole line") from None


class Task(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a client is asked for: one stage of one attempt of a round."""

    round: Count
    attempt: Count
    stage: TaskStage


class Agreement(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the clients of a secure round agree on."""

    context: Name
    threshold: Count
    num_clients: Count


class Enrol(Message, frozen=True):
    """The sender's key belongs to a client that was invited. Answered by `Enrolled`, or `Refused`."""

    is_generational = False

    name: Name
    ticket: Annotated[str, Meta(max_length=256)]
    versions: Versions


class Enrolled(Message, frozen=True):
    """The key is that of the client from now on. `job` is TOML."""

    is_generational = False

    job: Text
    num_classes: Count  # of the model; 0: it has none
    heartbeat_s: Annotated[float, Meta(gt=0)]


class Ready(Message, frozen=True):
    """The client has its data and this model. Answered by `Accepted`, or `Refused`."""

    is_generational = False

    layout: Name  # hash of the names, shapes and types of the parameters
    num_samples: Count
    state_round: _Round  # of the state that the client keeps; -1: it has none


class Poll(Message, frozen=True):
    """The client has nothing to do. Answered by `Work`, `Wait` or `Finished`, when there is news or after a while."""

    is_generational = False


class Alive(Message, frozen=True):
    """The client works. Not answered."""

    is_generational = False


class Wait(Message, frozen=True):
    """There is no work yet."""

    is_generational = False

    reason: Text = ""


class Finished(Message, frozen=True):
    """All rounds are done, or the server has ended the run."""

    is_generational = False

    reason: Text
    counted: _Round


class Work(Message, frozen=True):
    """A task. Its buffers at 'train' and 'masked' are parameters, buffers and the vectors of `own`."""

    is_generational = False

    task: Task
    counted: _Round  # the last round in which an update of this client was counted
    own: Annotated[tuple[Name, ...], Meta(max_length=16)] = ()
    agreement: Agreement | None = None
    directory: _Keys = msgspec.field(default_factory=dict)
    sealed: _SealedShares = msgspec.field(default_factory=dict)
    survivors: Annotated[tuple[Name, ...], Meta(max_length=MOST_CLIENTS)] = ()


class Result(Message, frozen=True):
    """What came of a task. Answered by `Taken` once it is on the disk, or by `Refused`.

    Buffers at 'train': the payload, the buffers and the vectors of `summed`; at 'masked': the masked words.
    """

    is_generational = False

    task: Task
    num_samples: Count = 0
    num_steps: Count = 0
    num_trained: Count = 0  # samples of all steps
    num_payload: Annotated[int, Meta(ge=0, le=4096)] = 0  # buffers that are the difference
    summed: Annotated[tuple[Name, ...], Meta(max_length=16)] = ()
    scale: float = 1.0
    loss_sum: float = 0.0
    loss_count: float = 0.0
    test: tuple[Count, Count, Count] | None = None
    keys: tuple[_Key, _Key] | None = None
    sealed: _SealedShares = msgspec.field(default_factory=dict)
    commitment: Annotated[bytes, Meta(max_length=32)] = b""
    share_number: Count = 0
    self_seeds: _Shares = msgspec.field(default_factory=dict)
    mask_secrets: _Shares = msgspec.field(default_factory=dict)


class Failed(Message, frozen=True):
    """The client cannot do a task, and sends nothing in this round. Answered by `Accepted`."""

    is_generational = False

    task: Task
    error: Text


class Taken(Message, frozen=True):
    """The result is on the server's disk."""

    is_generational = False


FEDERATION: tuple[type[Message], ...] = (
    Enrol,
    Enrolled,
    Ready,
    Accepted,
    Poll,
    Alive,
    Wait,
    Finished,
    Work,
    Result,
    Failed,
    Taken,
    Refused,
)


def limits_for(num_values: int, num_buffer_values: int, num_vectors: int) -> Limits:
    """Return limits for a model of so many shared values: what is larger is refused before it is read."""
    return Limits(
        max_header_bytes=1 << 20,
        max_buffers=num_vectors,
        max_buffer_bytes=max(8 * num_values, 8 * num_buffer_values, 1024) + 64,
        max_queued=64,
    )
