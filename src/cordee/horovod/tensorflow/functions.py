"""Giving all ranks the state of one: variables, values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cordee.horovod import operations
from cordee.horovod.tensorflow.mpi_ops import broadcast_
from cordee.horovod.world import ProcessSet, global_process_set


def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> None:
    """Give variables, of TensorFlow or of Keras, the values of rank `root_rank`. Collective.

    `inplace` is how Horovod saves memory; here values always go through one buffer.
    """
    if variables:
        broadcast_(variables, root_rank, process_set=process_set)


def broadcast_global_variables(root_rank: int) -> None:
    """Refused: TensorFlow 2 keeps no list of all variables."""
    raise RuntimeError(
        "hvd.broadcast_global_variables() does not support eager execution: use "
        "hvd.broadcast_variables(<model/optimizer variables>)"
    )


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the value of rank `root_rank`. Collective. Values are sent without pickle: see `horovod.objects`."""
    return operations.broadcast_object(obj, root_rank, name=name, process_set=process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """Return a function that broadcasts a value."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the values of all ranks, in their order. Collective. Values are sent without pickle."""
    return operations.allgather_object(obj, name=name, process_set=process_set)
