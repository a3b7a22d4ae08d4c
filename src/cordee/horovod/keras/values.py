"""Values of Keras, whatever its backend, as NumPy arrays: for what happens outside of the training step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from cordee.core.errors import MissingExtraError
from cordee.horovod import operations
from cordee.horovod.operations import Average, ReductionOp, Scaling, choose_op
from cordee.horovod.world import ProcessSet, global_process_set

try:
    import keras
except ImportError as error:
    raise MissingExtraError("cordee.horovod.keras", "keras") from error

__all__ = ["allgather", "allreduce", "broadcast", "broadcast_variables", "keras", "reducescatter", "to_torch"]


def to_torch(value: Any) -> torch.Tensor:
    """Return a copy of a number, an array, a tensor or a variable."""
    array = value if isinstance(value, int | float | np.ndarray | np.generic) else keras.ops.convert_to_numpy(value)
    return torch.from_numpy(np.array(array))


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReductionOp | None = None,
    process_set: ProcessSet = global_process_set,
) -> np.ndarray[Any, Any]:
    """Return the reduction of all ranks' values, as an array. Collective."""
    scaling = Scaling(prescale_factor, postscale_factor)
    chosen = choose_op(op, average)
    handle = operations.allreduce([to_torch(value)], chosen, name=name, scaling=scaling, process_set=process_set)
    return np.asarray(handle.wait()[0].numpy())


def allgather(
    value: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> np.ndarray[Any, Any]:
    """Return the rows of all ranks, joined in their order. Collective."""
    return np.asarray(operations.allgather([to_torch(value)], name=name, process_set=process_set).wait()[0].numpy())


def broadcast(
    value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> np.ndarray[Any, Any]:
    """Return the value of rank `root_rank`. Collective."""
    handle = operations.broadcast([to_torch(value)], root_rank, name=name, process_set=process_set)
    return np.asarray(handle.wait()[0].numpy())


def reducescatter(
    value: Any, name: str | None = None, op: ReductionOp = Average, process_set: ProcessSet = global_process_set
) -> np.ndarray[Any, Any]:
    """Return this rank's rows of the reduction. Collective."""
    handle = operations.reducescatter([to_torch(value)], op, name=name, process_set=process_set)
    return np.asarray(handle.wait()[0].numpy())


def broadcast_variables(variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Give variables of Keras the values of rank `root_rank`. Collective."""
    if not variables:
        return
    values = [to_torch(variable) for variable in variables]
    results = operations.broadcast(values, root_rank, name=None, process_set=process_set).wait()
    for variable, result in zip(variables, results, strict=True):
        variable.assign(result.numpy())
