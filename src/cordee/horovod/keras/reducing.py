"""Reducing the gradients of a Keras training step, on each of its backends: where the step runs, in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cordee.horovod import operations
from cordee.horovod.keras.values import keras
from cordee.horovod.operations import ReductionOp, Scaling
from cordee.horovod.world import ProcessSet


def reduce_for_backend(
    gradients: list[Any],
    *,
    op: ReductionOp,
    dtype: torch.dtype | None,
    predivide_factor: float,
    process_set: ProcessSet,
) -> list[Any]:
    """Return the gradients reduced over all ranks. Collective. None stays None."""
    places = [place for place, gradient in enumerate(gradients) if gradient is not None]
    if not places or process_set.size() == 1:
        return gradients
    scaling = Scaling(1.0 / predivide_factor, predivide_factor)

    def reduce(*tensors: torch.Tensor) -> list[torch.Tensor]:
        sent = [one if dtype is None or not one.is_floating_point() else one.to(dtype) for one in tensors]
        results: list[torch.Tensor] = list(sent)
        handles = []
        for kind in sorted({one.dtype for one in sent}, key=str):
            own = [place for place, one in enumerate(sent) if one.dtype is kind]
            some = [sent[place] for place in own]
            name = f"keras.{process_set.queue().name(None, 'gradients')}.{kind}"
            handles.append((own, operations.allreduce(some, op, name=name, scaling=scaling, process_set=process_set)))
        for own, handle in handles:
            for place, result in zip(own, handle.wait(), strict=True):
                results[place] = result.to(tensors[place].dtype)
        return results

    reduced = _BACKENDS[keras.backend.backend()](reduce, [gradients[place] for place in places])
    for place, gradient in zip(places, reduced, strict=True):
        gradients[place] = gradient
    return gradients


_Reduce = Callable[..., list[torch.Tensor]]


def _in_torch(reduce: _Reduce, gradients: Sequence[Any]) -> list[Any]:
    data = [gradient.detach() for gradient in gradients]
    return [result.to(one.device) for one, result in zip(data, reduce(*data), strict=True)]


def _in_tensorflow(reduce: _Reduce, gradients: Sequence[Any]) -> list[Any]:
    from cordee.horovod.tensorflow.arrays import call, tf

    dense = [tf.convert_to_tensor(gradient) for gradient in gradients]  # IndexedSlices too
    return call(reduce, dense, [gradient.shape for gradient in dense], "gradients")


def _in_jax(reduce: _Reduce, gradients: Sequence[Any]) -> list[Any]:
    from cordee.horovod.jax_arrays import call

    return call(reduce, gradients)


_BACKENDS = {"torch": _in_torch, "tensorflow": _in_tensorflow, "jax": _in_jax}
