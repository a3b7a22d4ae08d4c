"""What the clients of a store, its servers and its directory say to each other."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from cordee.communication.buffers import MAX_DIMENSIONS, Kind
from cordee.communication.messages import Count, Json, Message, Name, Text
from cordee.communication.wire import Limits

Shape: TypeAlias = Annotated[tuple[Annotated[int, Meta(ge=0, le=2**48)], ...], Meta(max_length=MAX_DIMENSIONS)]
Role: TypeAlias = Literal["worker", "server"]


class Cut(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Elements [start, stop) of an array, in C order, on one server."""

    server: Count
    start: Count
    stop: Count


Cuts: TypeAlias = Annotated[tuple[Cut, ...], Meta(min_length=1, max_length=4096)]


class _StoreMessage(Message, frozen=True):
    is_generational = False


# To the directory.


class JoinRequest(_StoreMessage, frozen=True):
    """A process wants to take part; said again until all are there. Answered by `Enlisted`."""

    role: Role
    pid: Count
    host: Name
    address: Text = ""  # where a server listens


class Enlisted(_StoreMessage, frozen=True):
    """The place of the process among those of its role, how many are expected, and who is there."""

    index: Count
    num_workers: Count  # 0: as many as come
    num_servers: Count
    workers_present: Count
    addresses: Annotated[tuple[Text, ...], Meta(max_length=4096)]  # of the servers present; "": the directory's own


class Alive(_StoreMessage, frozen=True):
    """The sender lives. Answered by `Standing`."""


class Standing(_StoreMessage, frozen=True):
    """Whether the store is coming to its end, and the workers that are lost: nothing of theirs is taken any more."""

    is_over: bool
    lost: Annotated[tuple[Name, ...], Meta(max_length=1 << 16)] = ()


class Place(_StoreMessage, frozen=True):
    """The sender initialises a key. Answered by `Placed`, when another does so first: once that is done."""

    key: Name
    dtype: Kind
    shape: Shape
    sequence: Count


class Placed(_StoreMessage, frozen=True):
    """Where the key belongs, and whether it is the asker who has to bring its value there."""

    is_yours: bool
    number: Count
    cuts: Cuts


class Ready(_StoreMessage, frozen=True):
    """The value of the key is on the servers. Answered by `Done`."""

    key: Name


class Locate(_StoreMessage, frozen=True):
    """Where is this key? Answered by `Located`."""

    key: Name


class Located(_StoreMessage, frozen=True):
    """What is known of a key."""

    number: Count
    dtype: Kind
    shape: Shape
    cuts: Cuts


class Meet(_StoreMessage, frozen=True):
    """The sender has come to its barrier of this number. Answered by `Done` when all workers have."""

    number: Count
    timeout_s: float


class Bye(_StoreMessage, frozen=True):
    """The sender leaves in order; also to servers, which forget it. Answered by `Done`."""


# To a server.


class Create(_StoreMessage, frozen=True):
    """Make room for a part of an array. Answered by `Done`."""

    number: Count
    key: Name
    dtype: Kind
    shape: Shape
    is_cut: bool  # the array has other parts elsewhere


class Fill(_StoreMessage, frozen=True):
    """The first values of elements from `start` of the part. Answered by `Done`."""

    number: Count
    start: Count


class Push(_StoreMessage, frozen=True):
    """Elements from `start` of the part, for its updater. Answered by `Done`."""

    number: Count
    sequence: Count  # one for each push of a client; the pieces of a push share it
    start: Count


class Exchange(_StoreMessage, frozen=True):
    """A `Push` whose answer is `Value` with the same elements, or without if the push must be whole first."""

    number: Count
    sequence: Count
    start: Count
    reads_memory: bool = False  # as in `Pull`


class Pull(_StoreMessage, frozen=True):
    """Elements [start, stop) of the part, of `min_version` or later. Answered by `Value`."""

    number: Count
    start: Count
    stop: Count
    min_version: Count = 0
    timeout_s: float = 0.0
    reads_memory: bool = False  # the client has mapped the part: a stamp may stand for the elements


class PushRows(_StoreMessage, frozen=True):
    """Row numbers within the part, and as many rows. Answered by `Done`."""

    number: Count
    sequence: Count


class PullRows(_StoreMessage, frozen=True):
    """Row numbers within the part. Answered by `Value` with these rows."""

    number: Count


class SetUpdater(_StoreMessage, frozen=True):
    """What becomes of pushes from now on: to these parts, or to all that have no updater of their own.

    Answered by `Done`.
    """

    name: Name
    settings: Annotated[dict[str, Json], Meta(max_length=256)]
    numbers: Annotated[tuple[Count, ...], Meta(max_length=1 << 16)] = ()


class Done(_StoreMessage, frozen=True):
    """It is done; `version` counts the pushes that are in the part."""

    version: Count = 0


class Value(_StoreMessage, frozen=True):
    """Elements of a part; `version` counts the pushes that are in it.

    With a stamp they are not sent: the client reads them in shared memory, where that stamp must stand.
    """

    version: Count
    stamp: Annotated[int, Meta(ge=-1)] = -1


class AskMemory(_StoreMessage, frozen=True):
    """Where is the shared memory of this part? Answered by `Memory`."""

    number: Count


class Memory(_StoreMessage, frozen=True):
    """The shared memory of a part; of 0 bytes if it has none."""

    pid: Count
    fd: Count
    num_bytes: Count


STORE: tuple[type[Message], ...] = (
    JoinRequest, Enlisted, Alive, Standing, Place, Placed, Ready, Locate, Located, Meet, Bye,
    Create, Fill, Push, Exchange, Pull, PushRows, PullRows, SetUpdater, Done, Value,
    AskMemory, Memory,
)  # fmt: skip
LIMITS = Limits(max_header_bytes=1 << 20, max_buffers=2, max_buffer_bytes=1 << 31)
