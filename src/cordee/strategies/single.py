"""`single`: one worker has all the data and all the parameters. The truth that others are measured against."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import nn
from torch.optim import Optimizer

from cordee.checkpoint import State, load_model_state, load_optimizer_state, model_state, optimizer_state
from cordee.cluster import Team
from cordee.compute import Computation, Loss, OptimizerRecipe, Votes, clip_gradients
from cordee.compute.averaging import swap_averages
from cordee.compute.loss_scale import unscale
from cordee.core import Batch, Job
from cordee.core.errors import JobError, TrainingError
from cordee.core.settings import Section
from cordee.core.shards import share_shards
from cordee.strategies.shards import ShardReducer
from cordee.strategies.strategy import Requirements, Update


class Replica:
    """A whole model and its optimizer, which strategies share: steps with the gradients it finds, saves and loads."""

    model: nn.Module
    _reducer: Reducer
    _optimizer: Optimizer
    _recipe: OptimizerRecipe
    _computation: Computation

    def __init__(self, clip_norm: float) -> None:
        self._clip_norm = clip_norm

    def check(self, model: nn.Module, recipe: OptimizerRecipe, example: Batch) -> None:
        pass  # what can be trained at all can be trained as a whole

    def _adopt(self, model: nn.Module, recipe: OptimizerRecipe) -> None:
        self.model = model
        model.zero_grad()  # of a step that was dropped, when the team was formed again
        self._parameters = list(model.parameters())
        self._recipe = recipe
        self._optimizer = recipe.make(model.named_parameters())

    def forward_backward(self, microbatches: Sequence[Batch], *, measure: bool, vote: Callable[[], Votes]) -> Loss:
        return self._reducer.step(microbatches, measure=measure, vote=vote)

    def update(self, step: int) -> Update:
        if (scale := self._computation.scale) is not None:
            is_sound = unscale([p.grad for p in self._parameters if p.grad is not None], scale)
            scale.record(is_sound=is_sound)
            if not is_sound:
                return self.skip(step)
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

    def swap_averages(self) -> None:
        swap_averages(self._optimizer)

    def consolidate(self) -> None:
        pass  # everything is here, and buffers agree after every step

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


class Reducer(Protocol):
    """Computes a step and leaves the gradient of the whole batch in `.grad` on every worker. Collective."""

    def step(self, parts: Sequence[Batch], *, measure: bool, vote: Callable[[], Votes]) -> Loss: ...


class AloneReducer:
    """One worker: there is nobody to sum with."""

    def __init__(self, model: nn.Module, computation: Computation) -> None:
        self._model, self._computation = model, computation

    def step(self, parts: Sequence[Batch], *, measure: bool, vote: Callable[[], Votes]) -> Loss:
        total_count = sum(self._computation.loss.count_batch(part) for part in parts)
        loss = self._computation.forward_backward(self._model, parts, total_count=total_count, measure=measure)
        return dataclasses.replace(loss, votes=vote())


class SingleSettings(Section, frozen=True, kw_only=True):
    """`single` has no settings of its own."""


class Single(Replica):
    """Plain training in one process."""

    def __init__(self, job: Job, settings: SingleSettings, computation: Computation) -> None:
        super().__init__(job.training.clip_norm)
        self._computation = computation
        self._nominal_count = job.training.batch_size
        self._num_shards = job.training.num_shards

    def requirements(self, job: Job) -> Requirements:
        if job.strategy.workers != 1:
            raise JobError(
                f"strategy 'single' has one worker, the job has {job.strategy.workers}: "
                "set strategy.workers = 1, or strategy.name = 'data_parallel'"
            )
        return Requirements(num_workers=1, num_data_shards=1, cuts_batches=self._num_shards is not None)

    def setup(self, model: nn.Module, recipe: OptimizerRecipe, team: Team, example: Batch) -> None:
        self._adopt(model.to(self._computation.device), recipe)
        self._reducer = AloneReducer(self.model, self._computation)
        if self._num_shards is not None:
            shards = share_shards(self._num_shards, 0, 1)
            self._reducer = ShardReducer(self.model, self._computation, team, shards, self._nominal_count)
