"""The sharded strategy: its settings, and how FSDP2 fits the protocol."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from cordee.cluster import Team
from cordee.communication.exchange import broadcast
from cordee.compute import Computation, Loss, OptimizerRecipe
from cordee.core import Batch, Job
from cordee.core.errors import JobError, ModelError
from cordee.core.settings import Section
from cordee.strategies.axes import Axes
from cordee.strategies.data_parallel.batch_norm import average_buffers, synchronise_batch_norms
from cordee.strategies.data_parallel.reducers import Motions, joined
from cordee.strategies.elementwise import require_elementwise
from cordee.strategies.sharded.units import choose_units
from cordee.strategies.slices import Holdings, hold
from cordee.strategies.split import SplitModel, copy_buffers, cut_weights, gather_weights
from cordee.strategies.strategy import Requirements, require_samples
from cordee.strategies.whole import WholeModel


class ShardedSettings(Section, frozen=True, kw_only=True):
    """Keys of [strategy] that belong to sharded."""

    unit_bytes: int = 4 << 20  # parameters are gathered in units of at least so many bytes
    keep_gathered: bool = False  # keep parameters from the forward to the backward pass: faster, and more memory
    offload: bool = False  # keep slices and optimizer state in main memory while a GPU computes
    # As for data_parallel: local, average or sync.
    batch_norm: Literal["local", "average", "sync"] = "average"

    def __post_init__(self) -> None:
        if self.unit_bytes < 1:
            raise JobError(f"strategy.unit_bytes = {self.unit_bytes} must be at least 1")


class Sharded(SplitModel):
    """Every worker computes its share of each batch and keeps a slice of each parameter, gathered on use.

    With several replicas (HSDP) the workers of one replica share the parameters out, and gradients are summed over all.
    """

    def __init__(self, job: Job, settings: ShardedSettings, computation: Computation, *, num_replicas: int = 1) -> None:
        super().__init__(job, computation)
        self._settings = settings
        self._num_replicas = num_replicas
        self._is_speaker = True

    def requirements(self, job: Job) -> Requirements:
        workers = job.strategy.workers
        if workers == 1:
            raise JobError("strategy 'sharded' needs 2 workers or more, the job has 1: set strategy.workers = 2")
        require_samples(job, workers)
        if self._settings.offload and self._computation.device.type == "cpu":
            raise JobError(
                "strategy.offload = true moves parameters from a GPU to main memory, and this job computes on the CPU: "
                "remove it"
            )
        return Requirements(num_workers=workers, num_data_shards=workers)

    def check(self, model: nn.Module, recipe: OptimizerRecipe, example: Batch) -> None:
        _refuse_scalars(model)
        require_elementwise(recipe, "sharded")

    def setup(self, model: nn.Module, recipe: OptimizerRecipe, team: Team, example: Batch) -> None:
        model = self._recall(model)
        broadcast([*model.parameters(), *model.buffers()])
        self._working = self._shard(copy.deepcopy(model), team)
        held = Holdings(
            [
                hold(name, parameter, num_holders=team.num_workers, num_slice_holders=self._num_replicas)
                for name, parameter in self._working.named_parameters()
            ]
        )
        # FSDP itself sums over replicas as well.
        alone = Axes(num_replicas=1, replica_index=0, num_parts=team.num_workers, part_index=team.worker_index)
        self._adopt(WholeModel(model), held, recipe, alone, team)
        self._join = Motions(self._working, self._working, self._computation)

    def consolidate(self) -> None:
        if self._settings.batch_norm == "local":
            broadcast(list(self._working.buffers()))
        else:
            average_buffers(self._working, self._team.num_workers)
        self._whole.restore()
        gather_weights(self._held, self.model)
        copy_buffers(self._working, self.model)

    def _compute(self, parts: Sequence[Batch], *, measure: bool) -> Loss:
        self._working.train(self.model.training)
        losses = []
        if len(parts) > 1:
            self._working.set_requires_gradient_sync(False)
            losses.append(self._pass(parts[:-1], measure))
            self._working.set_requires_gradient_sync(True)
        losses.append(self._pass(parts[-1:], measure))
        return joined(losses)

    def _pass(self, parts: Sequence[Batch], measure: bool) -> Loss:
        # FSDP divides by the number of workers; multiplying the loss by it makes a sum of the mean again.
        total_count = self._nominal_count / self._team.num_workers
        return self._computation.forward_backward(
            self._working, parts, total_count=total_count, measure=measure, join=self._join
        )

    def _divisor(self, total_count: int) -> float:
        return self._nominal_count

    def _spread(self) -> None:
        cut_weights(self._held, self.model)
        copy_buffers(self.model, self._working)

    def _shard(self, model: nn.Module, team: Team) -> Any:
        device = self._computation.device.type
        if self._num_replicas > 1:
            shape = (self._num_replicas, team.num_workers // self._num_replicas)
            mesh = init_device_mesh(device, shape, mesh_dim_names=("replicas", "slices"))
        else:
            mesh = init_device_mesh(device, (team.num_workers,))
        options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": not self._settings.keep_gathered}
        has_batch_norm = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
        if self._computation.precision == "bf16" and not has_batch_norm:
            # Gathered in 16 bits, which is what autocast computes with; gradients are summed in 32. Torch's batch
            # norm wants its parameters in the type of its running statistics: autocast alone sees to it.
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if self._settings.offload:
            options["offload_policy"] = CPUOffloadPolicy()
        if self._settings.batch_norm == "sync":
            synchronise_batch_norms(model)
        for unit in choose_units(model, self._settings.unit_bytes):
            unit.register_forward_hook(_own_memory)  # before FSDP's own, which sees what this returns
            fully_shard(unit, **options)
        return model


def _own_memory(unit: nn.Module, inputs: Any, output: Any) -> Any:
    """Copy an output that is a view: changing it in place (ReLU(inplace=True)) would cut FSDP's backward hook off."""
    is_view = isinstance(output, torch.Tensor) and output.requires_grad and output._is_view()
    return output.clone() if is_view else output


def _refuse_scalars(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise ModelError(
                f"parameter '{name}' is a single number without a dimension, which strategy 'sharded' cannot cut: "
                "give it the shape (1,), or use strategy.name = 'data_parallel'"
            )
