"""The outer step: what workers, or clients, changed while they trained alone is the gradient of an outer optimizer.

A *difference* is what a member's parameters are after it trained alone, minus what all members began with. The mean
of the differences, with its sign turned, is the gradient of the outer optimizer at that beginning. Without an outer
optimizer the mean is added as it is, which makes the parameters the mean of the members' parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cordee.checkpoint import State, load_optimizer_state, optimizer_state
from cordee.compute.optimizers import make_optimizer_recipe
from cordee.compute.schedules import constant
from cordee.core.errors import CheckpointError
from cordee.core.references import Use

SECTION = "strategy.outer"


class OuterStep:
    """The parameters that all members begin with, and the optimizer that takes differences from them. Local.

    Every member that takes the same steps with the same means has the same bits.
    """

    def __init__(
        self,
        start: Mapping[str, Tensor],
        outer: Mapping[str, Any] | Use | None = None,
        *,
        python_path: Sequence[str] = (),
    ) -> None:
        """Begin with a copy of `start`. `outer` names an optimizer and its settings, such as
        `{"use": "sgd", "lr": 0.7, "momentum": 0.9, "nesterov": True}`; empty or None adds the mean.

        Raises JobError for an optimizer that is not known or refuses its settings.
        """
        self._start = {name: nn.Parameter(tensor.detach().clone()) for name, tensor in start.items()}
        self._optimizer: torch.optim.Optimizer | None = None
        if outer:
            part = Use.coerce(SECTION, outer)
            recipe = make_optimizer_recipe(
                part, constant(), lr_scale="none", num_shares=1, python_path=python_path, section=SECTION
            )
            self._optimizer = recipe.make(self._start.items())

    @property
    def start(self) -> dict[str, Tensor]:
        """What members begin with now. Changed in place by `step`: copy what is to stay."""
        return {name: parameter.detach() for name, parameter in self._start.items()}

    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters by name: the optimizer's state is kept by these names."""
        yield from self._start.items()

    @torch.no_grad()
    def step(self, means: Mapping[str, Tensor]) -> None:
        """Take a step with the mean differences. A parameter that is missing from `means` stays as it is.

        `means` may be overwritten.
        """
        if self._optimizer is None:
            for name, mean in means.items():
                self._start[name].add_(mean)
            return
        for name, mean in means.items():
            self._start[name].grad = mean.neg_().view_as(self._start[name])
        self._optimizer.step()
        for parameter in self._start.values():
            parameter.grad = None

    @torch.no_grad()
    def set_start(self, start: Mapping[str, Tensor]) -> None:
        """Have members begin with a copy of `start`; the optimizer's state stays."""
        for name, tensor in start.items():
            self._start[name].copy_(tensor)

    def state_dict(self) -> State:
        """Return the optimizer's state, which shares its memory; empty without an optimizer."""
        return State({}, {}) if self._optimizer is None else optimizer_state(self._optimizer, self)

    def load_state_dict(self, state: State) -> None:
        """Continue with the optimizer's `state`; an empty one begins again, with nothing accumulated.

        Raises CheckpointError for the state of another optimizer.
        """
        if self._optimizer is None:
            if state.values:
                raise CheckpointError(
                    f"the checkpoint has the state of an outer optimizer ({state.values.get('optimizer')}), and the "
                    f"job has none: set {SECTION} as it was"
                )
            return
        if state.values:
            load_optimizer_state(self._optimizer, self, state)
