"""`DistributedOptimizer` for Keras 3: an optimizer that applies the gradients of all ranks, on each backend.

Only the public method `apply` is overridden, through which all of Keras's training loops go (`apply_gradients` and
`stateless_apply` call it). Releases of Keras have broken wrappers that override more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cordee.horovod import operations
from cordee.horovod.keras.values import keras
from cordee.horovod.operations import Adasum, Average, ReductionOp, Scaling
from cordee.horovod.world import ProcessSet, global_process_set


class Compression:
    """The compressions to choose from: the type in which gradients are sent."""

    none: torch.dtype | None = None
    fp16: torch.dtype | None = torch.float16


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: torch.dtype | None = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReductionOp = Average,
    num_groups: int = 0,
    groups: Any = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the optimizer, which from now on reduces gradients over all ranks before it applies them. Collective.

    It stays the same object, of a class derived from its own. For `backward_passes_per_step` use
    `gradient_accumulation_steps` of Keras, which reduces at each pass.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(f"DistributedOptimizer: a {type(optimizer).__name__} is no keras.optimizers.Optimizer")
    if isinstance(optimizer, _Reducing):
        raise ValueError("DistributedOptimizer: this optimizer is distributed already")
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise ValueError("gradient_predivide_factor is for op=hvd.Average only")
    if op is Adasum:
        raise NotImplementedError("Adasum is for cordee.horovod.torch only")
    if backward_passes_per_step != 1 or average_aggregated_gradients:
        raise NotImplementedError(
            "backward_passes_per_step: use gradient_accumulation_steps of the Keras optimizer, which averages them"
        )
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (_Reducing, kind), {"__module__": kind.__module__})
    optimizer._distributed_options = {
        "op": op,
        "dtype": compression,
        "predivide_factor": gradient_predivide_factor,
        "process_set": process_set,
    }
    return optimizer


class _Reducing:
    """What a distributed optimizer does beyond its own class."""

    _distributed_options: dict[str, Any]

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        """Apply the gradients of all ranks. Collective."""
        reduced = _reduce_for_backend(list(grads), **self._distributed_options)
        return super().apply(reduced, trainable_variables)  # type: ignore[misc]


def load_model(
    filepath: str, custom_optimizers: Any = None, custom_objects: Any = None, compression: Any = Compression.none
) -> Any:
    """Return a saved model, whose optimizer is made distributed. Local.

    `custom_optimizers` are classes that Keras does not know by itself.
    """
    known = {kind.__name__: kind for kind in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**known, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model


# Reducing the gradients of a training step where the step runs, in one call.


def _reduce_for_backend(
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
