"""Horovod's operations on torch tensors: those that are done at once, in place or not, and with gradients.

`handles.py` has those that return a handle; all of them are found here, as in Horovod.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cordee.horovod import operations
from cordee.horovod.operations import Adasum, Average, ReductionOp, Sum, choose_op
from cordee.horovod.torch.compression import Compression
from cordee.horovod.torch.handles import (
    GroupHandle,
    allgather_async,
    allreduce_async,
    allreduce_async_,
    alltoall_async,
    broadcast_async,
    broadcast_async_,
    grouped_allgather_async,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter_async,
    poll,
    reducescatter_async,
    sparse_allreduce_async,
    synchronize,
)
from cordee.horovod.world import ProcessSet, global_process_set

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "GroupHandle",
    "Sum",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]

_Function: Any = torch.autograd.Function  # its methods are not typed


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReductionOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """All-reduce in place. Collective."""
    result: Tensor = synchronize(
        allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    )
    return result


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReductionOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the reduction of all ranks' tensors. Collective; gradients flow, reduced in the same way."""
    compressed, context = compression.compress(tensor)
    chosen = choose_op(op, average)
    reduced = _AllReduce.apply(compressed, name, chosen, prescale_factor, postscale_factor, process_set)
    result: Tensor = compression.decompress(reduced, context)
    return result


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReductionOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """All-reduce several tensors in place. Collective."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    return handle.wait()


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReductionOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Return the reductions of several tensors. Collective; gradients flow."""
    compressed = [compression.compress(tensor) for tensor in tensors]
    options = (name, choose_op(op, average), prescale_factor, postscale_factor, process_set)
    reduced = _GroupedAllReduce.apply(options, *(tensor for tensor, _ in compressed))
    return [compression.decompress(one, context) for one, (_, context) in zip(reduced, compressed, strict=True)]


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Return the rows of all ranks, joined in their order; ranks may have different numbers of rows. Collective."""
    result: Tensor = _AllGather.apply(tensor, name, process_set)
    return result


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Return the joined rows of several tensors. Collective; gradients flow."""
    if any(tensor.requires_grad for tensor in tensors):
        base = name if name is not None else process_set.queue().name(None, "grouped_allgather")
        return [allgather(tensor, f"{base}.{place}", process_set) for place, tensor in enumerate(tensors)]
    result: list[Tensor] = grouped_allgather_async(tensors, name, process_set).wait()
    return result


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the tensor of rank `root_rank`. Collective; gradients flow back to that rank."""
    result: Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)
    return result


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Broadcast in place. Collective."""
    result: Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return result


def alltoall(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the rows that all ranks have for this one, and with `splits` also how many each had. Collective."""
    output, received = _AllToAll.apply(tensor, splits, name, process_set)
    return output if splits is None else (output, received)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReductionOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Return this rank's rows of the reduction. Collective; gradients flow."""
    compressed, context = compression.compress(tensor)
    part = _ReduceScatter.apply(compressed, name, op, process_set, prescale_factor, postscale_factor)
    result: Tensor = compression.decompress(part, context)
    return result


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReductionOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Return this rank's rows of the reductions of several tensors. Collective; gradients flow."""
    if any(tensor.requires_grad for tensor in tensors):
        base = name if name is not None else process_set.queue().name(None, "grouped_reducescatter")
        more = (compression, op, process_set, prescale_factor, postscale_factor)
        return [reducescatter(tensor, f"{base}.{place}", *more) for place, tensor in enumerate(tensors)]
    compressed = [compression.compress(tensor) for tensor in tensors]
    data = [tensor for tensor, _ in compressed]
    handle = grouped_reducescatter_async(data, name, op, process_set, prescale_factor, postscale_factor)
    parts = handle.wait()
    return [compression.decompress(part, context) for part, (_, context) in zip(parts, compressed, strict=True)]


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait for all others to say so. Returns the rank that came last.

    Until then this rank adds zeros to what the others all-reduce with Average or Sum. `device` is for GPUs that hold
    these zeros; here they are in memory.
    """
    return operations.join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks have come here. Collective."""
    operations.barrier(process_set)


# Gradients, as Horovod has them: those of the mean of all ranks' losses --------------------------------------------


class _AllReduce(_Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: Any, op: Any, before: float, after: float, process_set: Any) -> Any:
        ctx.options = (None, op, before, after, process_set)
        return synchronize(allreduce_async(tensor, None, name, op, before, after, process_set))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        name, op, before, after, process_set = ctx.options
        _refuse_gradient(op)
        reduced = synchronize(allreduce_async(gradient, None, name, op, before, after, process_set))
        return reduced, None, None, None, None, None


class _GroupedAllReduce(_Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, options: Any, *tensors: Tensor) -> Any:
        name, op, before, after, process_set = options
        ctx.options = options
        return tuple(grouped_allreduce_async(tensors, None, name, op, before, after, process_set).wait())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _, op, before, after, process_set = ctx.options
        _refuse_gradient(op)
        reduced = grouped_allreduce_async(gradients, None, None, op, before, after, process_set).wait()
        return None, *reduced


def _refuse_gradient(op: ReductionOp) -> None:
    if op not in (Average, Sum, Adasum):
        raise NotImplementedError(f"there is no gradient of an allreduce with {op.name}")


class _AllGather(_Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: Any, process_set: Any) -> Any:
        ctx.rows, ctx.process_set, ctx.shape = (tensor.shape[0] if tensor.dim() else 1), process_set, tensor.shape
        return synchronize(allgather_async(tensor, name, process_set))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        process_set = ctx.process_set
        reduced = synchronize(allreduce_async(gradient, op=Average, process_set=process_set))
        counts = synchronize(allgather_async(torch.tensor([ctx.rows]), process_set=process_set)).tolist()
        own = process_set.queue().ranks.index(process_set.queue().own_rank)
        return reduced.split(counts)[own].reshape(ctx.shape), None, None


class _Broadcast(_Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: Any, process_set: Any) -> Any:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return synchronize(broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        reduced = synchronize(allreduce_async(gradient, op=Average, process_set=ctx.process_set))
        is_root = ctx.process_set.queue().own_rank == ctx.root_rank
        return (reduced if is_root else torch.zeros_like(reduced)), None, None, None


class _AllToAll(_Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Any, name: Any, process_set: Any) -> Any:
        operation = operations.alltoall(tensor.detach(), splits, name=name, process_set=process_set)
        (output,) = operation.wait()
        received = operation.received_splits
        assert received is not None
        ctx.received, ctx.process_set = received, process_set
        ctx.mark_non_differentiable(received)
        return output.to(tensor.device), received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        output, _ = synchronize(alltoall_async(gradient, ctx.received, process_set=ctx.process_set))
        return output, None, None, None


class _ReduceScatter(_Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: Any, op: Any, process_set: Any, before: float, after: float) -> Any:
        ctx.options = (op, process_set, before * after)
        return synchronize(reducescatter_async(tensor, name, op, process_set, before, after))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        op, process_set, factor = ctx.options
        _refuse_gradient(op)
        joined = synchronize(allgather_async(gradient, process_set=process_set)) * factor
        if op is Sum:
            joined = joined * process_set.queue().size
        return joined, None, None, None, None, None
