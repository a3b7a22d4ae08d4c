"""What a model is trained to make small.

A loss here is the *mean* over what it counts (samples, or tokens), together with how many it counted. The
count is what makes gradient accumulation and unequal workers equal to the whole batch: parts are weighted
by it, never averaged as if they were alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cordee.core.components import Use, bind, construct, name_of, resolve
from cordee.core.errors import JobError


@dataclass(frozen=True)
class LossFunction:
    """`mean(outputs, targets)` is a scalar; `count(targets)` is how many items that mean is over."""

    mean: Callable[[Tensor, Tensor], Tensor]
    count: Callable[[Tensor], int]
    ignored: int | None = None  # a class that neither the mean nor the accuracy takes in


def count_items(targets: Tensor) -> int:
    """Return the number of labels, which is that of tokens in sequences; numbers count once per sample."""
    return len(targets) if targets.is_floating_point() else targets.numel()


def cross_entropy(*, label_smoothing: float = 0.0, ignore_index: int = -100) -> LossFunction:
    """Classes are the last dimension of the outputs; sequences count each token but the ignored ones."""

    def mean(outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.ndim > 2:
            outputs, targets = outputs.flatten(0, -2), targets.flatten()
        return F.cross_entropy(outputs, targets, label_smoothing=label_smoothing, ignore_index=ignore_index)

    ignored = ignore_index if ignore_index >= 0 else None

    def count(targets: Tensor) -> int:
        # A single label per sample is checked against the classes on loading, so it is not negative.
        if targets.ndim == 1 and ignored is None:
            return len(targets)
        return int((targets != ignore_index).sum())

    return LossFunction(mean, count, ignored)


def _elementwise(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], LossFunction]:
    def build() -> LossFunction:
        def mean(outputs: Tensor, targets: Tensor) -> Tensor:
            # (N, 1) against (N,) would broadcast to (N, N) without a word.
            outputs = outputs.squeeze(-1) if outputs.ndim == targets.ndim + 1 else outputs
            targets = targets.squeeze(-1) if targets.ndim == outputs.ndim + 1 else targets
            if outputs.shape != targets.shape:
                raise ValueError("this loss compares number by number, so the shapes must be the same")
            # Under bf16 the outputs have 8 bits of precision and the targets 24: the difference keeps them.
            dtype = torch.promote_types(outputs.dtype, targets.dtype)
            return function(outputs.to(dtype), targets.to(dtype))

        return LossFunction(mean, count_items)

    return build


BUILTIN_LOSSES: dict[str, Callable[..., LossFunction]] = {
    "cross_entropy": cross_entropy,
    "mse": _elementwise(F.mse_loss),
    "l1": _elementwise(F.l1_loss),
    "binary_cross_entropy": _elementwise(F.binary_cross_entropy_with_logits),
}


def make_loss(part: Use, python_path: Sequence[str] = ()) -> LossFunction:
    """Return the loss a job names.

    A user's own is a function (outputs, targets) -> mean over samples, or a class of such modules
    ("torch.nn:SmoothL1Loss").
    """
    target = resolve("loss", part.use, BUILTIN_LOSSES, python_path=python_path)
    if target in BUILTIN_LOSSES.values():
        built: LossFunction = bind("loss", target, part.args)()
        return built
    if inspect.isclass(target):
        made = construct("loss", part.use, bind("loss", target, part.args))
        if not callable(made):
            raise JobError(f"loss.use = {_name(part)!r} makes a {type(made).__name__}, which cannot be called")
        return LossFunction(made, count_items)
    if isinstance(target, nn.Module):
        if part.args:
            raise JobError("loss: a module that is already built takes no settings; give its class instead")
        return LossFunction(target, count_items)
    return LossFunction(bind("loss", target, part.args, _first_two(target)), count_items)


def _first_two(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the names of the parameters that outputs and targets are passed to, marked as given by us."""
    try:
        names = list(inspect.signature(function).parameters)[:2]
    except (TypeError, ValueError):  # a builtin without a signature
        return {}
    return dict.fromkeys(names, inspect.Parameter.empty)


def _name(part: Use) -> str:
    return part.use if isinstance(part.use, str) else name_of(part.use)
