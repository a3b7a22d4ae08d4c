"""Hooks that a program has on the gradients of its parameters, and where they would change the result."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cordee.core.errors import ModelError

_SCALES = (1e-3, 1.0, 1e3)  # of the gradients that are tried: a limit may be at any of them
_TOLERANCE = 1e-3


def hooked_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that have hooks of `register_hook` or `register_post_accumulate_grad_hook`, by name."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    }


def refuse_uneven_hooks(model: nn.Module, how: str) -> None:
    """Raise ModelError for hooks that make something else of the parts of a gradient than of their sum.

    `how` says by what batches are computed in parts. Hooks are called with random gradients to find out.
    """
    for name, parameter in hooked_parameters(model).items():
        if parameter._post_accumulate_grad_hooks:
            found = "it has a hook that runs after the gradient was added up (register_post_accumulate_grad_hook)"
        elif not all(_is_additive(parameter, scale) for scale in _SCALES):
            found = "its hook makes something else of two parts of a gradient than of their sum (a limit, or a noise)"
        else:
            continue
        raise ModelError(
            f"parameter '{name}' cannot be trained with {how}, which computes a batch in parts: {found}. Remove the "
            "hook; training.clip_norm limits gradients, the optimizer's weight_decay shrinks weights"
        )


def _is_additive(parameter: nn.Parameter, scale: float) -> bool:
    """Whether the hooks of a parameter give for a sum of two gradients the sum of what they give for each."""
    draws = torch.Generator().manual_seed(0)
    one, other = (scale * torch.randn(parameter.shape, generator=draws).to(parameter) for _ in range(2))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        apart, together = _hooked(parameter, one) + _hooked(parameter, other), _hooked(parameter, one + other)
    return torch.allclose(apart, together, rtol=_TOLERANCE, atol=_TOLERANCE * scale)


def _hooked(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    for hook in (parameter._backward_hooks or {}).values():
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient
