"""TensorFlow's tensors as torch tensors and back, without a copy, and calls out of graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cordee.core.errors import MissingExtraError
from cordee.horovod.buffers import ALIGNMENT_BYTES

try:
    import tensorflow as tf
except ImportError as error:
    raise MissingExtraError("cordee.horovod.tensorflow", "tensorflow") from error

__all__ = ["call", "from_torch", "tf", "to_torch"]

# Part of the name of an operation of ours in a graph: XLA's refusal prints it.
NO_XLA = "needs_jit_compile_False"


def to_torch(tensor: Any) -> Tensor:
    """Return a view of a tensor or variable. It must not be written to: TensorFlow takes it for immutable."""
    value = tf.convert_to_tensor(tensor)
    kind = value.dtype
    if not (kind.is_floating or kind.is_integer or kind.is_bool or kind.is_complex):
        raise ValueError(f"a tensor of {kind.name} cannot be sent: only numbers can")
    with tf.device("CPU:0"):
        here = tf.identity(value) if "CPU" not in value.device else value
    data: Tensor = torch.utils.dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(here))
    return data


def from_torch(tensor: Tensor) -> Any:
    """Return a tensor that shares the memory of this one, which nobody may write to from now on."""
    data = tensor.contiguous()
    if data.data_ptr() % ALIGNMENT_BYTES:
        data = data.clone()  # TensorFlow ends the process when it is given other memory
    return tf.experimental.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(data))  # type: ignore[attr-defined]


def call(
    function: Callable[..., Sequence[Tensor]], tensors: Sequence[Any], shapes: Sequence[Any], name: str
) -> list[Any]:
    """Call a function of torch tensors that returns as many, of the same types: at once, or as one step of a graph.

    `shapes` are those of the results, as far as they are known when a graph is made.
    """

    def compute(*values: Any) -> list[Any]:
        return [from_torch(result) for result in function(*map(to_torch, values))]

    if tf.executing_eagerly():
        return compute(*tensors)
    values = [tf.convert_to_tensor(tensor) for tensor in tensors]
    # One call for all tensors: each costs about half a millisecond. XLA cannot compile it, and prints its name.
    results = tf.py_function(compute, values, [value.dtype for value in values], name=f"cordee_{name}_{NO_XLA}")
    for result, shape in zip(results, shapes, strict=True):
        result.set_shape(shape)
    return list(results)
