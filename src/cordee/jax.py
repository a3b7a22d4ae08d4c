"""Cordée's collectives for JAX: `cordee.jax.all_reduce(tree)` and others, of pytrees, eagerly and under `jax.jit`.

`init()` joins the processes that were started together (`cordee run -n N`, torchrun, mpirun, srun). Alone, every
operation returns what it was given. All leaves of a tree go through one buffer. Every function but the last ones is
collective; a call that ranks make differently is an error that names the call and the ranks.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from cordee.horovod import operations
from cordee.horovod.jax_arrays import call, is_traced, jax, jnp
from cordee.horovod.operations import ReductionOp
from cordee.horovod.world import init, is_initialized, rank, shutdown, size

__all__ = [
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "init",
    "is_initialized",
    "pmean",
    "psum",
    "rank",
    "shutdown",
    "size",
]

_OPS: dict[str, ReductionOp] = {
    "mean": operations.Average,
    "sum": operations.Sum,
    "min": operations.Min,
    "max": operations.Max,
    "product": operations.Product,
}


def all_reduce(tree: Any, op: Literal["mean", "sum", "min", "max", "product"] = "mean") -> Any:
    """Return a pytree whose leaves are reduced over all processes. Collective.

    Leaves keep their types: the mean of whole numbers must be whole, or ValueError is raised.
    """
    if op not in _OPS:
        raise ValueError(f"all_reduce: op={op!r} must be one of {', '.join(_OPS)}")
    init()

    def compute(*data: Tensor) -> list[Tensor]:
        sent = [one.long() if op == "mean" and not _has_fractions(one) else one for one in data]
        results: list[Tensor] = list(sent)
        handles = []
        for dtype in sorted({one.dtype for one in sent}, key=str):
            places = [place for place, one in enumerate(sent) if one.dtype is dtype]
            own = _OPS["sum"] if op == "mean" and not _has_fractions(sent[places[0]]) else _OPS[op]
            handles.append((places, operations.allreduce([sent[place] for place in places], own)))
        for places, handle in handles:
            for place, result in zip(places, handle.wait(), strict=True):
                is_sum = op == "mean" and not _has_fractions(result)
                results[place] = _whole_mean(result, size(), data[place].dtype) if is_sum else result
        return results

    return _map(compute, tree)


def _has_fractions(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _whole_mean(total: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return the mean of whole numbers in their type. Raises ValueError, on all ranks, where that would cut it."""
    if bool((total % count).any()):
        raise ValueError(
            f"the mean of {str(dtype).removeprefix('torch.')} over {count} processes is not a whole number: convert "
            "it to floating point before, or use psum"
        )
    return (total // count).to(dtype)


def pmean(tree: Any) -> Any:
    """Return the mean of a pytree over all processes: gradients in a training loop of one's own. Collective."""
    return all_reduce(tree, "mean")


def psum(tree: Any) -> Any:
    """Return the sum of a pytree over all processes. Collective."""
    return all_reduce(tree, "sum")


def broadcast(tree: Any, root: int = 0) -> Any:
    """Return the pytree of process `root`, on all of them: the weights at the start. Collective."""
    init()
    return _map(lambda *data: list(operations.broadcast(data, root).wait()), tree)


def all_gather(tree: Any) -> Any:
    """Return a pytree whose leaves have the values of all processes along a new first axis. Collective."""
    init()
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        return tree
    count = size()
    arrays = [leaf if is_traced(leaf) else jnp.asarray(leaf) for leaf in leaves]

    def compute(*data: Tensor) -> list[Tensor]:
        gathered = operations.allgather([one.unsqueeze(0) for one in data]).wait()
        return list(gathered)

    shapes = [(count, *array.shape) for array in arrays]
    return jax.tree.unflatten(structure, call(compute, arrays, shapes))


def barrier() -> None:
    """Wait until all processes have come here. Collective; not for compiled functions."""
    init()
    operations.barrier()


def _map(compute: Any, tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, call(compute, leaves)) if leaves else tree
