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

import torch.nn.functional as F
from torch import Tensor, nn

from cordee.core.components import Use, bind, resolve


@dataclass(frozen=True)
class LossFunction:
    """`mean(outputs, targets)` is a scalar; `count(targets)` is how many items that mean is over."""

    mean: Callable[[Tensor, Tensor], Tensor]
    count: Callable[[Tensor], int]


def count_samples(targets: Tensor) -> int:
    return len(targets)


def cross_entropy(*, label_smoothing: float = 0.0, ignore_index: int = -100) -> LossFunction:
    """Classes are the last dimension of the outputs; sequences count each token but the ignored ones."""

    def mean(outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.ndim > 2:
            outputs, targets = outputs.flatten(0, -2), targets.flatten()
        return F.cross_entropy(outputs, targets, label_smoothing=label_smoothing, ignore_index=ignore_index)

    def count(targets: Tensor) -> int:
        # A single label per sample is never ignored (labels are checked against the classes on loading).
        return len(targets) if targets.ndim == 1 else int((targets != ignore_index).sum())

    return LossFunction(mean, count)


def _elementwise(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], LossFunction]:
    def build() -> LossFunction:
        def mean(outputs: Tensor, targets: Tensor) -> Tensor:
            # (N, 1) against (N,) would broadcast to (N, N) without a word.
            aligned = outputs.squeeze(-1) if outputs.ndim == targets.ndim + 1 else outputs
            return function(aligned, targets.to(aligned.dtype))

        return LossFunction(mean, count_samples)

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
        return LossFunction(bind("loss", target, part.args)(), count_samples)
    if isinstance(target, (LossFunction, nn.Module)):
        return target if isinstance(target, LossFunction) else LossFunction(target, count_samples)
    return LossFunction(bind("loss", target, part.args, _first_two(target)), count_samples)


def _first_two(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the names of the parameters that outputs and targets are passed to, marked as given by us."""
    names = [p.name for p in inspect.signature(function).parameters.values()][:2]
    return dict.fromkeys(names, inspect.Parameter.empty)
