"""`single`: one worker has all the data and all the parameters. The truth that others are measured against."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from cordee.checkpoint import State, load_model_state, load_optimizer_state, model_state, optimizer_state
from cordee.cluster import Team
from cordee.compute import Computation, Loss, OptimizerRecipe, clip_gradients
from cordee.core import Batch, Job
from cordee.core.errors import JobError, TrainingError
from cordee.strategies.strategy import Requirements, Update


class Single:
    """Plain training in one process."""

    model: nn.Module
    _optimizer: Optimizer
    _recipe: OptimizerRecipe

    def __init__(self, computation: Computation, clip_norm: float) -> None:
        self._computation = computation
        self._clip_norm = clip_norm

    def requirements(self, job: Job) -> Requirements:
        if job.strategy.workers != 1:
            raise JobError(f"strategy 'single' has one worker, the job has {job.strategy.workers}: set workers = 1")
        return Requirements(num_workers=1)

    def setup(self, model: nn.Module, recipe: OptimizerRecipe, team: Team) -> None:
        self.model = model.to(self._computation.device)
        self._recipe = recipe
        self._optimizer = recipe.make(self.model.named_parameters())

    def forward_backward(self, microbatches: Sequence[Batch], *, measure: bool) -> Loss:
        count = self._computation.loss.count
        total_count = sum(count(batch.targets) for batch in microbatches)
        return self._computation.forward_backward(self.model, microbatches, total_count=total_count, measure=measure)

    def update(self, step: int) -> Update:
        norm = None
        if self._clip_norm:
            norm = clip_gradients(self.model.parameters(), self._clip_norm)
            if not math.isfinite(norm):  # scaling by it would make every weight NaN
                raise TrainingError(f"the norm of the gradient is {norm} at step {step + 1}: lower optimizer.lr")
        lr = self._recipe.set_rate(self._optimizer, step)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return Update(lr, norm)

    def state_dict(self) -> State:
        return State.join(
            model=State(model_state(self.model), {}), optimizer=optimizer_state(self._optimizer, self.model)
        )

    def load_state_dict(self, state: State) -> None:
        load_model_state(self.model, state.part("model").tensors)
        load_optimizer_state(self._optimizer, self.model, state.part("optimizer"))
