"""What a model returns: a tensor, several, or an object with `logits` and a `loss` of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cordee.core import tree
from cordee.core.batch import tensors_in
from cordee.core.errors import ModelError, TrainingError


def predictions(outputs: Any, which: str | int | None = None) -> Tensor:
    """Return the predictions: the tensor itself, the one called `logits`, or the one that `which` names.

    Raises ModelError that says what there is instead.
    """
    if which is None and isinstance(outputs, Tensor):
        return outputs
    found = part(outputs, "logits" if which is None else which)
    if isinstance(found, Tensor):
        return found
    if which is not None:
        raise ModelError(f"loss.output = {which!r}, but the model returns {describe(outputs)}")
    raise ModelError(
        f"the model returns {describe(outputs)}, without 'logits': set loss.output to the name or the number of the "
        "output to compare, or loss.use to a function of your own, which is given all of them"
    )


def model_loss(outputs: Any, targets: Any = None) -> Tensor:
    """Return the loss that a model has computed: its `loss`, the first of several outputs, or its only one."""
    found = part(outputs, "loss")
    if found is None and isinstance(outputs, (tuple, list)) and outputs:
        found = outputs[0]
    if found is None and isinstance(outputs, Tensor):
        found = outputs
    if not isinstance(found, Tensor) or found.ndim != 0:
        raise ModelError(
            f"loss.use = 'model', but the model returns {describe(outputs)}, without a loss: return one number as "
            "'loss' (or first in a tuple), or set loss.use = 'cross_entropy', say. Models of transformers compute a "
            "loss when they are given labels: is loss.argument the name of theirs, and does the data have a target?"
        )
    return found


def part(outputs: Any, which: str | int) -> Any:
    """Return the output of this name or number; None if there is none."""
    if isinstance(which, int):
        return outputs[which] if isinstance(outputs, (tuple, list)) and -len(outputs) <= which < len(outputs) else None
    if isinstance(outputs, Mapping):
        return outputs.get(which)
    return None if isinstance(outputs, Tensor) else getattr(outputs, which, None)


def describe(outputs: Any) -> str:
    """Return in words what a model returned."""
    if tree.is_node(outputs) or outputs is None or isinstance(outputs, Tensor):
        return tree.describe(outputs)
    return f"a {type(outputs).__name__}"


def anchor(outputs: Any) -> Tensor:
    """Return zero, with the graph of all outputs behind it: for a pass whose gradient counts nothing.

    Not through the loss, which may be 0 / 0. Raises TrainingError where there is nothing else.
    """
    found = [tensor for tensor in tensors_in(outputs) if tensor.ndim and tensor.requires_grad]
    if not found:
        raise TrainingError(
            "a worker has nothing to count in this batch, and the model returns nothing but its loss: have it return "
            "its predictions too, or give every batch something to count"
        )
    return torch.stack([tensor.sum() * 0.0 for tensor in found]).sum() if len(found) > 1 else found[0].sum() * 0.0
