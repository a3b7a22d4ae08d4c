"""The collective operations inside one host, as steps that pause wherever they must wait for peers.

Tensors are flat and contiguous. Each function is collective: all members of the segment run the same steps with
the same sizes. A function only ever writes the caller's own buffer and the caller's own tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from cordee.communication.shared_memory.rounds import DTYPE_CODES, Operation, Rounds, Steps, sign
from cordee.communication.shared_memory.segment import ReduceMethod, Slots, choose_reduce_method, cut, share_of


@dataclass(frozen=True)
class Host:
    """The members of a group on this host, as one of them sees them."""

    rounds: Rounds
    slots: Slots
    member: int
    num_members: int

    def others(self) -> list[int]:
        return [member for member in range(self.num_members) if member != self.member]

    def place(self, source: int, target: int) -> int:
        """Where in `source`'s buffer the part for `target` lies: parts are in member order, its own left out."""
        return target if target < source else target - 1


def barrier(host: Host) -> Steps:
    rounds = host.rounds
    if (need := rounds.open()) is not None:
        yield need
    signature = sign(Operation.BARRIER)
    stamp = rounds.publish(signature)
    yield rounds.peer_words, stamp
    rounds.confirm(rounds.peer_words, signature)


@dataclass(frozen=True)
class AllReducePlan:
    """What is the same for every all-reduce of one size, type and reduction."""

    reduction: Reduction
    signature: int
    capacity: int  # elements in a chunk
    count: int
    reduce_chunk: Callable[[Host, Tensor, Reduction, int], Steps]


def plan_all_reduce(host: Host, dtype: torch.dtype, count: int, reduction: Reduction) -> AllReducePlan:
    reduce_chunk = _reduce_pair if host.num_members == 2 else _reduce_direct
    if choose_reduce_method(count * dtype.itemsize, host.num_members) is ReduceMethod.SHARES:
        reduce_chunk = _reduce_shares
    signature = sign(Operation.ALL_REDUCE, reduction=reduction, dtype_code=DTYPE_CODES[dtype], count=count)
    return AllReducePlan(reduction, signature, host.slots.capacity(dtype), count, reduce_chunk)


def all_reduce(host: Host, data: Tensor, plan: AllReducePlan) -> Steps:
    """Replace `data` by its reduction over the members; the same bits everywhere."""
    if plan.count <= plan.capacity:
        return plan.reduce_chunk(host, data, plan.reduction, plan.signature)
    return _all_reduce_chunks(host, data, plan)


def _all_reduce_chunks(host: Host, data: Tensor, plan: AllReducePlan) -> Steps:
    host.rounds.is_streaming = True
    try:
        for chunk in torch.split(data, plan.capacity):
            yield from plan.reduce_chunk(host, chunk, plan.reduction, plan.signature)
    finally:
        host.rounds.is_streaming = False


def _reduce_pair(host: Host, chunk: Tensor, reduction: Reduction, signature: int) -> Steps:
    rounds = host.rounds
    if (need := rounds.open()) is not None:
        yield need
    views = host.slots.first(chunk.dtype, rounds.parity, chunk.numel())
    member = host.member
    views[member].copy_(chunk)
    peers = rounds.peer_words
    yield peers, rounds.publish(signature)
    rounds.confirm(peers, signature)
    if reduction is Reduction.SUM:
        chunk.add_(views[1 - member])  # a + b = b + a, to the bit
    else:
        reduce_into(chunk, (chunk, views[1]) if member == 0 else (views[0], chunk), reduction)


def _reduce_direct(host: Host, chunk: Tensor, reduction: Reduction, signature: int) -> Steps:
    rounds = host.rounds
    if (need := rounds.open()) is not None:
        yield need
    views = host.slots.first(chunk.dtype, rounds.parity, chunk.numel())
    views[host.member].copy_(chunk)
    peers = rounds.peer_words
    yield peers, rounds.publish(signature)
    rounds.confirm(peers, signature)
    reduce_into(chunk, views, reduction)


def _reduce_shares(host: Host, chunk: Tensor, reduction: Reduction, signature: int) -> Steps:
    rounds = host.rounds
    if (need := rounds.open()) is not None:
        yield need
    views = host.slots.first(chunk.dtype, rounds.parity, chunk.numel())
    own_view = views[host.member]
    shares = [share_of(chunk.numel(), host.num_members, member) for member in range(host.num_members)]
    start, stop = shares[host.member]
    # The own share stays at home: the sum is written to its place in the own buffer.
    own_view[:start].copy_(chunk[:start])
    own_view[stop:].copy_(chunk[stop:])
    peers = rounds.peer_words
    yield peers, rounds.publish(signature)
    rounds.confirm(peers, signature)
    if start < stop:
        parts = [view[start:stop] for view in views]
        total = parts[host.member]
        parts[host.member] = chunk[start:stop]
        reduce_into(total, parts, reduction)
    yield peers, rounds.publish(signature)
    for (start, stop), view in zip(shares, views, strict=True):
        if start < stop:
            chunk[start:stop].copy_(view[start:stop])


def reduce(host: Host, data: Tensor, reduction: Reduction, root: int) -> Steps:
    """Replace `data` on the member `root` by the reduction; the others' data stay as they are."""
    rounds = host.rounds
    signature = sign(
        Operation.REDUCE, reduction=reduction, dtype_code=DTYPE_CODES[data.dtype], root=root, count=data.numel()
    )
    for start, stop in cut(data.numel(), host.slots.capacity(data.dtype)):
        chunk = data[start:stop]
        if (need := rounds.open()) is not None:
            yield need
        views = host.slots.first(data.dtype, rounds.parity, stop - start)
        if host.member != root:
            views[host.member].copy_(chunk)
            rounds.publish(signature)
            continue
        yield rounds.peer_words, rounds.publish(signature)
        rounds.confirm(rounds.peer_words, signature)
        parts = list(views)
        parts[root] = chunk
        if root > 1:
            parts[root] = views[root]
            parts[root].copy_(chunk)
        reduce_into(chunk, parts, reduction)


def broadcast(host: Host, data: Tensor, root: int) -> Steps:
    """Replace `data` (bytes) by that of the member `root`."""
    rounds = host.rounds
    signature = sign(Operation.BROADCAST, root=root, count=data.numel())
    root_word = (rounds.member_words[root],)
    for start, stop in cut(data.numel(), host.slots.capacity(torch.uint8)):
        if (need := rounds.open()) is not None:
            yield need
        views = host.slots.first(torch.uint8, rounds.parity, stop - start)
        if host.member == root:
            views[root].copy_(data[start:stop])
            rounds.publish(signature)
        else:
            yield root_word, rounds.publish(signature)
            rounds.confirm(root_word, signature)
            data[start:stop].copy_(views[root])


def all_gather(host: Host, outputs: Sequence[Tensor], data: Tensor) -> Steps:
    """Write the data (bytes) of member m to `outputs[m]`; sizes may differ between members."""
    rounds = host.rounds
    signature = sign(Operation.ALL_GATHER, count=sum(output.numel() for output in outputs))
    longest = max(output.numel() for output in outputs)
    others = host.others()
    for start, stop in cut(longest, host.slots.capacity(torch.uint8)):
        if (need := rounds.open()) is not None:
            yield need
        buffers = host.slots.whole(torch.uint8, rounds.parity)
        _copy_part(buffers[host.member], data, start, stop)
        yield rounds.peer_words, rounds.publish(signature)
        rounds.confirm(rounds.peer_words, signature)
        for member in others:
            _take_part(outputs[member], start, stop, buffers[member])
    _copy_own(outputs[host.member], data)


def gather(host: Host, outputs: Sequence[Tensor], data: Tensor, root: int) -> Steps:
    """Write the data (bytes) of member m to `outputs[m]` on the member `root`; `outputs` is empty elsewhere."""
    rounds = host.rounds
    signature = sign(Operation.GATHER, root=root, count=data.numel())
    for start, stop in cut(data.numel(), host.slots.capacity(torch.uint8)):
        if (need := rounds.open()) is not None:
            yield need
        views = host.slots.first(torch.uint8, rounds.parity, stop - start)
        if host.member != root:
            views[host.member].copy_(data[start:stop])
            rounds.publish(signature)
            continue
        yield rounds.peer_words, rounds.publish(signature)
        rounds.confirm(rounds.peer_words, signature)
        for member in host.others():
            outputs[member][start:stop].copy_(views[member])
    if host.member == root:
        _copy_own(outputs[root], data)


def scatter(host: Host, output: Tensor, parts: Sequence[Tensor], root: int) -> Steps:
    """Write `parts[m]` (bytes) of the member `root` to `output` on member m; `parts` is empty elsewhere."""
    rounds = host.rounds
    signature = sign(Operation.SCATTER, root=root, count=output.numel())
    root_word = (rounds.member_words[root],)
    step = _part_capacity(host, torch.uint8)
    for start, stop in cut(output.numel(), step):
        if (need := rounds.open()) is not None:
            yield need
        buffer = host.slots.whole(torch.uint8, rounds.parity)[root]
        if host.member == root:
            for member in host.others():
                at = host.place(root, member) * step
                buffer[at : at + stop - start].copy_(parts[member][start:stop])
            rounds.publish(signature)
        else:
            yield root_word, rounds.publish(signature)
            rounds.confirm(root_word, signature)
            at = host.place(root, host.member) * step
            output[start:stop].copy_(buffer[at : at + stop - start])
    if host.member == root:
        _copy_own(output, parts[root])


def reduce_scatter(host: Host, output: Tensor, parts: Sequence[Tensor], reduction: Reduction) -> Steps:
    """Write the reduction over the members of `parts[own member]` to `output`; parts may differ in size."""
    rounds = host.rounds
    signature = sign(
        Operation.REDUCE_SCATTER,
        reduction=reduction,
        dtype_code=DTYPE_CODES[output.dtype],
        count=sum(part.numel() for part in parts),
    )
    step = _part_capacity(host, output.dtype)
    members = range(host.num_members)
    for start, stop in cut(max(part.numel() for part in parts), step):
        if (need := rounds.open()) is not None:
            yield need
        buffers = host.slots.whole(output.dtype, rounds.parity)
        for member in host.others():
            at = host.place(host.member, member) * step
            _copy_part(buffers[host.member][at : at + step], parts[member], start, stop)
        yield rounds.peer_words, rounds.publish(signature)
        rounds.confirm(rounds.peer_words, signature)
        mine = parts[host.member][start:stop]
        length = mine.numel()
        if length:
            sources = [
                mine if member == host.member else buffers[member][at : at + length]
                for member in members
                for at in (host.place(member, host.member) * step,)
            ]
            reduce_into(output[start : start + length], sources, reduction)


def all_to_all(host: Host, outputs: Sequence[Tensor], parts: Sequence[Tensor]) -> Steps:
    """Write `parts[own member]` (bytes) of member m to `outputs[m]`; any sizes on which the pairs agree."""
    rounds = host.rounds
    signature = sign(Operation.ALL_TO_ALL)
    own_longest = max(part.numel() for part in parts)
    # Only the pair knows the size of a part, but all must agree on the number of rounds: the first round
    # carries each member's longest part in front of the data.
    longest = torch.tensor([own_longest], dtype=torch.int64).view(torch.uint8)
    step = _part_capacity(host, torch.uint8, reserve=8)
    start = 0
    while True:
        if (need := rounds.open()) is not None:
            yield need
        buffers = host.slots.whole(torch.uint8, rounds.parity)
        buffers[host.member][:8].copy_(longest)
        for member in host.others():
            at = 8 + host.place(host.member, member) * step
            _copy_part(buffers[host.member][at : at + step], parts[member], start, start + step)
        yield rounds.peer_words, rounds.publish(signature)
        rounds.confirm(rounds.peer_words, signature)
        for member in host.others():
            at = 8 + host.place(member, host.member) * step
            _take_part(outputs[member], start, start + step, buffers[member][at : at + step])
        start += step
        if start >= max(int(buffer[:8].view(torch.int64)) for buffer in buffers):
            break
    _copy_own(outputs[host.member], parts[host.member])


def _part_capacity(host: Host, dtype: torch.dtype, reserve: int = 0) -> int:
    """Elements for each other member in one buffer, in whole cache lines."""
    capacity = (host.slots.capacity(torch.uint8) - reserve) // max(host.num_members - 1, 1)
    return max(capacity // 64 * 64, 64) // dtype.itemsize


def _copy_part(buffer: Tensor, data: Tensor, start: int, stop: int) -> None:
    part = data[start:stop]
    if part.numel():
        buffer[: part.numel()].copy_(part)


def _take_part(output: Tensor, start: int, stop: int, buffer: Tensor) -> None:
    part = output[start:stop]
    if part.numel():
        part.copy_(buffer[: part.numel()])


def _copy_own(output: Tensor, data: Tensor) -> None:
    if output.data_ptr() != data.data_ptr():
        output.copy_(data)


# Adding up the members' buffers, in member order, with torch's own kernels.


class Reduction(IntEnum):
    """The reductions done in shared memory; the values go into signatures."""

    SUM = 1
    AVG = 2
    PRODUCT = 3
    MIN = 4
    MAX = 5
    BAND = 6
    BOR = 7
    BXOR = 8


_BINARY: dict[Reduction, Callable[..., Tensor]] = {
    Reduction.SUM: torch.add,
    Reduction.AVG: torch.add,
    Reduction.PRODUCT: torch.mul,
    Reduction.MIN: torch.minimum,
    Reduction.MAX: torch.maximum,
    Reduction.BAND: torch.bitwise_and,
    Reduction.BOR: torch.bitwise_or,
    Reduction.BXOR: torch.bitwise_xor,
}
_HALF = (torch.float16, torch.bfloat16)
_FLOATING = (torch.float32, torch.float64, *_HALF)
_INTEGER = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)


def is_supported(reduction: Reduction, dtype: torch.dtype) -> bool:
    """Whether `reduce_into` can do it; an average of integers has no agreed meaning, as with gloo."""
    if reduction in (Reduction.BAND, Reduction.BOR, Reduction.BXOR):
        return dtype in _INTEGER
    if reduction is Reduction.AVG:
        return dtype in _FLOATING
    return dtype in _FLOATING or dtype in _INTEGER


def reduce_into(out: Tensor, parts: Sequence[Tensor], reduction: Reduction) -> None:
    """Write the reduction of `parts`, taken in order, to `out`, which may be one of the first two.

    The order is fixed, so that members that reduce the same parts get the same bits. 16-bit floats are added in
    32 bits and rounded once.
    """
    if out.dtype in _HALF and (len(parts) > 2 or reduction is Reduction.AVG):
        total = parts[0].to(torch.float32, copy=True)
        _fold(total, total, parts[1:], reduction)
        out.copy_(total.div_(len(parts)) if reduction is Reduction.AVG else total)
        return
    _fold(out, parts[0], parts[1:], reduction)
    if reduction is Reduction.AVG:
        count = len(parts)
        # By a power of two, a product has the same bits in half of the time.
        out.div_(count) if count & (count - 1) else out.mul_(1 / count)


def _fold(out: Tensor, first: Tensor, rest: Sequence[Tensor], reduction: Reduction) -> None:
    binary = _BINARY[reduction]
    if not rest:
        if out is not first:
            out.copy_(first)
        return
    binary(first, rest[0], out=out)
    for part in rest[1:]:
        binary(out, part, out=out)


# Tensors as the collectives want them: flat, contiguous, without history.


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is strided memory of this process."""
    return tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_quantized


def flatten(tensor: Tensor) -> Tensor:
    """Return the elements in one row: the same memory where that is possible, else a copy."""
    tensor = _without_history(tensor)
    if tensor.is_contiguous():
        return tensor if tensor.dim() == 1 else tensor.view(-1)
    return tensor.contiguous().view(-1)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor in one row: the same memory where that is possible, else a copy."""
    flat = flatten(tensor)
    if flat.dtype is torch.uint8:
        return flat
    if flat.stride(0) != 1:  # possible with none or one element, and refused by `view`
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def as_buffer(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, as `as_bytes` does, for what is not torch."""
    rows: Any = as_bytes(tensor).numpy()
    return memoryview(rows)


def write_back(tensors: Sequence[Tensor], flats: Sequence[Tensor]) -> Callable[[], None] | None:
    """Return what copies results into tensors whose `flats` are copies, or None if none is."""
    copies = [
        (_without_history(tensor), flat)
        for tensor, flat in zip(tensors, flats, strict=True)
        if not tensor.is_contiguous()
    ]
    if not copies:
        return None

    def copy_back() -> None:
        for tensor, flat in copies:
            tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))

    return copy_back


def _without_history(tensor: Tensor) -> Tensor:
    """Return the same memory as a tensor that may be written to in any mode and thread."""
    if tensor.is_inference():
        return torch.from_dlpack(tensor)  # type: ignore[attr-defined]
    return tensor.detach() if tensor.requires_grad else tensor
