"""Horovod's operations on TensorFlow's tensors, eagerly and inside of `tf.function`, with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from cordee.horovod import operations, world
from cordee.horovod.operations import Average, ReductionOp, Scaling, Sum, choose_op
from cordee.horovod.tensorflow.arrays import call, tf
from cordee.horovod.tensorflow.compression import Compression
from cordee.horovod.world import ProcessSet, global_process_set


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: ReductionOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the reduction of all ranks' tensors. Collective; gradients flow, reduced in the same way.

    `tf.IndexedSlices` are joined, not added. The devices are those of Horovod's own buffers, which there are none of.
    """
    chosen = choose_op(op, average)
    if isinstance(tensor, tf.IndexedSlices):
        if chosen not in (Average, Sum):
            raise NotImplementedError(f"tf.IndexedSlices are reduced with Average or Sum, not {chosen.name}")
        values, indices = grouped_allgather([tensor.values, tensor.indices], name=name, process_set=process_set)
        factor = prescale_factor * postscale_factor / (process_set.queue().size if chosen is Average else 1)
        scaled = values * tf.cast(factor, values.dtype) if factor != 1 else values
        return tf.IndexedSlices(scaled, indices, dense_shape=tensor.dense_shape)
    compressed, context = compression.compress(tf.convert_to_tensor(tensor))
    scaling = Scaling(prescale_factor, postscale_factor)
    (reduced,) = _reduce([compressed], chosen, scaling, name, process_set)
    return compression.decompress(reduced, context)


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: ReductionOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the reductions of several tensors, done together. Collective; gradients flow."""
    if not tensors:
        return []
    compressed = [compression.compress(tf.convert_to_tensor(tensor)) for tensor in tensors]
    scaling = Scaling(prescale_factor, postscale_factor)
    reduced = _reduce([one for one, _ in compressed], choose_op(op, average), scaling, name, process_set)
    return [compression.decompress(one, context) for one, (_, context) in zip(reduced, compressed, strict=True)]


def _reduce(
    tensors: Sequence[Any], op: ReductionOp, scaling: Scaling, name: str | None, process_set: ProcessSet
) -> list[Any]:
    """All-reduce tensors of any types in one call out of the graph."""

    def run(values: Sequence[Any], called: str | None) -> list[Any]:
        def compute(*data: Tensor) -> list[Tensor]:
            return reduce_by_type(data, op, scaling, called, process_set)

        return call(compute, values, [value.shape for value in values], "allreduce")

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(*values: Any) -> Any:
        def gradient(*upstream: Any) -> list[Any]:
            if op not in (Average, Sum, operations.Adasum):
                raise NotImplementedError(f"there is no gradient of an allreduce with {op.name}")
            return run(upstream, None)

        return run(values, name), gradient

    result = differentiable(*tensors)
    return list(result) if isinstance(result, list | tuple) else [result]


def reduce_by_type(
    data: Sequence[Tensor], op: ReductionOp, scaling: Scaling, name: str | None, process_set: ProcessSet
) -> list[Tensor]:
    """All-reduce torch tensors of any types, those of one type together. Collective."""
    queue = process_set.queue()
    base = name if name is not None else queue.name(None, "grouped_allreduce")
    results: list[Tensor | None] = [None] * len(data)
    handles = []
    for dtype in sorted({one.dtype for one in data}, key=str):
        places = [place for place, one in enumerate(data) if one.dtype is dtype]
        handle = operations.allreduce(
            [data[place] for place in places],
            op,
            name=f"{base}.{str(dtype).removeprefix('torch.')}",
            scaling=scaling,
            process_set=process_set,
        )
        handles.append((places, handle))
    for places, handle in handles:
        for place, result in zip(places, handle.wait(), strict=True):
            results[place] = result
    return [result for result in results if result is not None]


def allgather(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Return the rows of all ranks, joined in their order. Collective; gradients flow."""
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the joined rows of several tensors. Collective; gradients flow."""

    def compute(*data: Tensor) -> list[Tensor]:
        return list(operations.allgather(data, name=name, process_set=process_set).wait())

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(*values: Any) -> Any:
        def gradient(*upstream: Any) -> list[Any]:
            def scatter(*data: Tensor) -> list[Tensor]:
                count = len(data) // 2
                reduced = reduce_by_type(data[:count], Average, Scaling(), None, process_set)
                rows = operations.allgather([own.reshape(1) for own in data[count:]], process_set=process_set).wait()
                own = process_set.queue().ranks.index(process_set.queue().own_rank)
                parts = [one.split(list(each.tolist()))[own] for one, each in zip(reduced, rows, strict=True)]  # type: ignore[no-untyped-call]
                return [*parts, *data[count:]]

            rows = [tf.cast(tf.shape(value)[0], tf.int64) for value in values]
            shapes = [*(value.shape for value in values), *([()] * len(values))]
            return call(scatter, [*upstream, *rows], shapes, "allgather_gradient")[: len(values)]

        shapes = [[None, *value.shape[1:]] for value in values]
        return call(compute, values, shapes, "allgather"), gradient

    rows = [tf.reshape(tensor, [1]) if tf.convert_to_tensor(tensor).shape.rank == 0 else tensor for tensor in tensors]
    result = differentiable(*map(tf.convert_to_tensor, rows))
    return list(result) if isinstance(result, list | tuple) else [result]


def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the tensor of rank `root_rank`. Collective; gradients flow back to that rank."""

    def compute(data: Tensor) -> list[Tensor]:
        return list(operations.broadcast([data], root_rank, name=name, process_set=process_set).wait())

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(value: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            (reduced,) = _reduce([upstream], Average, Scaling(), None, process_set)
            return reduced if world.rank() == root_rank else reduced * 0

        return call(compute, [value], [value.shape], "broadcast")[0], gradient

    return differentiable(tf.convert_to_tensor(tensor))


def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Give variables the values of rank `root_rank`. Collective."""

    def compute(*data: Tensor) -> list[Tensor]:
        return list(operations.broadcast(data, root_rank, name=name, process_set=process_set).wait())

    values = [variable.value if not callable(variable.value) else variable.value() for variable in variables]
    values = [tf.convert_to_tensor(value) for value in values]
    results = call(compute, values, [value.shape for value in values], "broadcast")
    return [variable.assign(result) for variable, result in zip(variables, results, strict=True)]


def alltoall(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the rows that all ranks have for this one, and with `splits` also how many each had. Collective.

    There is no gradient.
    """
    if not tf.executing_eagerly():
        raise NotImplementedError("alltoall works eagerly only: call it outside of tf.function")
    from cordee.horovod.tensorflow.arrays import from_torch, to_torch

    given = None if splits is None else to_torch(tf.convert_to_tensor(splits)).clone()
    operation = operations.alltoall(to_torch(tensor), given, name=name, process_set=process_set)
    (output,) = operation.wait()
    assert operation.received_splits is not None
    return from_torch(output) if splits is None else (from_torch(output), from_torch(operation.received_splits))


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: ReductionOp = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Return this rank's rows of the reduction. Collective. There is no gradient."""
    more = (compression, op, name, process_set, prescale_factor, postscale_factor)
    return grouped_reducescatter([tensor], device_dense, *more)[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: ReductionOp = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Return this rank's rows of the reductions of several tensors. Collective. There is no gradient."""
    compressed = [compression.compress(tf.convert_to_tensor(tensor)) for tensor in tensors]
    scaling = Scaling(prescale_factor, postscale_factor)

    def compute(*data: Tensor) -> list[Tensor]:
        return list(operations.reducescatter(data, op, name=name, scaling=scaling, process_set=process_set).wait())

    values = [tf.stop_gradient(one) for one, _ in compressed]
    parts = call(compute, values, [[None, *value.shape[1:]] for value in values], "reducescatter")
    return [compression.decompress(part, context) for part, (_, context) in zip(parts, compressed, strict=True)]


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks have come here. Collective, and at once, also where a graph is made."""
    operations.barrier(process_set)


def join() -> Any:
    """Say that this rank has no more data, and wait for all others to say so. Returns the rank that came last."""
    return tf.constant(operations.join())


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    return tf.constant(world.size(), name=name)


def rank_op(name: str | None = None) -> Any:
    return tf.constant(world.rank(), name=name)


def local_size_op(name: str | None = None) -> Any:
    return tf.constant(world.local_size(), name=name)


def local_rank_op(name: str | None = None) -> Any:
    return tf.constant(world.local_rank(), name=name)
