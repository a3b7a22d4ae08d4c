"""Optimizers that update each element by itself, and so work on slices of parameters as on the whole."""

from __future__ import annotations

import torch
from torch import nn

from cordee.compute import OptimizerRecipe
from cordee.core.errors import JobError

_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)


def require_elementwise(recipe: OptimizerRecipe, model: nn.Module, strategy: str) -> None:
    """Raise JobError for an optimizer that would compute something else on slices."""
    optimizer = recipe.make(model.named_parameters())
    if type(optimizer) not in _ELEMENTWISE:
        known = ", ".join(sorted(cls.__name__.lower() for cls in _ELEMENTWISE))
        raise JobError(
            f"optimizer '{type(optimizer).__name__}' may look at whole parameters, and strategy '{strategy}' gives "
            f"workers slices of them: use one of {known}, or strategy.name = 'data_parallel' or 'pipeline'"
        )
