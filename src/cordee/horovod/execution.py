"""What each kind of operation does with tensors, for the requests that all ranks have agreed on. Collective.

All-reduces and broadcasts go through flat buffers of this module: tensors of other frameworks may be immutable, and one
call for many small tensors costs as much as one for one of them. In a buffer each tensor begins at a multiple of 64
bytes, so that a result can be handed on without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from cordee.communication.shared_memory.process_group import CordeeProcessGroup
from cordee.core import env
from cordee.horovod import timeline
from cordee.horovod.buffers import BUFFERS, find_layout
from cordee.horovod.requests import Part, Request

if TYPE_CHECKING:
    from cordee.horovod.queue import Operation, OperationQueue

DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}

_REDUCE_OPS = {
    "Average": dist.ReduceOp.SUM,  # and divided afterwards
    "Sum": dist.ReduceOp.SUM,
    "Min": dist.ReduceOp.MIN,
    "Max": dist.ReduceOp.MAX,
    "Product": dist.ReduceOp.PRODUCT,
}

_Pair = tuple[Request, "Operation | None"]


def run(queue: OperationQueue, ready: Sequence[Request], operations: Sequence[Operation | None]) -> None:
    """Carry out requests in their order, those that go together in one buffer."""
    pairs = list(zip(ready, operations, strict=True))
    for (kind, _, _), some in groupby(sorted(pairs, key=_batch_key), key=_batch_key):
        started_us = timeline.now_us()
        batch = list(some)
        _KINDS[kind](queue, batch)
        for request, operation in batch:
            timeline.record(request, operation.called_us if operation else started_us, started_us)


def _batch_key(pair: _Pair) -> tuple[str, str, str]:
    """Return what must be the same for requests that share a buffer. Names keep their order within."""
    request = pair[0]
    if request.kind == "allreduce" and request.reduction != "Adasum":
        dtype = DTYPES[request.parts[0].dtype]
        is_sum = request.reduction == "Average" and sum_type(request, dtype) is dtype
        return request.kind, "Sum" if is_sum else request.reduction, request.parts[0].dtype
    if request.kind == "broadcast":
        return request.kind, str(request.root), ""
    return request.kind, request.reduction, request.name


def sum_type(request: Request, dtype: torch.dtype) -> torch.dtype:
    """Return the type in which tensors are reduced: the sum for a mean of small whole numbers would wrap around."""
    is_whole = not (dtype.is_floating_point or dtype.is_complex)
    return torch.int64 if request.reduction == "Average" and is_whole else dtype


# All-reduce ---------------------------------------------------------------------------------------------------------


def _all_reduce(queue: OperationQueue, batch: Sequence[_Pair]) -> None:
    if batch[0][0].reduction == "Adasum":
        for _, operation in batch:
            assert operation is not None  # a rank that has joined is refused
            operation.complete(_results(operation, [_adasum(queue, data) for data in operation.inputs]))
        return
    for some in _cut(batch, env.horovod_fusion_bytes()):
        _all_reduce_fused(queue, some)


def _cut(batch: Sequence[_Pair], limit_bytes: int) -> Iterator[list[_Pair]]:
    """Cut a batch so that no buffer is larger than the limit, unless one request is."""
    some: list[_Pair] = []
    num_bytes = 0
    for pair in batch:
        own = sum(part_bytes(part) for part in pair[0].parts)
        if some and num_bytes + own > limit_bytes:
            yield some
            some, num_bytes = [], 0
        some.append(pair)
        num_bytes += own
    if some:
        yield some


def part_bytes(part: Part) -> int:
    count = 1
    for extent in part.shape:
        count *= extent
    return count * DTYPES[part.dtype].itemsize


def _all_reduce_fused(queue: OperationQueue, batch: Sequence[_Pair]) -> None:
    parts = tuple(part for request, _ in batch for part in request.parts)
    given_type = DTYPES[parts[0].dtype]
    dtype = sum_type(batch[0][0], given_type)
    layout = find_layout(parts, dtype.itemsize)
    flat = BUFFERS.take(layout.length, dtype)
    views = layout.views(flat)
    # The gaps are reduced with the rest: they must not hold what would be slow to compute with, or not a number.
    layout.clear_gaps(flat)
    position = 0
    for request, operation in batch:
        own = views[position : position + len(request.parts)]
        position += len(own)
        if operation is None:
            for view in own:
                view.zero_()
        else:
            copy_all(own, operation.inputs)
            scale(own, request.prescale)
    reduce_op = _REDUCE_OPS[batch[0][0].reduction]
    # Divided chunk by chunk, while they are in the processor's caches: the same bits as of a pass over the whole.
    is_mean = (
        isinstance(queue.group, CordeeProcessGroup)
        and queue.group.is_in_shared_memory
        and dtype in (torch.float32, torch.float64)
        and all(request.reduction == "Average" for request, _ in batch)
    )
    if queue.group is not None and layout.length:
        dist.all_reduce(flat, op=dist.ReduceOp.AVG if is_mean else reduce_op, group=queue.group)
    position = 0
    for request, operation in batch:
        own = views[position : position + len(request.parts)]
        position += len(own)
        if operation is None:
            continue
        if request.reduction == "Average" and not is_mean:
            divide(own, queue.size)
        scale(own, request.postscale)
        operation.complete(_results(operation, own if dtype is given_type else [view.to(given_type) for view in own]))


def _results(operation: Operation, values: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that the caller gets: those it gave, filled, or new ones."""
    if operation.outputs is None:
        return list(values)
    copy_all(operation.outputs, values)
    return operation.outputs


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each tensor, on any device and of any strides, without a record for gradients."""
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(list(targets), list(sources))


def scale(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply in place; whole numbers in double precision, cut towards zero."""
    if factor == 1.0 or not tensors:
        return
    if tensors[0].is_floating_point() or tensors[0].is_complex():
        torch._foreach_mul_(list(tensors), factor)
    else:
        for tensor in tensors:
            tensor.copy_((tensor.double() * factor).trunc())


def divide(tensors: Sequence[Tensor], divisor: int) -> None:
    if divisor == 1 or not tensors:
        return
    if tensors[0].is_floating_point() or tensors[0].is_complex():
        if divisor & (divisor - 1):
            torch._foreach_div_(list(tensors), divisor)
        else:
            torch._foreach_mul_(list(tensors), 1 / divisor)  # the same bits, in half of the time
    else:
        for tensor in tensors:
            tensor.copy_(torch.div(tensor, divisor, rounding_mode="trunc"))


def _adasum(queue: OperationQueue, data: Tensor) -> Tensor:
    """Combine the tensors of all ranks in pairs, pairs of pairs, and so on: each pair without what it has in common.

    Every rank computes the whole tree from the gathered tensors, so all get the same bits.
    """
    rows = [data.detach().cpu().clone()]
    if queue.group is not None:
        flat = rows[0].reshape(-1)
        gathered = torch.empty(queue.size * flat.numel(), dtype=flat.dtype)
        dist.all_gather_single(gathered, flat, group=queue.group)
        rows = [row.view(data.shape) for row in gathered.view(queue.size, -1)]
    while len(rows) > 1:
        rows = [adasum_pair(rows[i], rows[i + 1]) for i in range(0, len(rows), 2)]
    return rows[0]


def adasum_pair(one: Tensor, other: Tensor) -> Tensor:
    """Return the sum of two gradients, of which each is first shortened by half of its part along the other."""
    a, b = one.double(), other.double()
    dot, norm_a, norm_b = (a * b).sum(), (a * a).sum(), (b * b).sum()
    factor_a = 1.0 - dot / (2 * norm_a) if norm_a > 0 else 1.0
    factor_b = 1.0 - dot / (2 * norm_b) if norm_b > 0 else 1.0
    return (factor_a * a + factor_b * b).to(one.dtype)


# Moving -------------------------------------------------------------------------------------------------------------


def _broadcast(queue: OperationQueue, batch: Sequence[_Pair]) -> None:
    """Broadcast many tensors, of any types, as one buffer of bytes."""
    requests = [request for request, _ in batch]
    operations = [operation for _, operation in batch if operation is not None]
    parts = [part for request in requests for part in request.parts]
    layout = find_layout(tuple(Part("torch.uint8", (part_bytes(part),)) for part in parts), 1)
    flat = BUFFERS.take(layout.length, torch.uint8)
    views = [
        view.view(DTYPES[part.dtype]).view(part.shape) for part, view in zip(parts, layout.views(flat), strict=True)
    ]
    is_root = requests[0].root == queue.own_rank
    if is_root:
        for view, data in zip(views, (data for operation in operations for data in operation.inputs), strict=True):
            view.copy_(data.detach())
    if queue.group is not None and layout.length:
        dist.broadcast(flat, src=requests[0].root, group=queue.group)
    position = 0
    for operation in operations:
        own = views[position : position + len(operation.inputs)]
        position += len(own)
        operation.complete(_results(operation, own))


def _all_gather(queue: OperationQueue, batch: Sequence[_Pair]) -> None:
    """Join the rows of all ranks, of which each may have another number."""
    for _, operation in batch:
        assert operation is not None
        inputs = [data.detach().cpu().contiguous() for data in operation.inputs]
        if queue.group is None:
            operation.complete([data.clone() for data in inputs])
            continue
        own_rows = torch.tensor([data.shape[0] for data in inputs])
        rows = torch.empty(queue.size * len(inputs), dtype=torch.int64)
        dist.all_gather_single(rows, own_rows, group=queue.group)
        counts = rows.view(queue.size, len(inputs)).T.tolist()
        operation.complete([gather_rows(queue, data, own) for data, own in zip(inputs, counts, strict=True)])


def gather_rows(queue: OperationQueue, data: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the rows of all ranks, whose numbers are known. Collective."""
    output = torch.empty((sum(counts), *data.shape[1:]), dtype=data.dtype)
    if not output.numel():
        return output
    if len(set(counts)) == 1:
        dist.all_gather_single(output, data, group=queue.group)
        return output
    for rank, rows in zip(queue.ranks, torch.split(output, list(counts)), strict=True):
        if rows.numel():
            if rank == queue.own_rank:
                rows.copy_(data)
            dist.broadcast(rows, src=rank, group=queue.group)
    return output


def _all_to_all(queue: OperationQueue, batch: Sequence[_Pair]) -> None:
    for _, operation in batch:
        assert operation is not None and operation.splits is not None
        data = operation.inputs[0].detach().cpu().contiguous()
        sent = operation.splits.to(torch.int64).cpu().contiguous()
        received = sent.clone()
        output = data.clone()
        if queue.group is not None:
            dist.all_to_all_single(received, sent, group=queue.group)
            output = torch.empty((int(received.sum()), *data.shape[1:]), dtype=data.dtype)
            # Rows without elements need no exchange, and torch's checks of split sizes do not expect them.
            if data.shape[1:].numel():
                dist.all_to_all_single(output, data, received.tolist(), sent.tolist(), group=queue.group)
        operation.received_splits = received.to(operation.splits.dtype)
        operation.complete([output])


def _reduce_scatter(queue: OperationQueue, batch: Sequence[_Pair]) -> None:
    """Reduce, and give each rank its rows: the first ranks one more where rows do not divide evenly."""
    for request, operation in batch:
        assert operation is not None
        results = []
        for given in operation.inputs:
            data = given.detach().cpu().contiguous().to(sum_type(request, given.dtype), copy=True)
            scale([data], request.prescale)
            rows = row_shares(data.shape[0], queue.size)
            own = queue.ranks.index(queue.own_rank)
            part = torch.split(data, rows)[own].clone()
            if queue.group is not None and data.numel():
                op = _REDUCE_OPS[request.reduction]
                if len(set(rows)) == 1:
                    dist.reduce_scatter_single(part, data, op=op, group=queue.group)
                else:
                    dist.all_reduce(data, op=op, group=queue.group)
                    part = torch.split(data, rows)[own].clone()
            if request.reduction == "Average":
                divide([part], queue.size)
            scale([part], request.postscale)
            results.append(part.to(given.dtype))
        operation.complete(results)


def row_shares(num_rows: int, num_ranks: int) -> list[int]:
    """Return how many rows each rank gets: `num_rows` in all, the larger shares first."""
    share, rest = divmod(num_rows, num_ranks)
    return [share + (index < rest) for index in range(num_ranks)]


def _barrier(queue: OperationQueue, batch: Sequence[_Pair]) -> None:
    """Nothing is left to do: all ranks have come to the same round."""
    for _, operation in batch:
        if operation is not None:
            operation.complete([])


_KINDS: dict[str, Callable[[OperationQueue, Sequence[_Pair]], None]] = {
    "allreduce": _all_reduce,
    "broadcast": _broadcast,
    "allgather": _all_gather,
    "alltoall": _all_to_all,
    "reducescatter": _reduce_scatter,
    "barrier": _barrier,
}
