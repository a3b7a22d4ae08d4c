"""The data-parallel strategy: its settings, and how it fits the protocol."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

from torch import nn

from cordee.cluster import Team
from cordee.communication.exchange import broadcast
from cordee.compute import Computation, Loss, OptimizerRecipe, Votes
from cordee.core import Batch, Job
from cordee.core.errors import JobError
from cordee.core.fault_points import reach
from cordee.core.settings import Section
from cordee.core.shards import share_shards
from cordee.strategies.data_parallel.batch_norm import SyncedBatchNorm, synchronise_batch_norms
from cordee.strategies.data_parallel.reducers import AloneReducer, DdpReducer, FlatReducer, Reducer
from cordee.strategies.replica import Replica
from cordee.strategies.shards import ShardReducer
from cordee.strategies.shared_buffers import SharedBuffers, buffers_of
from cordee.strategies.strategy import Requirements, Update, require_samples


class DataParallelSettings(Section, frozen=True, kw_only=True):
    """Keys of [strategy] that belong to data_parallel."""

    # local: each worker's own statistics, the first worker's are kept; average: the mean of all workers' is
    # kept, after each step; sync: statistics of the whole batch, as one worker would compute them, at two exchanges
    # a layer.
    batch_norm: Literal["local", "average", "sync"] = "average"
    compression: Literal["none", "fp16", "bf16", "powersgd"] = "none"  # of gradients on their way
    reducer: Literal["auto", "flat", "ddp"] = "auto"  # auto: flat on CPUs, ddp on GPUs and to compress


class DataParallel(Replica):
    """Every worker computes its share of each batch; all take the same optimizer step."""

    _reducer: Reducer
    _team: Team

    def __init__(self, job: Job, settings: DataParallelSettings, computation: Computation) -> None:
        super().__init__(job.training.clip_norm)
        self._nominal_count = job.training.batch_size
        self._num_shards = job.training.num_shards
        self._settings = settings
        self._computation = computation
        self._has_named_unused = False

    def requirements(self, job: Job) -> Requirements:
        workers = job.strategy.workers
        require_samples(job, workers)
        if self._settings.reducer == "flat" and self._settings.compression != "none":
            raise JobError("strategy.compression works with strategy.reducer = 'ddp' (or 'auto'), not 'flat'")
        if self._num_shards is not None:
            self._check_reproducible(workers, self._num_shards)
        return Requirements(num_workers=workers, num_data_shards=workers, is_elastic=True)

    def setup(self, model: nn.Module, recipe: OptimizerRecipe, team: Team, example: Batch) -> None:
        self._team = team
        self._reducer = AloneReducer(model, self._computation)  # lets go of the last team's, and of DDP's hooks
        has_synced = False
        if team.num_workers > 1 and self._settings.batch_norm == "sync":
            has_synced = synchronise_batch_norms(model)
        self._adopt(model.to(self._computation.device), recipe)
        if self._num_shards is not None:
            if team.num_workers > 1:
                self._share_weights()
            shards = share_shards(self._num_shards, team.worker_index, team.num_workers)
            self._reducer = ShardReducer(self.model, self._computation, team, shards, self._nominal_count)
            return
        if team.num_workers == 1:
            self._reducer = AloneReducer(self.model, self._computation)
            return
        self._share_weights()
        buffers = SharedBuffers(
            buffers_of(self.model, left_out=SyncedBatchNorm),
            is_first=team.is_first,
            keeps_first=self._settings.batch_norm == "local",
        )
        if self._uses_ddp():
            self._reducer = DdpReducer(
                self.model,
                self._computation,
                self._nominal_count,
                team,
                buffers,
                compression=self._settings.compression,
            )
        else:
            self._reducer = FlatReducer(
                self.model, self._computation, self._nominal_count, buffers, has_synced=has_synced
            )

    def _share_weights(self) -> None:
        """Give every member the first one's weights, in place. Collective."""
        reach("setup.begun")
        broadcast([*self.model.parameters(), *self.model.buffers()])
        reach("setup.shared")

    def forward_backward(self, microbatches: Sequence[Batch], *, measure: bool, vote: Callable[[], Votes]) -> Loss:
        return self._reducer.step(microbatches, measure=measure, vote=vote)

    def update(self, step: int) -> Update:
        warning = self._name_unused()
        update = super().update(step)
        return dataclasses.replace(update, warning=warning) if warning else update

    def consolidate(self) -> None:
        pass  # buffers agree after every step

    def _check_reproducible(self, workers: int, num_shards: int) -> None:
        if workers > num_shards:
            raise JobError(
                f"training.shards = {num_shards} has no shard for each of {workers} workers: "
                f"set shards to at least {workers}, or use fewer workers"
            )
        fixed = {"batch_norm": ("average",), "compression": ("none",), "reducer": ("auto", "flat")}
        for key, allowed in fixed.items():
            if (value := getattr(self._settings, key)) not in allowed:
                raise JobError(
                    f"strategy.{key} = '{value}' depends on the number of workers, which training.reproducible = true "
                    f"rules out: leave strategy.{key} out"
                )

    def _uses_ddp(self) -> bool:
        if self._settings.reducer != "auto":
            return self._settings.reducer == "ddp"
        return self._computation.device.type == "cuda" or self._settings.compression != "none"

    def _name_unused(self) -> str | None:
        if self._has_named_unused:
            return None
        self._has_named_unused = True
        if names := self._reducer.unused():
            return f"no worker has a gradient for {', '.join(names)} in the first step: unused, they stay as they are"
        return None
