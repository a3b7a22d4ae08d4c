"""What the clients of a store, its servers and its directory say to each other."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from cordee.communication.compression import Compression
from cordee.communication.messages import Count, Json, Message, Name, Text
from cordee.communication.wire import MAX_DIMENSIONS, Kind, Limits

Shape: TypeAlias = Annotated[tuple[Annotated[int, Meta(ge=0, le=2**48)], ...], Meta(max_length=MAX_DIMENSIONS)]
Number: TypeAlias = Annotated[int, Meta(ge=-1, le=2**62)]
Role: TypeAlias = Literal["worker", "server"]
Client: TypeAlias = Annotated[str, Meta(max_length=128)]  # whose it is, where a server passes it on to its follower


class Cut(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Elements [start, stop) of an array, in C order, on one server."""

    server: Count
    start: Count
    stop: Count


Cuts: TypeAlias = Annotated[tuple[Cut, ...], Meta(min_length=1, max_length=4096)]


class ServerMessage(Message, frozen=True):
    """What clients and servers of parameters say: true at any time, whatever generation a run is in."""

    is_generational = False


# To the directory.


class JoinRequest(ServerMessage, frozen=True):
    """A process wants to take part; said again until all are there. Answered by `Registered`."""

    role: Role
    pid: Count
    host: Name
    host_id: Name  # equal for processes that see each other's numbers
    address: Text = ""  # where a server listens


class Registered(ServerMessage, frozen=True):
    """The place of the process among those of its role, how many are expected, and who is there."""

    index: Count
    num_workers: Count  # 0: as many as come
    num_servers: Count
    workers_present: Count
    servers_missing: Count  # processes
    addresses: Annotated[tuple[Text, ...], Meta(max_length=4096)]  # of those that serve, or none; "": the directory's
    replicas: Count = 1  # processes of each server
    failure_timeout_s: float = 0.0  # of the directory: nobody is given up who was heard in this time
    follows: Text = ""  # a server: the address of the one whose follower it is to be
    leader: Text = ""  # and its name


class Alive(ServerMessage, frozen=True):
    """The sender lives. Answered by `StoreStatus`."""


class StoreStatus(ServerMessage, frozen=True):
    """Whether the store is coming to its end, and the workers that are lost: nothing of theirs is taken any more."""

    is_over: bool
    lost: Annotated[tuple[Name, ...], Meta(max_length=1 << 16)] = ()


class Following(ServerMessage, frozen=True):
    """The sender has been given everything by the server at this address, and is its follower. Answered by `Done`."""

    address: Name


class FollowerLost(ServerMessage, frozen=True):
    """The sender's follower, at this address, does not follow it any more. For who decides which of the two serves.

    Nothing that the sender has done since is acknowledged to anybody before the answer.
    """

    address: Name
    reason: Text


class Place(ServerMessage, frozen=True):
    """The sender initialises a key. Answered by `Placed`, when another does so first: once that is done."""

    key: Name
    dtype: Kind
    shape: Shape
    sequence: Count


class Placed(ServerMessage, frozen=True):
    """Where the key belongs, and whether it is the asker who has to bring its value there."""

    is_yours: bool
    number: Count
    cuts: Cuts


class Ready(ServerMessage, frozen=True):
    """The value of the key is on the servers. Answered by `Done`."""

    key: Name


class Locate(ServerMessage, frozen=True):
    """Where is this key? Answered by `Located`."""

    key: Name


class Located(ServerMessage, frozen=True):
    """What is known of a key."""

    number: Count
    dtype: Kind
    shape: Shape
    cuts: Cuts


class EnterBarrier(ServerMessage, frozen=True):
    """The sender has come to its barrier of this number. Answered by `Done` when all workers have."""

    number: Count
    timeout_s: float


class Bye(ServerMessage, frozen=True):
    """The sender leaves in order; also to servers, which forget it. Answered by `Done`."""

    client: Client = ""


# To a server.


class Create(ServerMessage, frozen=True):
    """Make room for a part of an array. Answered by `Done`."""

    number: Count
    key: Name
    dtype: Kind
    shape: Shape
    is_cut: bool  # the array has other parts elsewhere


class Fill(ServerMessage, frozen=True):
    """The first values of elements from `start` of the part. Answered by `Done`."""

    number: Count
    start: Count


class Encoding(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The buffers of a message are what a codec makes of so many elements."""

    compression: Compression
    length: Count


class Push(ServerMessage, frozen=True):
    """Elements from `start` of the part, for its updater. Answered by `Done`.

    One that pulls is answered by `Value` with the same elements, or without them if the push must be whole first.
    """

    number: Count
    sequence: Count  # one for each push of a client; the pieces of a push share it
    start: Count
    encoding: Encoding | None = None  # None: the one buffer has the elements
    pulls: bool = False
    memory: Number = -1  # as in `Pull`
    client: Client = ""
    incarnation: Count = 0


class Pull(ServerMessage, frozen=True):
    """Elements [start, stop) of the part, of `min_version` or later. Answered by `Value`."""

    number: Count
    start: Count
    stop: Count
    min_version: Count = 0
    timeout_s: float = 0.0
    memory: Number = -1  # number of the shared memory that the client has mapped; 0: it could map some; -1: it cannot


class PushRows(ServerMessage, frozen=True):
    """Row numbers within the part, and as many rows. Answered by `Done`."""

    number: Count
    sequence: Count
    client: Client = ""
    incarnation: Count = 0


class PullRows(ServerMessage, frozen=True):
    """Row numbers within the part. Answered by `Value` with these rows."""

    number: Count


class SetUpdater(ServerMessage, frozen=True):
    """What becomes of pushes from now on: to these parts, or to all that have no updater of their own.

    Answered by `Done`.
    """

    name: Name
    settings: Annotated[dict[str, Json], Meta(max_length=256)]
    numbers: Annotated[tuple[Count, ...], Meta(max_length=1 << 16)] = ()


class Done(ServerMessage, frozen=True):
    """It is done; `version` counts the pushes that are in the part."""

    version: Count = 0


class Memory(ServerMessage, frozen=True):
    """The shared memory of values. No two memories have the same number."""

    pid: Count
    fd: Count
    num_bytes: Count
    number: Count


class Value(ServerMessage, frozen=True):
    """Elements of a part; `version` counts the updates that are in it.

    With a stamp they are not sent: the client reads them in the memory that it has mapped, where this stamp must be.
    With neither the client has to pull.
    """

    version: Count
    stamp: Number = -1
    memory: Memory | None = None  # where the client finds the values next time


# Of a server to its follower, of a store or of a run.


class Adopt(ServerMessage, frozen=True):
    """The server at this address is to be the receiver's follower. Answered when that one has everything."""

    address: Name


class Load(ServerMessage, frozen=True):
    """All that a server knows of a part: tensors by name, and the rest as JSON bytes."""

    number: Count
    names: Annotated[tuple[Name, ...], Meta(max_length=65536)]


STORE: tuple[type[Message], ...] = (
    JoinRequest, Registered, Alive, StoreStatus, Place, Placed, Ready, Locate, Located, EnterBarrier, Bye,
    Create, Fill, Push, Pull, PushRows, PullRows, SetUpdater, Done, Value,
    Adopt, Load, Following, FollowerLost,
)  # fmt: skip
LIMITS = Limits(max_header_bytes=1 << 20, max_buffers=65536, max_buffer_bytes=1 << 31)
