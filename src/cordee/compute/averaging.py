"""A moving average of the weights (EMA), kept as a part of the optimizer's state.

So it is cut, saved, loaded and handed on wherever that state is, for every strategy. The formula is that of torch's
`AveragedModel` with `get_ema_multi_avg_fn`; the average begins with the weights before the first step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

KEY = "weight_average"  # in the state of each parameter


def keep_averages(optimizer: Optimizer, decay: float) -> None:
    """Let each step of the optimizer move the average: `decay` of what it was, and the rest of the new weights."""

    first: list[tuple[Tensor, Tensor]] = []  # parameters that take their first step, and what they were before

    @torch.no_grad()
    def keep(stepped: Optimizer, args: Any, kwargs: Any) -> None:
        first[:] = [
            (parameter, parameter.detach().clone())
            for group in stepped.param_groups
            for parameter in group["params"]
            if parameter.grad is not None and KEY not in stepped.state.get(parameter, ())
        ]

    @torch.no_grad()
    def move(stepped: Optimizer, args: Any, kwargs: Any) -> None:
        # Not before the step: to an optimizer, a state that is not empty is one that it has made itself.
        for parameter, before in first:
            stepped.state[parameter][KEY] = before
        first.clear()
        averages: list[Tensor] = []
        weights: list[Tensor] = []
        for group in stepped.param_groups:
            for parameter in group["params"]:
                state = stepped.state.get(parameter)
                if state is not None and KEY in state:
                    averages.append(state[KEY])
                    weights.append(parameter.detach())
        if averages:
            torch._foreach_lerp_(averages, weights, 1.0 - decay)

    optimizer.register_step_pre_hook(keep)
    optimizer.register_step_post_hook(move)


@torch.no_grad()
def swap_averages(optimizer: Optimizer) -> None:
    """Exchange weights and their averages. Local; the second call puts everything back, bit for bit."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            average = optimizer.state.get(parameter, {}).get(KEY)
            if average is not None:
                kept = parameter.detach().clone()
                parameter.copy_(average)
                average.copy_(kept)
