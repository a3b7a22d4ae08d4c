"""`single`: one worker has all the data and all the parameters. The truth that others are measured against."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from torch import nn

from cordee.cluster import Team
from cordee.compute import Computation, Loss, OptimizerRecipe, Votes
from cordee.core import Batch, Job
from cordee.core.errors import JobError
from cordee.core.settings import Section
from cordee.core.shards import share_shards
from cordee.strategies.replica import Replica
from cordee.strategies.shards import ShardReducer
from cordee.strategies.strategy import Requirements


class SingleSettings(Section, frozen=True, kw_only=True):
    """`single` has no settings of its own."""


class Single(Replica):
    """Plain training in one process."""

    def __init__(self, job: Job, settings: SingleSettings, computation: Computation) -> None:
        super().__init__(job.training.clip_norm)
        self._computation = computation
        self._nominal_count = job.training.batch_size
        self._num_shards = job.training.num_shards
        self._reducer: ShardReducer | None = None

    def requirements(self, job: Job) -> Requirements:
        if job.strategy.workers != 1:
            raise JobError(
                f"strategy 'single' has one worker, the job has {job.strategy.workers}: "
                "set strategy.workers = 1, or strategy.name = 'data_parallel'"
            )
        return Requirements(
            num_workers=1, num_data_shards=1, cuts_batches=self._num_shards is not None, is_elastic=True
        )

    def setup(self, model: nn.Module, recipe: OptimizerRecipe, team: Team, example: Batch) -> None:
        self._adopt(model.to(self._computation.device), recipe)
        if self._num_shards is not None:
            shards = share_shards(self._num_shards, 0, 1)
            self._reducer = ShardReducer(self.model, self._computation, team, shards, self._nominal_count)

    def forward_backward(self, microbatches: Sequence[Batch], *, measure: bool, vote: Callable[[], Votes]) -> Loss:
        if self._reducer is not None:
            return self._reducer.step(microbatches, measure=measure, vote=vote)
        count = self._computation.loss.count
        total_count = sum(count(batch.targets) for batch in microbatches)
        loss = self._computation.forward_backward(self.model, microbatches, total_count=total_count, measure=measure)
        return dataclasses.replace(loss, votes=vote())

    def consolidate(self) -> None:
        pass
