"""JAX's arrays as torch tensors and back, without a copy where that is safe, and calls out of compiled functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cordee.core.errors import MissingExtraError

try:
    import jax
    import jax.numpy as jnp
    from jax.experimental import io_callback
except ImportError as error:
    raise MissingExtraError("JAX", "jax") from error

__all__ = ["call", "is_traced", "jax", "jnp"]


def is_traced(value: Any) -> bool:
    return isinstance(value, jax.core.Tracer)


def to_torch(value: Any) -> Tensor:
    """Return a view of an array, or a copy of a number. It must not be written to: JAX takes arrays for immutable."""
    if isinstance(value, jax.Array):
        here = jax.device_put(value, jax.devices("cpu")[0]) if value.devices() != {jax.devices("cpu")[0]} else value
        return torch.utils.dlpack.from_dlpack(here) if here.dtype != jnp.bool_ else torch.from_numpy(np.array(here))
    return torch.from_numpy(np.array(value))


def from_torch(tensor: Tensor, like: Any) -> Any:
    """Return the tensor as what `like` is: an array of JAX or NumPy, of its type, or a number."""
    if isinstance(like, jax.Array):
        if tensor.dtype is torch.bool:
            return jnp.asarray(tensor.numpy())
        # Without a copy: the tensor is in a buffer of its own, which nobody writes to any more.
        result = jnp.from_dlpack(tensor.contiguous())
        # By default JAX makes 64-bit types 32-bit ones when it takes them over; the types of its own arrays stay.
        assert result.dtype == like.dtype, (result.dtype, like.dtype)
        return result
    array = tensor.numpy()
    return array if isinstance(like, np.ndarray) else array[()]


def call(
    function: Callable[..., list[Tensor]], values: Sequence[Any], shapes: Sequence[Any] | None = None
) -> list[Any]:
    """Call a function of torch tensors that returns as many: at once, or as one step of a compiled function.

    Compiled calls are made in the order of the program. `shapes` are those of the results, those of the values if None.
    """
    if not any(map(is_traced, values)):
        return [from_torch(result, like) for result, like in zip(function(*map(to_torch, values)), values, strict=True)]
    arrays = [jnp.asarray(value) for value in values]
    results = [
        jax.ShapeDtypeStruct(array.shape if shapes is None else shape, array.dtype)
        for array, shape in zip(arrays, arrays if shapes is None else shapes, strict=True)
    ]

    def compute(*given: Any) -> tuple[Any, ...]:
        # NumPy only: a callback that waits for JAX itself would wait for ever.
        tensors = [_from_numpy(np.asarray(one)) for one in given]
        return tuple(_to_numpy(result, like.dtype) for result, like in zip(function(*tensors), results, strict=True))

    return list(io_callback(compute, tuple(results), *arrays, ordered=True))


def _from_numpy(array: Any) -> Tensor:
    if array.dtype == jnp.bfloat16:
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def _to_numpy(tensor: Tensor, dtype: Any) -> Any:
    if tensor.dtype is torch.bfloat16:
        return tensor.contiguous().view(torch.uint16).numpy().view(dtype)
    return tensor.numpy()
