"""What ranks ask for, and which of it all of them ask for: decided without I/O, the same on every rank.

Operations are matched by name, as in Horovod: ranks may ask in any order. A round compares what each rank waits for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

JOINABLE = ("allreduce", "barrier")  # what continues while some ranks have joined
JOINABLE_REDUCTIONS = ("Average", "Sum")  # to which a rank without data adds zeros


class Part(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a request: what must be the same on all ranks."""

    dtype: str
    shape: tuple[int, ...]  # without the first dimension where that may differ

    def describe(self) -> str:
        return f"{self.dtype.removeprefix('torch.')} {list(self.shape)}"


class Request(msgspec.Struct, frozen=True, array_like=True):
    """One operation that a rank asks for; equal on all ranks that ask for the same."""

    name: str
    kind: str  # allreduce, allgather, broadcast, alltoall, reducescatter, barrier
    parts: tuple[Part, ...] = ()
    reduction: str = ""  # Average, Sum, Min, Max, Product, Adasum
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1

    def describe(self) -> str:
        """Return the words for an error message: allreduce 'loss' (Average of float32 [3])."""
        shapes = ", ".join(part.describe() for part in self.parts[:3])
        more = f" and {len(self.parts) - 3} more" if len(self.parts) > 3 else ""
        scales = "".join(
            f", {label} {value:g}"
            for label, value in (("prescale", self.prescale), ("postscale", self.postscale))
            if value != 1
        )
        root = f", root rank {self.root}" if self.root >= 0 else ""
        what = f"{self.reduction} of {shapes}" if self.reduction else shapes
        return f"{self.kind} {self.name!r} ({what}{more}{scales}{root})" if what else f"{self.kind} {self.name!r}"


class Proposal(msgspec.Struct, frozen=True, array_like=True):
    """What one rank waits for in a round."""

    requests: tuple[Request, ...]
    has_joined: bool = False


class Agreement(NamedTuple):
    """What all ranks do in this round."""

    ready: list[Request]  # in the order in which all ranks carry them out
    failures: dict[str, str]  # by the name of the request: what is wrong with it
    joined: list[int]  # ranks that have no more data


def digest(proposal: Proposal) -> tuple[int, int]:
    """Return two numbers that are equal where proposals are, but for the order of requests."""
    ordered = sorted(proposal.requests, key=lambda request: request.name)
    content = msgspec.msgpack.encode((ordered, proposal.has_joined))
    raw = hashlib.blake2b(content, digest_size=16).digest()
    return int.from_bytes(raw[:8], "big", signed=True), int.from_bytes(raw[8:], "big", signed=True)


def agree_at_once(proposal: Proposal, ranks: Sequence[int]) -> Agreement:
    """Return what `agree` decides where all ranks propose the same."""
    if proposal.has_joined:
        return Agreement([], {}, list(ranks))
    return Agreement(sorted(proposal.requests, key=lambda request: request.name), {}, [])


def agree(proposals: Mapping[int, Proposal]) -> Agreement:
    """Decide what is carried out, from the proposals of all ranks of a process set.

    Ready is what every rank asks for that has not joined. If there is nothing of the kind, each rank waits for
    something that another does not ask for: then nothing can ever happen, and all requests fail.
    """
    joined = [rank for rank, proposal in proposals.items() if proposal.has_joined]
    active = {
        rank: {request.name: request for request in proposal.requests}
        for rank, proposal in proposals.items()
        if rank not in joined
    }
    if not active:
        return Agreement([], {}, joined)
    names = sorted(set.intersection(*(set(requests) for requests in active.values())))
    ready, failures = [], {}
    for name in names:
        asked = {rank: requests[name] for rank, requests in active.items()}
        problem = _find_difference(asked) or _find_unjoinable(next(iter(asked.values())), joined)
        if problem:
            failures[name] = problem
        else:
            ready.append(next(iter(asked.values())))
    if not names:
        problem = _describe_standstill(active, joined)
        failures = {name: problem for requests in active.values() for name in requests}
    return Agreement(ready, failures, joined)


def _find_difference(asked: Mapping[int, Request]) -> str:
    first_rank, first = next(iter(asked.items()))
    odd = [rank for rank, request in asked.items() if request != first]
    if not odd:
        return ""
    ranks = _ranks([rank for rank in odd if asked[rank] == asked[odd[0]]])
    return (
        f"ranks call {first.name!r} differently: rank {first_rank} {first.describe()}, {ranks} "
        f"{asked[odd[0]].describe()}{_where(first, asked[odd[0]])}: the operation, its options, and the type and shape "
        "of its tensors must be the same on all ranks"
    )


def _where(one: Request, other: Request) -> str:
    """Say which tensor of many differs."""
    if len(one.parts) != len(other.parts) or len(one.parts) < 2:
        return ""
    index = next((i for i, pair in enumerate(zip(one.parts, other.parts)) if pair[0] != pair[1]), None)
    if index is None:
        return ""
    ours, theirs = one.parts[index], other.parts[index]
    return f" (tensor {index}: {ours.describe()} and {theirs.describe()})"


def _find_unjoinable(request: Request, joined: Sequence[int]) -> str:
    if not joined:
        return ""
    has_zero = request.reduction in ("", *JOINABLE_REDUCTIONS)
    if request.kind in JOINABLE and has_zero:
        return ""
    return (
        f"{request.describe()}: {_ranks(joined)} called join(), and a rank without data takes part in allreduce with "
        "Average or Sum only: make the same calls on every rank before join()"
    )


def _describe_standstill(active: Mapping[int, Mapping[str, Request]], joined: Sequence[int]) -> str:
    waits = []
    for rank, requests in active.items():
        first = next(iter(requests.values()))
        more = f" and {len(requests) - 1} more" if len(requests) > 1 else ""
        waits.append(f"rank {rank} is in {first.describe()}{more}")
    ended = f"; {_ranks(joined)} called join()" if joined else ""
    return f"{'; '.join(waits)}{ended}: every rank must make the same calls, under the same names"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
