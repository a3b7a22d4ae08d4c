"""Giving all ranks the state of one: weights, optimizer state, values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from cordee.horovod import operations
from cordee.horovod.torch.mpi_ops import broadcast_async_, synchronize
from cordee.horovod.world import ProcessSet, global_process_set


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give all ranks the tensors of rank `root_rank`, in place. Collective.

    `params` is a `state_dict()`, or `named_parameters()`.
    """
    if isinstance(params, Mapping):
        named = sorted(params.items())
    elif isinstance(params, list | Iterable):
        named = [pair if isinstance(pair, tuple) else ("", pair) for pair in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    handles = []
    for index, (name, tensor) in enumerate(named):
        if isinstance(tensor, Tensor):
            handles.append(broadcast_async_(tensor, root_rank, f"parameter.{name or index}", process_set))
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: Optimizer,
    root_rank: int,
    model: Any = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give all ranks the optimizer's state of rank `root_rank`. Collective.

    Ranks may have no state yet: they get one. `model` is accepted for scripts that give it, and not needed.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    is_root = process_set.queue().own_rank == root_rank
    state = broadcast_object(optimizer.state_dict() if is_root else None, root_rank, "optimizer", process_set)
    if not is_root:
        optimizer.load_state_dict(state)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the value of rank `root_rank`. Collective. Values are sent without pickle: see `horovod.objects`."""
    return operations.broadcast_object(obj, root_rank, name=name, process_set=process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """Return a function that broadcasts a value."""
    return lambda obj: broadcast_object(obj, root_rank, name, process_set)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the values of all ranks, in their order. Collective. Values are sent without pickle."""
    return operations.allgather_object(obj, name=name, process_set=process_set)
