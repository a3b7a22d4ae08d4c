"""`data_parallel`: a share of the data and a full copy of the parameters each; gradients summed every step."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cordee.checkpoint import State
from cordee.cluster import Team
from cordee.communication.compressed_sum import CompressedExchange, MakeFeedback
from cordee.communication.compression import CompressionSettings, ErrorFeedback
from cordee.communication.exchange import GradientExchange, OverlappedExchange, broadcast, spans_hosts
from cordee.compute import Computation, Loss, OptimizerRecipe, Votes, reached_parameters
from cordee.compute.outputs import anchor
from cordee.core import Batch, Job
from cordee.core.errors import JobError
from cordee.core.fault_points import reach
from cordee.core.settings import Section
from cordee.core.shards import share_shards
from cordee.strategies.buffers import SharedBuffers, SyncedBatchNorm, buffers_of, no_samples, synchronise_batch_norms
from cordee.strategies.shards import ShardReducer
from cordee.strategies.single import AloneReducer, Replica
from cordee.strategies.strategy import Requirements, Update, require_samples


class DataParallelSettings(Section, frozen=True, kw_only=True):
    """Keys of [strategy] that belong to data_parallel."""

    # local: each worker's own statistics, the first worker's are kept; average: the mean of all workers' is
    # kept, after each step; sync: statistics of the whole batch, as one worker would compute them, at two exchanges
    # a layer.
    batch_norm: Literal["local", "average", "sync"] = "average"
    # Of gradients on their way: a name, or a table like { use = "topk", share = 0.01 } (docs/reference/local-sgd.md).
    compression: str | dict[str, Any] = "none"
    # auto: flat on CPUs of one host and to compress, overlapped between hosts, ddp on GPUs
    reducer: Literal["auto", "flat", "overlapped", "ddp"] = "auto"
    segment_bytes: int = 1 << 18  # overlapped: gradients of at least so many bytes are exchanged at once


class DataParallel(Replica):
    """Every worker computes its share of each batch; all take the same optimizer step."""

    def __init__(self, job: Job, settings: DataParallelSettings, computation: Computation) -> None:
        super().__init__(job.training.clip_norm)
        self._nominal_count = job.training.batch_size
        self._num_shards = job.training.num_shards
        self._settings = settings
        self._computation = computation
        self._has_named_unused = False
        self._compression = CompressionSettings.read("strategy.compression", settings.compression)
        self._residuals: list[ErrorFeedback] = []  # of each type of parameters: this worker's own, in any team
        self._saved_residuals: list[Tensor] = []

    def requirements(self, job: Job) -> Requirements:
        workers = job.strategy.workers
        require_samples(job, workers)
        reducer = self._settings.reducer
        if reducer in ("ddp", "overlapped") and self._compression.use != "none":
            raise JobError(f"strategy.compression works with strategy.reducer = 'flat' (or 'auto'), not '{reducer}'")
        if self._settings.segment_bytes < 1:
            raise JobError(f"strategy.segment_bytes = {self._settings.segment_bytes} must be at least 1")
        if reducer == "overlapped" and self._settings.batch_norm == "sync":
            raise JobError(
                "strategy.reducer = 'overlapped' exchanges during the backward pass, and so does strategy.batch_norm = "
                "'sync': set one of them to another value"
            )
        if self._computation.compiler is not None and (self._uses_ddp() or reducer == "overlapped"):
            raise JobError(
                "training.compile = true needs the exchange after the backward pass: set strategy.reducer = 'flat'"
            )
        if self._computation.compiler is not None and job.cluster.balance:
            raise JobError(
                "training.compile = true compiles for one size of batch, and cluster.balance = true changes that of "
                "each worker: remove one of them"
            )
        if self._num_shards is not None:
            self._check_reproducible(workers, self._num_shards)
        if job.cluster.balance and (self._uses_ddp() or self._settings.batch_norm == "sync"):
            raise JobError(
                "cluster.balance = true measures what each worker computes without waiting for others, and they wait "
                "within the passes with strategy.reducer = 'ddp' and batch_norm = 'sync': leave these out"
            )
        return Requirements(num_workers=workers, num_data_shards=workers)

    def setup(self, model: nn.Module, recipe: OptimizerRecipe, team: Team, example: Batch) -> None:
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
                example,
            )
        else:
            is_compressed = self._compression.use != "none"
            overlaps = self._settings.reducer == "overlapped"
            if self._settings.reducer == "auto":
                is_compiled = self._computation.compiler is not None
                overlaps = not has_synced and not is_compressed and not is_compiled and spans_hosts()
            if overlaps:
                self._reducer = OverlappedReducer(
                    self.model, self._computation, self._nominal_count, buffers, self._settings.segment_bytes
                )
            else:
                self._reducer = FlatReducer(
                    self.model,
                    self._computation,
                    self._nominal_count,
                    buffers,
                    example,
                    has_synced=has_synced,
                    make_feedback=self._make_feedback if is_compressed else None,
                )

    def _make_feedback(
        self, shapes: Sequence[Sequence[torch.Size]], dtypes: Sequence[torch.dtype]
    ) -> list[ErrorFeedback]:
        if not self._residuals:
            pairs = zip(shapes, dtypes, strict=True)
            self._residuals = [self._compression.feedback(own, dtype) for own, dtype in pairs]
        return self._residuals

    def consolidate(self) -> None:
        """Have the first worker know the sum of what compression left out on all. Collective."""
        self._saved_residuals = []
        if not isinstance(self._reducer, FlatReducer):
            return
        for feedback in self._residuals:
            total = feedback.zeros() if feedback.left is None else feedback.left.clone()
            dist.all_reduce(total)
            self._saved_residuals.append(total)

    def state_dict(self) -> State:
        saved = {f"sum.{number}": total for number, total in enumerate(self._saved_residuals)}
        state, residual = super().state_dict(), State.join(residual=State(saved, {}))
        return State({**state.tensors, **residual.tensors}, state.values)

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._saved_residuals = []
        if not isinstance(self._reducer, FlatReducer):
            return
        saved = state.part("residual").tensors
        for number, feedback in enumerate(self._residuals):
            # Of another strategy, or of another number of parameters: what it left out is not known by this order.
            if (total := saved.get(f"sum.{number}")) is not None and total.shape == feedback.zeros().shape:
                feedback.left = total.to(feedback.zeros()) / dist.get_world_size()  # gradients are added up

    def _share_weights(self) -> None:
        """Give every member the first one's weights, in place. Collective."""
        reach("setup.begun")
        broadcast([*self.model.parameters(), *self.model.buffers()])
        reach("setup.shared")

    def update(self, step: int) -> Update:
        self._saved_residuals = []
        warning = self._name_unused()
        update = super().update(step)
        return dataclasses.replace(update, warning=warning) if warning else update

    def _check_reproducible(self, workers: int, num_shards: int) -> None:
        if workers > num_shards:
            raise JobError(
                f"training.shards = {num_shards} has no shard for each of {workers} workers: "
                f"set shards to at least {workers}, or use fewer workers"
            )
        fixed: dict[str, tuple[object, ...]] = {
            "batch_norm": ("average",),
            "compression": ("none", {"use": "none"}),
            "reducer": ("auto", "flat"),
        }
        for key, allowed in fixed.items():
            if (value := getattr(self._settings, key)) not in allowed:
                raise JobError(
                    f"strategy.{key} = '{value}' depends on the number of workers, which training.reproducible = true "
                    f"rules out: leave strategy.{key} out"
                )

    def _uses_ddp(self) -> bool:
        if self._settings.reducer != "auto":
            return self._settings.reducer == "ddp"
        return self._computation.device.type == "cuda" and self._compression.use == "none"

    def _name_unused(self) -> str | None:
        if self._has_named_unused:
            return None
        self._has_named_unused = True
        if names := [name for name, p in self.model.named_parameters() if p.requires_grad and p.grad is None]:
            return f"no worker has a gradient for {', '.join(names)} in the first step: unused, they stay as they are"
        return None


# Three ways to sum gradients over the team; what goes in and comes out is the same.
#
# `FlatReducer` packs all gradients into one buffer and all-reduces it after the backward pass: one call a step, for
# CPUs, where computing and communicating share the cores anyway (docs/decisions/0003). `OverlappedReducer` begins
# during the backward pass, for workers with a network between them. `DdpReducer` is torch's
# DistributedDataParallel, which all-reduces in buckets during the backward pass: for GPUs.

NUM_EXTRAS = 7  # loss sum, count, correct, items, samples, and the two votes
COUNT_AT = 1


class TeamReducer(ABC):
    """Computes this worker's share of a step. A step that cannot be finished leaves nothing in the buffers."""

    def __init__(self, model: nn.Module, computation: Computation, nominal_count: int, buffers: SharedBuffers) -> None:
        self._model, self._computation, self._nominal_count = model, computation, nominal_count
        self._buffers = buffers

    def step(self, parts: Sequence[Batch], *, measure: bool, vote: Callable[[], Votes]) -> Loss:
        self._buffers.begin()
        try:
            local = self._compute(parts, measure)
            flags = self._buffers.flags(has_samples=local.num_samples > 0)
            totals = self._sum([*local.summands(), *vote(), *flags])
            self._buffers.agree(totals[NUM_EXTRAS:])
        except BaseException:
            self._buffers.undo()
            raise
        return Loss.from_totals(totals[:NUM_EXTRAS], has_accuracy=measure and self._computation.counts_classes)

    @abstractmethod
    def _compute(self, parts: Sequence[Batch], measure: bool) -> Loss:
        """Compute the gradient of this worker's parts."""

    @abstractmethod
    def _sum(self, extras: Sequence[float]) -> list[float]:
        """Return the extras summed over the team, and scale the summed gradient to the actual count. Collective."""


class FlatReducer(TeamReducer):
    """One all-reduce after the backward pass, for gradients and scalars together."""

    def __init__(
        self,
        model: nn.Module,
        computation: Computation,
        nominal_count: int,
        buffers: SharedBuffers,
        example: Batch,
        *,
        has_synced: bool,
        make_feedback: MakeFeedback | None = None,
    ) -> None:
        """`make_feedback` makes what compresses gradients, where that is asked for."""
        super().__init__(model, computation, nominal_count, buffers)
        self._join = EmptyShardPass(model, model, computation, example) if has_synced else None
        parameters, num_extras = list(model.parameters()), NUM_EXTRAS + buffers.num_flags
        self._exchange = (
            GradientExchange(parameters, num_extras)
            if make_feedback is None
            else CompressedExchange(parameters, num_extras, make_feedback)
        )

    def _compute(self, parts: Sequence[Batch], measure: bool) -> Loss:
        return self._computation.forward_backward(
            self._model, parts, total_count=self._nominal_count, measure=measure, join=self._join
        )

    def _sum(self, extras: Sequence[float]) -> list[float]:
        return self._exchange.reduce(extras, count_at=COUNT_AT, nominal_count=self._nominal_count)


class OverlappedReducer(TeamReducer):
    """The same in segments, which are on their way while the backward pass continues. The same bits come out."""

    def __init__(
        self,
        model: nn.Module,
        computation: Computation,
        nominal_count: int,
        buffers: SharedBuffers,
        segment_bytes: int,
    ) -> None:
        super().__init__(model, computation, nominal_count, buffers)
        num_extras = NUM_EXTRAS + buffers.num_flags
        self._exchange = OverlappedExchange(list(model.parameters()), num_extras, segment_bytes)

    def _compute(self, parts: Sequence[Batch], measure: bool) -> Loss:
        self._exchange.begin()
        num_left = sum(part.num_samples > 0 for part in parts)

        def compute(*args: Any, **keywords: Any) -> Any:
            nonlocal num_left
            outputs = self._model(*args, **keywords)
            num_left -= 1
            if num_left == 0 and (reached := reached_parameters(outputs)) is not None:
                self._exchange.expect(reached)
            return outputs

        return self._computation.forward_backward(compute, parts, total_count=self._nominal_count, measure=measure)

    def _sum(self, extras: Sequence[float]) -> list[float]:
        return self._exchange.reduce(extras, count_at=COUNT_AT, nominal_count=self._nominal_count)


class DdpReducer(TeamReducer):
    """torch's DistributedDataParallel: buckets that are all-reduced while the backward pass continues."""

    def __init__(
        self,
        model: nn.Module,
        computation: Computation,
        nominal_count: int,
        team: Team,
        buffers: SharedBuffers,
        example: Batch,
    ) -> None:
        super().__init__(model, computation, nominal_count, buffers)
        self._team = team
        device_ids = [computation.device.index] if computation.device.type == "cuda" else None
        # find_unused_parameters: what a worker did not use counts as zero instead of hanging the others, and
        # what nobody used keeps no gradient. (torch advises once, in the worker's log, to do without where all
        # are used; which ones are may change from batch to batch.)
        self._ddp = DistributedDataParallel(
            model,
            device_ids=device_ids,
            forward_sync_buffers=False,
            gradient_as_bucket_view=True,
            find_unused_parameters=True,
        )
        self._join = EmptyShardPass(model, self._ddp, computation, example)

    def _compute(self, parts: Sequence[Batch], measure: bool) -> Loss:
        losses = []
        if len(parts) > 1:
            with self._ddp.no_sync():
                losses.append(self._pass(parts[:-1], measure))
        losses.append(self._pass(parts[-1:], measure))  # communicates: the other parts' gradients are in it
        return Loss.join(losses)

    def _sum(self, extras: Sequence[float]) -> list[float]:
        totals = self._team.sum(extras)
        if totals[COUNT_AT] and totals[COUNT_AT] != self._nominal_count:
            gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
            torch._foreach_mul_(gradients, self._nominal_count / totals[COUNT_AT])
        return totals

    def _pass(self, parts: Sequence[Batch], measure: bool) -> Loss:
        # DDP divides by the number of workers; multiplying the loss by it makes a sum of the mean again.
        total_count = self._nominal_count / self._team.num_workers
        return self._computation.forward_backward(
            self._ddp, parts, total_count=total_count, measure=measure, join=self._join
        )


class EmptyShardPass:
    """Goes through the motions of a pass where a worker has no sample, so that the others need not wait."""

    def __init__(self, model: nn.Module, passes: nn.Module, computation: Computation, example: Batch) -> None:
        self._model, self._passes, self._computation = model, passes, computation
        self._sample = example.rows(0, 1)  # few models can compute a batch of none

    def __call__(self) -> None:
        with no_samples(self._model), self._computation.autocast():
            outputs = self._computation.outputs(self._passes, self._computation.to_device(self._sample))
        anchor(outputs).backward()  # type: ignore[no-untyped-call]
