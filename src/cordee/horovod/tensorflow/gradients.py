"""Gradients of all ranks: a tape, and an optimizer of Keras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cordee.horovod.operations import Average, ReductionOp
from cordee.horovod.tensorflow.arrays import tf
from cordee.horovod.tensorflow.compression import Compression
from cordee.horovod.tensorflow.mpi_ops import allreduce, grouped_allreduce
from cordee.horovod.world import ProcessSet, global_process_set


def reduce_gradients(
    gradients: Sequence[Any],
    *,
    op: ReductionOp = Average,
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return gradients reduced over all ranks, the dense ones in one call. Collective. None stays None."""
    results = list(gradients)
    dense = []
    for place, gradient in enumerate(gradients):
        if isinstance(gradient, tf.IndexedSlices):
            if sparse_as_dense:
                results[place] = tf.convert_to_tensor(gradient)
                dense.append(place)
            else:
                results[place] = allreduce(gradient, op=op, process_set=process_set)
        elif gradient is not None:
            dense.append(place)
    reduced = grouped_allreduce(
        [results[place] for place in dense],
        compression=compression,
        op=op,
        prescale_factor=1.0 / predivide_factor,
        postscale_factor=predivide_factor,
        process_set=process_set,
    )
    for place, gradient in zip(dense, reduced, strict=True):
        results[place] = gradient
    return results


class _DistributedTape:
    """A tape whose gradients are those of all ranks."""

    def __init__(self, tape: Any, options: dict[str, Any]) -> None:
        self._tape = tape
        self._options = options

    def __enter__(self) -> _DistributedTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *reason: Any) -> None:
        self._tape.__exit__(*reason)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def gradient(self, target: Any, sources: Any, output_gradients: Any = None, **more: Any) -> Any:
        """Return the gradients, reduced over all ranks. Collective. `sources` may be nested."""
        gradients = self._tape.gradient(target, sources, output_gradients, **more)
        flat = tf.nest.flatten(gradients)
        return tf.nest.pack_sequence_as(gradients, reduce_gradients(flat, **self._options))


def DistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: ReductionOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return a tape whose `gradient()` reduces over all ranks. Use it before or after the block that records.

    All gradients are reduced in one call, so groups change nothing but are accepted: a group is never cut.
    """
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise ValueError("gradient_predivide_factor is for op=hvd.Average only")
    options = {
        "op": op,
        "compression": compression,
        "sparse_as_dense": sparse_as_dense,
        "predivide_factor": gradient_predivide_factor,
        "process_set": process_set,
    }
    return _DistributedTape(gradtape, options)


def DistributedOptimizer(optimizer: Any, name: str | None = None, **options: Any) -> Any:  # noqa: N802 - Horovod's name
    """Return a Keras optimizer that applies the gradients of all ranks: see `cordee.horovod.keras`."""
    from cordee.horovod import keras

    return keras.DistributedOptimizer(optimizer, name, **options)
