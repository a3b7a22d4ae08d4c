"""Arrays of the user's as a source: which types they become, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cordee.core.errors import DataError
from cordee.data.source import ArraySource


def source_of_arrays(inputs: Any, targets: Any, what: str) -> ArraySource:
    """Return the source of a pair (inputs, targets), samples first.

    Anything `numpy.asarray` takes will do. Inputs of bytes stay bytes and are given to the model as numbers
    from 0 to 1; other whole numbers stay whole (tokens); the rest becomes float32. Targets of whole numbers
    are classes, int64, and one column of them is flattened; other targets are float32, for regression.
    `what` names the split in the DataError that everything else is answered with.
    """
    x = _tensor(inputs, f"the inputs of {what}")
    y = ready_targets(_tensor(targets, f"the targets of {what}"))
    if x.dim() == 0 or y.dim() == 0:
        raise DataError(f"the {'inputs' if x.dim() == 0 else 'targets'} of {what} are a single number, not an array")
    if len(x) != len(y):
        raise DataError(f"{what} has {len(x)} inputs but {len(y)} targets: each input needs one target")
    if len(x) == 0:
        raise DataError(f"{what} has no samples")
    if x.dim() == 1:
        raise DataError(
            f"the inputs of {what} have the shape {tuple(x.shape)}, one number per sample: "
            "give them a feature dimension, x.reshape(-1, 1)"
        )
    x = x if x.dtype == torch.uint8 else ready_inputs(x)
    for part, values in (("input", x), ("target", y)):
        check_finite(values, f"{part} of {what}")
    return ArraySource(x, y)


def ready_inputs(inputs: Tensor) -> Tensor:
    """Return inputs in the type a model takes: bytes as 0 to 1, tokens as int64, the rest as float32."""
    if inputs.dtype == torch.uint8:
        return inputs.to(torch.float32).mul_(1 / 255)
    return inputs.to(torch.int64 if _is_whole(inputs.dtype) else torch.float32)


def ready_targets(targets: Tensor) -> Tensor:
    """Return targets in the type a loss takes: classes as int64, without a column of its own, else float32."""
    if not (_is_whole(targets.dtype) or targets.dtype == torch.bool):
        return targets.to(torch.float32)
    if targets.dim() == 2 and targets.shape[1] == 1:
        targets = targets.squeeze(1)
    return targets.to(torch.int64)


def check_finite(values: Tensor, what: str) -> None:
    """Raise DataError, with the first sample it concerns, if a value is infinite or not a number."""
    if not values.is_floating_point() or bool(torch.isfinite(values).all()):
        return
    first = int((~torch.isfinite(values)).reshape(len(values), -1).any(1).nonzero()[0, 0])
    raise DataError(f"{what}: sample {first} has a value that is infinite or not a number; remove or fix such samples")


def check_classes(
    targets: Tensor,
    num_classes: int,
    what: str,
    samples: Sequence[int] | None = None,
    ignored: int | None = None,
) -> None:
    """Raise DataError, with the first position and value it concerns, for a class not in [0, num_classes).

    `samples` are the positions to name where rows of `targets` are not the positions themselves; `ignored` is a label
    that the loss does not count, which is no class.
    """
    if targets.numel() == 0:
        return
    lowest, highest = (int(bound) for bound in torch.aminmax(targets))
    if lowest >= 0 and highest < num_classes:
        return
    rows = targets.reshape(len(targets), -1)
    is_wrong = (rows < 0) | (rows >= num_classes)
    if ignored is not None:
        is_wrong &= rows != ignored
        if not is_wrong.any():
            return
    position, column = (int(index) for index in is_wrong.nonzero()[0])
    value, name = int(rows[position, column]), position if samples is None else samples[position]
    raise DataError(
        f"{what}: the label at position {name} is {value}, "
        f"but labels must be from 0 to {num_classes - 1} ({num_classes} classes)"
    )


def count_classes(targets: Tensor, what: str, ignored: int | None = None) -> int:
    """Return one more than the largest label; DataError for a negative one, but the ignored."""
    highest = int(targets.max())
    check_classes(targets, max(highest, 0) + 1, what, ignored=ignored)
    return highest + 1


def find_missing(targets: Tensor, num_classes: int, names: Sequence[Any] | None = None) -> str | None:
    """Return which classes no sample has, in words; None if there are none, or if samples have several labels."""
    if targets.dim() != 1:  # of the words of a vocabulary some are always missing
        return None
    present = torch.bincount(targets[targets >= 0], minlength=num_classes)[:num_classes]
    missing = [int(label) for label in (present == 0).nonzero()[:, 0]]
    if not missing:
        return None
    shown = [f"{one} ({str(names[one])!r})" if names is not None and one < len(names) else str(one) for one in missing]
    return ", ".join(shown[:8]) + (", …" if len(shown) > 8 else "")


def _tensor(values: Any, what: str) -> Tensor:
    if isinstance(values, Tensor):
        tensor = values.detach().cpu()
        if tensor.is_sparse or tensor.is_complex() or tensor.is_quantized:
            raise DataError(f"{what} are a tensor of the kind {tensor.layout}, {tensor.dtype}; give a plain one")
        return tensor if tensor.dtype in _HELD else tensor.to(_held_type(tensor.dtype))
    try:
        array = np.asarray(values)
    except Exception as error:
        raise DataError(f"{what} cannot be read as an array: {error}") from error
    if array.dtype.kind not in "biuf":
        raise DataError(
            f"{what} have the type {array.dtype}, which is not numbers; rows of one length, of numbers, please"
        )
    if array.dtype.kind in "iu" and array.dtype != np.uint8:
        array = array.astype(np.int64)
    elif array.dtype.kind == "f":
        array = array.astype(np.float32)
    # A copy where torch could not share the memory: read-only, reversed, or not in this machine's byte order.
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


_HELD = (torch.uint8, torch.int64, torch.float32, torch.bool)


def _held_type(dtype: torch.dtype) -> torch.dtype:
    return torch.int64 if _is_whole(dtype) else torch.float32


def _is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
