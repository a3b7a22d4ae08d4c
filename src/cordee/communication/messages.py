"""What members and the coordinator of a run say to each other.

A channel carries a fixed set of `Message` types. `MEMBERSHIP` is what members of every kind of run and their
coordinator say, and `COORDINATION` adds what teams do; others define their own beside their code and hand it to
`Codec`. Who speaks — name, incarnation, generation — is in the envelope of each message and so is not repeated here.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta

Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=128)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Text: TypeAlias = Annotated[str, Meta(max_length=65536)]
MOST_PROBLEM_CHARACTERS = 4000

# JSON to a fixed depth: typed to the leaves, so that nothing of the peer's choosing gets through.
Scalar: TypeAlias = bool | int | float | str | None
Flat: TypeAlias = Scalar | list[Scalar] | dict[str, Scalar]
Json: TypeAlias = Scalar | list[Flat] | dict[str, Flat]


class Message(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=str.lower, tag_field="kind"
):
    """The base of all message types. The wire knows a type by its class name in small letters."""

    # Messages of a generation are refused once it is over; the others say what is true at any time.
    is_generational: ClassVar[bool] = True


class Member(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One member of a generation, as all members see it."""

    name: Name
    role: Name
    host: Name
    index: Count  # its place among the members of its role
    host_id: Name = "here"  # equal for members that share a host


Members: TypeAlias = Annotated[tuple[Member, ...], Meta(max_length=65536)]


class Join(Message, frozen=True):
    """The sender is there, or is back. Answered by `Joined`, or by `Refused` where it is not expected."""

    is_generational = False

    pid: Count
    host: Name
    host_id: Name = "here"
    address: Annotated[str, Meta(max_length=256)] = ""  # a server: where it listens
    public: Annotated[str, Meta(max_length=256)] = ""  # the same, for workers of other hosts
    step: Count = 0  # a server: of the job, that its parameters are of
    has_state: bool = True  # a server: it has the parameters of the run and may serve; else it can only follow
    storage_problem: Annotated[str, Meta(max_length=MOST_PROBLEM_CHARACTERS)] = ""  # why it cannot read the storage


class Joined(Message, frozen=True):
    """The sender of `Join` is a member of the run."""

    is_generational = False

    failure_timeout_s: Annotated[float, Meta(gt=0)]
    heartbeat_s: Annotated[float, Meta(gt=0)]  # send a heartbeat at least this often
    time_s: float = 0.0  # by the coordinator's clock, since 1970


class Heartbeat(Message, frozen=True):
    """The sender lives and has got as far as `step`. Answered by `Acknowledged`."""

    is_generational = False

    step: Count


class Acknowledged(Message, frozen=True):
    """Numbered messages of the peer up to this one are written down for good; later ones may have been lost."""

    is_generational = False

    number: Count


class Failure(Message, frozen=True):
    """The sender cannot continue."""

    is_generational = False

    step: Count
    error: Text  # one line
    traceback: Text
    is_consequence: bool = False  # the loss of a peer, which has a cause of its own
    number: Count = 0  # counts up with each message that must not be lost


class Ready(Message, frozen=True):
    """The sender waits for a generation, or for the next one. Answered by a `Directive` when it is time.

    StoreValue again and again until it is answered, since an answer may be lost.
    """

    is_generational = False

    step: Annotated[int, Meta(ge=-1, le=2**63 - 1)]  # steps it has taken; -1 when it has nothing to continue from
    has_dropped: bool = False  # a step was under way and could not be finished
    reason: Text = ""  # why its last generation ended, unless it was asked to halt
    number: Count = 0  # counts up with each answer
    num_sent: Count = 0  # the last numbered message before it; it counts once that one is acknowledged


class Leaving(Message, frozen=True):
    """The sender was asked to leave. It takes part until it is let go."""

    is_generational = False


class Directive(Message, frozen=True):
    """What members are to do now.

    `stop`: end the run after this step. `pause`: say `Ready` after this step. `end_generation`: the generation has
    lost a member for the `reason` given; whoever still waits for its group to form says `Ready`. As answers to
    `Ready`: `new_generation`: form the one that the envelope carries; `finish`: the run ends here; `leave`: you end
    here.
    """

    action: Literal["stop", "pause", "end_generation", "new_generation", "finish", "leave"]
    members: Members = ()  # of the new generation
    reason: Text = ""
    generation: Count = 0
    answers: Count = 0  # the number of the `Ready` it answers
    threads: Count = 0  # that each member of the new generation computes with; 0 is what the job says


class StoreSet(Message, frozen=True):
    """The sender stores a value for the members of a generation that meets. Answered by `Accepted` or `Refused`."""

    is_generational = False

    generation: Count
    key: Annotated[str, Meta(max_length=1024)]
    value: Annotated[bytes, Meta(max_length=65536)]


class StoreGet(Message, frozen=True):
    """What is stored under this key? Answered by `StoreValue`, or `Refused` when the generation is over."""

    is_generational = False

    generation: Count
    key: Annotated[str, Meta(max_length=1024)]


class StoreAdd(Message, frozen=True):
    """All that the sender has added to a number so far, so that saying it again adds nothing.

    Answered by `StoreValue` with the sum over all senders, in digits, or `Refused` when the generation is over.
    """

    is_generational = False

    generation: Count
    key: Annotated[str, Meta(max_length=1024)]
    amount: Annotated[int, Meta(ge=-(2**62), le=2**62)]


class StoreSwap(Message, frozen=True):
    """Store `wanted` if `expected` is stored, or if that is empty and nothing is. Answered by `StoreValue`: what is."""

    is_generational = False

    generation: Count
    key: Annotated[str, Meta(max_length=1024)]
    expected: Annotated[bytes, Meta(max_length=65536)]
    wanted: Annotated[bytes, Meta(max_length=65536)]


class StoreDelete(Message, frozen=True):
    """Forget a key. Answered by `StoreValue` with what was stored, or `Refused` when the generation is over."""

    is_generational = False

    generation: Count
    key: Annotated[str, Meta(max_length=1024)]


class StoreCount(Message, frozen=True):
    """How many keys are stored? Answered by `StoreValue`, in digits, or `Refused` when the generation is over."""

    is_generational = False

    generation: Count


class StoreValue(Message, frozen=True):
    """The value of a key; None while nobody has set it."""

    is_generational = False

    value: Annotated[bytes, Meta(max_length=65536)] | None = None


# What members of a generation that meets ask of the store.
StoreRequest: TypeAlias = StoreSet | StoreGet | StoreAdd | StoreSwap | StoreDelete | StoreCount


class Scale(Message, frozen=True):
    """Somebody with the run's control file wants another number of workers. Answered by `Accepted` or `Refused`."""

    is_generational = False

    num_workers: Annotated[int, Meta(ge=1, le=65536)]
    threads: Annotated[int, Meta(ge=0, le=4096)] = 0  # of each worker; 0 leaves them as they are


class JoinRequest(Message, frozen=True):
    """Somebody with the run's control file wants to work. Answered by `Accepted` with a `MemberSpec`, as JSON."""

    is_generational = False

    pid: Count
    host: Name
    host_id: Name
    cordee: Name  # version
    torch: Name  # version


class Accepted(Message, frozen=True):
    """What the message that this one answers asked for is under way."""

    is_generational = False

    detail: Text = ""


class Bye(Message, frozen=True):
    """The sender is done, and ends."""

    is_generational = False

    number: Count = 0


class Refused(Message, frozen=True):
    """The message that this one answers had no effect."""

    is_generational = False

    # An `Admission` of the replay filter, "malformed", or what the service says.
    reason: Name
    detail: Text = ""


MEMBERSHIP: tuple[type[Message], ...] = (
    Join,
    Joined,
    Heartbeat,
    Acknowledged,
    Failure,
    Bye,
    Scale,
    JoinRequest,
    Accepted,
    Refused,
)
COORDINATION: tuple[type[Message], ...] = (
    *MEMBERSHIP,
    Ready,
    Leaving,
    Directive,
    StoreSet,
    StoreGet,
    StoreAdd,
    StoreSwap,
    StoreDelete,
    StoreCount,
    StoreValue,
)
