"""`DistributedOptimizer` for Keras 3: an optimizer that applies the gradients of all ranks, on each backend.

Only the public method `apply` is overridden, through which all of Keras's training loops go (`apply_gradients` and
`stateless_apply` call it). Releases of Keras have broken wrappers that override more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cordee.horovod.keras.reducing import reduce_for_backend
from cordee.horovod.keras.values import keras
from cordee.horovod.operations import Adasum, Average, ReductionOp
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
        reduced = reduce_for_backend(list(grads), **self._distributed_options)
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
