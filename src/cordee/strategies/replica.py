"""What strategies share in which a worker has all parameters and their optimizer."""

from __future__ import annotations

import math

from torch import nn
from torch.optim import Optimizer

from cordee.checkpoint import State, load_model_state, load_optimizer_state, model_state, optimizer_state
from cordee.compute import OptimizerRecipe, clip_gradients
from cordee.core import Batch
from cordee.core.errors import TrainingError
from cordee.strategies.strategy import Update


class Replica:
    """A whole model and its optimizer: takes steps with the gradients it finds, saves and loads."""

    model: nn.Module
    _optimizer: Optimizer
    _recipe: OptimizerRecipe

    def __init__(self, clip_norm: float) -> None:
        self._clip_norm = clip_norm

    def check(self, model: nn.Module, recipe: OptimizerRecipe, example: Batch) -> None:
        pass  # what can be trained at all can be trained as a whole

    def _adopt(self, model: nn.Module, recipe: OptimizerRecipe) -> None:
        self.model = model
        model.zero_grad()  # of a step that was dropped, when the team was formed anew
        self._parameters = list(model.parameters())
        self._recipe = recipe
        self._optimizer = recipe.make(model.named_parameters())

    def update(self, step: int) -> Update:
        norm = None
        if self._clip_norm:
            norm = clip_gradients(self.model.parameters(), self._clip_norm)
            if not math.isfinite(norm):  # scaling by it would make every weight NaN
                raise TrainingError(f"the norm of the gradient is {norm} at step {step + 1}: lower optimizer.lr")
        lr = self._recipe.set_rate(self._optimizer, step)
        self._optimizer.step()
        self._drop_gradients()
        return Update(lr, norm)

    def skip(self, step: int) -> Update:
        self._drop_gradients()
        return Update(self._recipe.set_rate(self._optimizer, step))

    def _drop_gradients(self) -> None:
        # Of all parameters: an optimizer of the user's own may leave some out, and clipping counts theirs too.
        for parameter in self._parameters:
            parameter.grad = None

    def state_dict(self) -> State:
        return State.join(
            model=State(model_state(self.model), {}), optimizer=optimizer_state(self._optimizer, self.model)
        )

    def load_state_dict(self, state: State) -> None:
        load_model_state(self.model, state.part("model").tensors)
        load_optimizer_state(self._optimizer, self.model, state.part("optimizer"))
