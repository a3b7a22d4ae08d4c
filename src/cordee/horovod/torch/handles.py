"""Horovod's operations on torch tensors that return a handle, in place or not.

A handle's operation is carried out when `synchronize` or `poll` is called for it, or any later operation is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cordee.horovod import operations
from cordee.horovod.operations import Average, ReductionOp, Scaling, Sum, choose_op
from cordee.horovod.queue import Operation
from cordee.horovod.world import ProcessSet, global_process_set


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReductionOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Operation:
    """Queue an all-reduce and return its handle. The tensor must not change until it is synchronized."""
    output = [torch.empty_like(tensor, memory_format=torch.contiguous_format).detach()]
    scaling = Scaling(prescale_factor, postscale_factor)
    op = choose_op(op, average)
    return _one(
        operations.allreduce([tensor.detach()], op, name=name, outputs=output, scaling=scaling, process_set=process_set)
    )


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReductionOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Operation:
    """Queue an all-reduce in place and return its handle."""
    scaling = Scaling(prescale_factor, postscale_factor)
    op = choose_op(op, average)
    data = [tensor.detach()]
    operation = operations.allreduce(data, op, name=name, outputs=data, scaling=scaling, process_set=process_set)
    operation.finish = lambda _: tensor
    return operation


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReductionOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> GroupHandle:
    """Queue all-reduces of several tensors, which are done together, and return their handle."""
    outputs = [torch.empty_like(tensor, memory_format=torch.contiguous_format).detach() for tensor in tensors]
    scaling = Scaling(prescale_factor, postscale_factor)
    return _grouped(tensors, outputs, name, choose_op(op, average), scaling, process_set)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReductionOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> GroupHandle:
    """Queue all-reduces of several tensors in place, which are done together, and return their handle."""
    scaling = Scaling(prescale_factor, postscale_factor)
    return _grouped(tensors, list(tensors), name, choose_op(op, average), scaling, process_set)


class GroupHandle:
    """The handle of operations that were queued together, one for each type of tensors."""

    def __init__(self, handles: Sequence[tuple[list[int], Operation]], results: list[Tensor]) -> None:
        self._handles = handles
        self._results = results

    @property
    def is_done(self) -> bool:
        return all(operation.is_done for _, operation in self._handles)

    def wait(self) -> list[Tensor]:
        for places, operation in self._handles:
            for place, result in zip(places, operation.wait(), strict=True):
                if self._results[place] is not result:
                    self._results[place] = result
        return self._results


def _grouped(
    tensors: Sequence[Tensor],
    outputs: list[Tensor],
    name: str | None,
    op: ReductionOp,
    scaling: Scaling,
    process_set: ProcessSet,
) -> GroupHandle:
    """Queue tensors by their types: what is reduced in one buffer has one."""
    queue = process_set.queue()
    base = name if name is not None else queue.name(None, "grouped_allreduce")
    inputs = [tensor.detach() for tensor in tensors]
    targets = inputs if all(map(operator.is_, tensors, outputs)) else [output.detach() for output in outputs]
    handles = []
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype is dtype]
        operation = operations.allreduce(
            [inputs[place] for place in places],
            op,
            name=f"{base}.{str(dtype).removeprefix('torch.')}",
            outputs=[targets[place] for place in places],
            scaling=scaling,
            process_set=process_set,
        )
        operation.finish = lambda _, places=places: [outputs[place] for place in places]
        handles.append((places, operation))
    return GroupHandle(handles, outputs)


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: ReductionOp, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Queue the sum or average of sparse tensors, whose entries may differ; what is returned waits and gives it."""
    if op not in (Average, Sum):
        raise ValueError(f"sparse tensors are reduced with Average or Sum, not {op.name}")
    if tensor.layout is not torch.sparse_coo:
        raise ValueError(f"sparse_allreduce_async is for sparse COO tensors, not {tensor.layout}")
    data = tensor.detach().coalesce()
    parts = [data.indices().T.contiguous(), data.values()]
    queue = process_set.queue()
    base = name if name is not None else queue.name(None, "sparse_allreduce")
    shape = ".".join(map(str, tensor.shape))
    handle = operations.allgather(parts, name=f"sparse.{base}.{shape}", process_set=process_set)

    def wait() -> Tensor:
        indices, values = handle.wait()
        joined = torch.sparse_coo_tensor(indices.T, values, tensor.shape, device=tensor.device).coalesce()
        return joined / queue.size if op is Average else joined

    return wait


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Operation:
    """Queue the joining of all ranks' rows and return its handle."""
    return _one(operations.allgather([tensor.detach()], name=name, process_set=process_set), tensor.device)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Operation:
    """Queue the joining of the rows of several tensors and return its handle."""
    return operations.allgather([tensor.detach() for tensor in tensors], name=name, process_set=process_set)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Operation:
    """Queue a broadcast and return its handle."""
    output = [torch.empty_like(tensor, memory_format=torch.contiguous_format).detach()]
    return _one(operations.broadcast([tensor.detach()], root_rank, name=name, outputs=output, process_set=process_set))


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Operation:
    """Queue a broadcast in place and return its handle."""
    data = [tensor.detach()]
    operation = operations.broadcast(data, root_rank, name=name, outputs=data, process_set=process_set)
    operation.finish = lambda _: tensor
    return operation


def alltoall_async(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Operation:
    """Queue an exchange of rows and return its handle."""
    operation = operations.alltoall(tensor.detach(), splits, name=name, process_set=process_set)

    def finish(done: Operation) -> Any:
        assert done.outputs is not None
        output = done.outputs[0].to(tensor.device)
        return output if splits is None else (output, done.received_splits)

    operation.finish = finish
    return operation


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReductionOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Operation:
    """Queue a reduction of which each rank gets its rows, and return its handle."""
    scaling = Scaling(prescale_factor, postscale_factor)
    return _one(
        operations.reducescatter([tensor.detach()], op, name=name, scaling=scaling, process_set=process_set),
        tensor.device,
    )


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: ReductionOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Operation:
    """Queue reductions of several tensors, of which each rank gets its rows, and return the handle."""
    scaling = Scaling(prescale_factor, postscale_factor)
    data = [tensor.detach() for tensor in tensors]
    return operations.reducescatter(data, op, name=name, scaling=scaling, process_set=process_set)


def poll(handle: Any) -> bool:
    """Return whether an operation is done. Brings it about, and so waits for ranks that have not called it yet."""
    if callable(handle):
        return True
    if not handle.is_done:
        handle.wait()
    return bool(handle.is_done)


def synchronize(handle: Any) -> Any:
    """Wait for an operation and return its result. Raises HorovodInternalError if ranks called it differently."""
    return handle() if callable(handle) else handle.wait()


def _one(operation: Operation, device: torch.device | None = None) -> Operation:
    """Let the result be the one tensor that the operation has, where the caller's tensor is."""

    def finish(done: Operation) -> Tensor:
        assert done.outputs is not None
        output = done.outputs[0]
        return output if device is None else output.to(device)

    operation.finish = finish
    return operation
