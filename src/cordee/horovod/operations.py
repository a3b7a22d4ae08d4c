"""Operations on torch CPU tensors under Horovod's names of reductions, for all front ends to build on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cordee.horovod import objects
from cordee.horovod.execution import DTYPES
from cordee.horovod.queue import Operation
from cordee.horovod.requests import Part, Request
from cordee.horovod.world import ProcessSet, global_process_set

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class ReductionOp(NamedTuple):
    """How the values of all ranks become one."""

    name: str


Average, Sum, Min, Max, Product, Adasum = (
    ReductionOp(name) for name in ("Average", "Sum", "Min", "Max", "Product", "Adasum")
)


class Scaling(NamedTuple):
    """By what values are multiplied before and after a reduction."""

    before: float = 1.0
    after: float = 1.0


UNSCALED = Scaling()


def choose_op(op: ReductionOp | None, average: bool | None, default: ReductionOp = Average) -> ReductionOp:
    """Return the reduction of a call, by `op` or by the older `average`."""
    if average is not None:
        if op is not None:
            raise ValueError("give either op or average, which is its older form, not both")
        return Average if average else Sum
    if op is None:
        return default
    if not isinstance(op, ReductionOp):
        raise ValueError(f"op={op!r}: it must be hvd.Average, Sum, Min, Max, Product or Adasum")
    return op


def allreduce(
    tensors: Sequence[Tensor],
    op: ReductionOp,
    *,
    name: str | None = None,
    outputs: Sequence[Tensor] | None = None,
    scaling: Scaling = UNSCALED,
    process_set: ProcessSet = global_process_set,
) -> Operation:
    """Queue an all-reduce of tensors of one type, which are reduced together."""
    queue = process_set.queue()
    if op is Adasum and queue.size & (queue.size - 1):
        raise NotImplementedError(f"Adasum needs a number of ranks that is a power of 2, and there are {queue.size}")
    if op is Adasum and not all(tensor.is_floating_point() for tensor in tensors):
        raise ValueError("Adasum is for floating-point tensors")
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise ValueError(f"tensors that are reduced together must have one type, not {_types(tensors)}")
    request = Request(
        queue.name(name, "allreduce"), "allreduce", describe(tensors), op.name, float(scaling[0]), float(scaling[1])
    )
    return queue.submit(Operation(queue, request, tensors, outputs))


def allgather(
    tensors: Sequence[Tensor], *, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Operation:
    """Queue the joining of all ranks' rows; the number of rows may differ."""
    queue = process_set.queue()
    rows = [tensor if tensor.dim() else tensor.reshape(1) for tensor in tensors]
    request = Request(queue.name(name, "allgather"), "allgather", describe(rows, rows_differ=True))
    return queue.submit(Operation(queue, request, rows))


def broadcast(
    tensors: Sequence[Tensor],
    root_rank: int,
    *,
    name: str | None = None,
    outputs: Sequence[Tensor] | None = None,
    process_set: ProcessSet = global_process_set,
) -> Operation:
    """Queue the copying of one rank's tensors to all. `root_rank` is the global number of the rank."""
    queue = process_set.queue()
    if root_rank not in queue.ranks:
        raise ValueError(f"broadcast: root_rank={root_rank} is not among the ranks {queue.ranks}")
    request = Request(queue.name(name, "broadcast"), "broadcast", describe(tensors), root=int(root_rank))
    return queue.submit(Operation(queue, request, tensors, outputs))


def alltoall(
    tensor: Tensor,
    splits: Any = None,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Operation:
    """Queue an exchange in which each rank gets some rows of each: evenly, or by `splits`."""
    queue = process_set.queue()
    if tensor.dim() == 0:
        raise ValueError("alltoall: a tensor without dimensions has no rows")
    rows = tensor.shape[0]
    if splits is None:
        if rows % queue.size:
            raise ValueError(f"alltoall: {rows} rows do not divide evenly among {queue.size} ranks: give splits")
        splits = torch.full((queue.size,), rows // queue.size, dtype=torch.int32)
    splits = torch.as_tensor(splits)
    if splits.dim() != 1 or splits.dtype.is_floating_point or len(splits) != queue.size:
        raise ValueError(f"alltoall: splits must be {queue.size} whole numbers, one for each rank")
    if (splits < 0).any() or int(splits.sum()) != rows:
        raise ValueError(f"alltoall: splits {splits.tolist()} must be at least 0 and add up to the {rows} rows")
    request = Request(queue.name(name, "alltoall"), "alltoall", describe([tensor], rows_differ=True))
    return queue.submit(Operation(queue, request, [tensor], splits=splits))


def reducescatter(
    tensors: Sequence[Tensor],
    op: ReductionOp,
    *,
    name: str | None = None,
    scaling: Scaling = UNSCALED,
    process_set: ProcessSet = global_process_set,
) -> Operation:
    """Queue a reduction of which each rank gets some of the rows."""
    queue = process_set.queue()
    if op not in (Average, Sum, Min, Max, Product):
        raise NotImplementedError(f"reducescatter has no {op.name}")
    for tensor in tensors:
        if tensor.dim() == 0:
            raise ValueError("reducescatter: a tensor without dimensions has no rows")
    request = Request(
        queue.name(name, "reducescatter"),
        "reducescatter",
        describe(tensors),
        op.name,
        float(scaling[0]),
        float(scaling[1]),
    )
    return queue.submit(Operation(queue, request, tensors))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the set have come here."""
    queue = process_set.queue()
    queue.submit(Operation(queue, Request(queue.name(None, "barrier"), "barrier"), [])).wait()


def join() -> int:
    """Say that this rank has no more data; it adds zeros to what the others reduce until all have called this.

    Returns the rank that came last.
    """
    return global_process_set.queue().join()


def broadcast_object(
    value: Any, root_rank: int = 0, *, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the value of one rank, on all. Collective. Raises JobError there if it cannot be sent without pickle."""
    queue = process_set.queue()
    if queue.group is None:
        return objects.decode(objects.encode(value, "the object"))
    is_root = root_rank == queue.own_rank
    problem: Exception | None = None
    content = b""
    if is_root:
        try:
            content = objects.encode(value, "broadcast_object: the object")
        except Exception as error:  # noqa: BLE001 - the others wait for the length
            problem = error
    length = torch.tensor([-1 if problem else len(content)])
    name = name or f"object.{queue.name(None, 'broadcast_object')}"
    (length,) = broadcast([length], root_rank, name=f"{name}.length", process_set=process_set).wait()
    if problem is not None:
        raise problem
    if int(length) < 0:
        raise ValueError(f"broadcast_object: rank {root_rank} could not send its object, and says why")
    data = torch.empty(int(length), dtype=torch.uint8)
    if is_root and content:
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    (data,) = broadcast([data], root_rank, name=f"{name}.content", process_set=process_set).wait()
    return value if is_root else objects.decode(data.numpy().tobytes())


def allgather_object(value: Any, *, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the values of all ranks, in their order. Collective."""
    queue = process_set.queue()
    name = name or f"object.{queue.name(None, 'allgather_object')}"
    content = objects.encode(value, "allgather_object: the object")
    data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    lengths, joined = allgather([torch.tensor([len(data)]), data], name=name, process_set=process_set).wait()
    return [objects.decode(part.numpy().tobytes()) for part in joined.split(lengths.tolist())]


def describe(tensors: Sequence[Tensor], *, rows_differ: bool = False) -> tuple[Part, ...]:
    """Return what of these tensors must be the same on all ranks."""
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise ValueError(f"a {tensor.layout} tensor: use hvd.sparse_allreduce_async for sparse tensors")
    if rows_differ:
        return tuple(Part(_DTYPE_NAMES[tensor.dtype], tuple(tensor.shape[1:])) for tensor in tensors)
    return tuple(Part(_DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for tensor in tensors)


def _types(tensors: Sequence[Tensor]) -> str:
    return ", ".join(sorted({str(tensor.dtype) for tensor in tensors}))
