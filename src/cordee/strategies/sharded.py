"""`sharded`: a share of the data and a slice of each parameter each, gathered on use (FSDP2)."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement

from cordee.checkpoint import WeightsDigest, share_bytes
from cordee.cluster import Team
from cordee.compute import Computation, Loss, OptimizerRecipe
from cordee.core import Batch, Job
from cordee.core.errors import JobError, ModelError
from cordee.core.file_memory import give_back
from cordee.core.mesh import AXES, Mesh
from cordee.core.settings import Section
from cordee.models.slicing import choose_slicing
from cordee.strategies.buffers import SharedBuffers, SyncedBatchNorm, buffers_of, synchronise_batch_norms
from cordee.strategies.data_parallel import EmptyShardPass
from cordee.strategies.slices import Held, Holdings, SlicedParameter
from cordee.strategies.split import (
    SplitModel,
    WholeModel,
    form_axes,
    has_own_way,
    places_of,
    refuse_hooks,
    require_elementwise,
)
from cordee.strategies.strategy import (
    Evaluated,
    EvaluatesTogether,
    Requirements,
    require_plain,
    require_samples,
)
from cordee.strategies.tensor import SliceStreams, TensorSettings, check_plan, check_same, slice_model, working_copy


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


class Sharded(SplitModel, EvaluatesTogether):
    """Every worker computes its share of each batch and keeps a slice of each parameter, gathered on use.

    With several replicas (HSDP) the workers of one replica share the parameters out, and gradients are summed over all.
    With a tensor axis the layers are sliced first, and workers along it compute the same samples.
    """

    _working: Any  # with FSDP's methods

    def __init__(
        self,
        job: Job,
        settings: ShardedSettings,
        computation: Computation,
        *,
        mesh: Mesh | None = None,
        slicing: TensorSettings | None = None,
    ) -> None:
        super().__init__(job, computation, mesh or Mesh(sharded=job.strategy.workers))
        self._settings = settings
        self._slicing = slicing or TensorSettings()

    def requirements(self, job: Job) -> Requirements:
        workers = job.strategy.workers
        if workers == 1:
            raise JobError("strategy 'sharded' needs 2 workers or more, the job has 1: set strategy.workers = 2")
        require_samples(job, self._mesh.num_shares, "workers" if self._mesh.num_shares == workers else "shares")
        if self._settings.batch_norm == "sync" and self._mesh.tensor > 1:
            raise JobError(
                "strategy.batch_norm = 'sync' would count the samples that workers along 'tensor' have in common more "
                "than once: use 'average' or 'local'"
            )
        if self._settings.offload and self._computation.device.type == "cpu":
            raise JobError(
                "strategy.offload = true moves parameters from a GPU to main memory, and this job computes on the CPU: "
                "remove it"
            )
        return Requirements(num_workers=workers, num_data_shards=self._mesh.num_shares)

    def check(self, model: nn.Module, recipe: OptimizerRecipe, example: Batch) -> None:
        _refuse_scalars(model)
        refuse_hooks(model, "sharded")
        if self._mesh.tensor > 1:
            require_plain(model, example, self._computation, "a mesh with a tensor axis")
            inputs = example.inputs.to(next((p.device for p in model.parameters()), "cpu"))
            check_plan(model, self._mesh.tensor, self._slicing.plan, inputs, self._computation)
        require_elementwise(recipe, model, "sharded")

    def setup(self, model: nn.Module, recipe: OptimizerRecipe, team: Team, example: Batch) -> None:
        model = self._recall(model)
        mesh = init_device_mesh(self._computation.device.type, tuple(self._mesh), mesh_dim_names=AXES)
        self._axes = form_axes(team, self._mesh)
        self._working = self._shard(self._slice(model, mesh, example), mesh)
        if self._computation.precision != "fp32":
            _gather_once(self._working)
        held = Holdings([self._hold(name, parameter) for name, parameter in self._working.named_parameters()])
        self._adopt(WholeModel(model), held, recipe, None, team)  # FSDP itself sums over replicas as well
        self._example = example
        self._join = EmptyShardPass(self._working, self._working, self._computation, example)
        self._is_speaker = self._axes.place.tensor == 0
        is_local = self._settings.batch_norm == "local"
        self._shared = SharedBuffers(
            buffers_of(self._working, left_out=SyncedBatchNorm),
            is_first=team.is_first if is_local else self._axes.place.data == self._axes.place.sharded == 0,
            keeps_first=is_local,
            group=None if is_local else self._axes.shares,
        )

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[Evaluated | None]:
        if self._mesh.tensor > 1:  # workers along it would have to compute the same samples
            yield None
            return
        sample = self._computation.to_device(self._example.rows(0, 1))
        self._put_apart()
        try:
            yield Evaluated(self._working, lambda: self._computation.outputs(self._working, sample))
        finally:
            self._put_apart()

    def _put_apart(self) -> None:
        """Forget what is gathered: it would not follow weights that change otherwise than by a step. Local."""
        for module in self._working.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @torch.no_grad()
    def weights_sha256(self) -> str | None:
        places = places_of(self.model, self._held)
        buffers = dict(self._working.named_buffers(remove_duplicate=False))
        names = self.model.state_dict().keys()
        if has_own_way(self.model) or names - places.keys() - buffers.keys():
            return None
        digest = WeightsDigest()
        for name in sorted(names):
            one = places.get(name)
            tensor = buffers[name] if one is None else one.gather(one.local.detach())
            if self._team.is_first:
                digest.add(name, tensor)
        return share_bytes(digest.hexdigest().encode()).decode()

    def _compute(self, parts: Sequence[Batch], *, measure: bool) -> Loss:
        self._working.train(self.model.training)
        losses = []
        if len(parts) > 1:
            self._working.set_requires_gradient_sync(False)
            losses.append(self._pass(parts[:-1], measure))
            self._working.set_requires_gradient_sync(True)
        losses.append(self._pass(parts[-1:], measure))
        return Loss.join(losses)

    def _pass(self, parts: Sequence[Batch], measure: bool) -> Loss:
        # FSDP divides by the number of shares; multiplying the loss by it makes a sum of the mean again.
        total_count = self._nominal_count / self._mesh.num_shares
        return self._computation.forward_backward(
            self._working, parts, total_count=total_count, measure=measure, join=self._join
        )

    def _slice(self, model: nn.Module, mesh: DeviceMesh, example: Batch) -> nn.Module:
        """Return a copy of the model, whose layers are slices where the mesh has a tensor axis. Collective."""
        if self._mesh.tensor == 1:
            # FSDP copies what it keeps of a parameter, so that the copy need not have its own.
            return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
        plan = choose_slicing(model, self._mesh.tensor, self._slicing.plan)
        working = slice_model(working_copy(model, plan), mesh["tensor"], plan)
        check_same(model, working, example.inputs.to(self._computation.device), self._computation)
        SliceStreams(working, plan, self._axes.place.tensor, self._computation.device)
        return working

    def _hold(self, name: str, parameter: nn.Parameter) -> Held:
        assert isinstance(parameter, DTensor)
        is_sliced = any(placement.is_shard() for placement in _along(parameter, "tensor"))
        return SlicedParameter(name, parameter, self._mesh.data * (1 if is_sliced else self._mesh.tensor))

    def _shard(self, model: nn.Module, whole_mesh: DeviceMesh) -> Any:
        mesh = whole_mesh["data", "sharded"] if self._mesh.data > 1 else whole_mesh["sharded"]
        options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": not self._settings.keep_gathered}
        has_batch_norm = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
        if self._computation.precision != "fp32" and not has_batch_norm:
            # Gathered in 16 bits, which is what autocast computes with; gradients are summed in 32. Torch's batch
            # norm wants its parameters in the type of its running statistics: autocast alone sees to it.
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=self._computation.half, reduce_dtype=torch.float32)
        if self._settings.offload:
            options["offload_policy"] = CPUOffloadPolicy()
        if self._settings.batch_norm == "sync":
            synchronise_batch_norms(model)
        units = choose_units(model, self._settings.unit_bytes)
        refuse_repeated_recomputation(model, units)
        for unit in units:
            unit.register_forward_hook(_own_memory)  # before FSDP's own, which sees what this returns
            whole = [parameter for parameter in unit.parameters() if not isinstance(parameter, DTensor)]
            fully_shard(unit, **options)
            if self._computation.device.type == "cpu":
                # A CPU gathers while the caller waits: gathering the next unit early, as torch does, only takes memory.
                cast(FSDPModule, unit).set_modules_to_backward_prefetch([cast(FSDPModule, unit)])
            give_back(whole)
        return model


def _own_memory(unit: nn.Module, inputs: Any, output: Any) -> Any:
    """Copy an output that is a view: changing it in place (ReLU(inplace=True)) would cut FSDP's backward hook off."""
    is_view = isinstance(output, torch.Tensor) and output.requires_grad and output._is_view()
    return output.clone() if is_view else output


def _gather_once(model: nn.Module) -> None:
    """Gather each unit for a moment. Collective.

    With gradients of another type than the parameters, torch 2.13 looks at the whole parameters of all units after each
    micro-batch, and fails for a unit that no pass has used yet.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            module.reshard()


def _along(parameter: DTensor, axis: str) -> list[Placement]:
    """Return how the parameter lies along an axis of its mesh; nothing if it does not lie there."""
    names = parameter.device_mesh.mesh_dim_names or ()
    return [placement for name, placement in zip(names, parameter.placements, strict=True) if name == axis]


def _refuse_scalars(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise ModelError(
                f"parameter '{name}' is a single number without a dimension, which strategy 'sharded' cannot cut: "
                "give it the shape (1,), or use strategy.name = 'data_parallel'"
            )


# Which modules are gathered together: decided by size, without torch's sharding.


def choose_units(model: nn.Module, unit_bytes: int) -> list[nn.Module]:
    """Return the modules whose parameters are gathered and freed as one, inner ones first, the model itself last.

    A module is a unit if it has at least `unit_bytes` of parameters that no unit inside it has. A parameter that is
    used in several places belongs to the smallest module around all of them. So each is in one unit only.
    """
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    units: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        """Choose among what is inside; return the bytes left over for the module around it."""
        own_uses = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
        has_shared = any(count < uses[key] for key, count in own_uses.items())
        left = sum(visit(child) for child in module.children())
        left += sum(parameter.nbytes for parameter in module.parameters(recurse=False))
        # A list of modules is never called itself, and gathering happens when a unit is called.
        is_called = not isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if module is model or has_shared or not is_called or left < unit_bytes:
            return left
        units.append(module)
        return 0

    visit(model)
    return [*units, model]


# Refuse a unit that is used twice under re-entrant checkpointing: FSDP2 would lose a part of its gradient.


def refuse_repeated_recomputation(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """Let the backward pass raise ModelError where it would lose gradients. To be called before `fully_shard`.

    Re-entrant checkpointing computes a unit without a graph first and builds the graph in the backward pass. FSDP2
    takes a call in the backward pass for a recomputation whose hooks exist already (torch 2.13,
    `FSDPState._pre_forward`). That is wrong once the unit has been through a backward pass: nobody sums the gradients
    of the next.
    """
    names = {module: name for name, module in model.named_modules()}
    _Watch(model, {unit: names[unit] for unit in units if unit is not model})


class _Watch:
    """How often each unit was called in the present forward pass, and which of them without a graph."""

    def __init__(self, model: nn.Module, names: dict[nn.Module, str]) -> None:
        self._names = names
        self._num_calls: Counter[nn.Module] = Counter()
        self._without_graph: set[nn.Module] = set()
        self._is_forward = False
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end, always_call=True)
        for unit in names:
            unit.register_forward_pre_hook(self._count)

    def _begin(self, model: nn.Module, inputs: Any) -> None:
        self._num_calls.clear()
        self._without_graph.clear()
        self._is_forward = True

    def _end(self, model: nn.Module, inputs: Any, outputs: Any) -> None:
        self._is_forward = False

    def _count(self, unit: nn.Module, inputs: Any) -> None:
        if self._is_forward:
            self._num_calls[unit] += 1
            if not torch.is_grad_enabled():
                self._without_graph.add(unit)
        elif unit in self._without_graph and self._num_calls[unit] > 1:
            raise ModelError(
                f"'{self._names[unit]}' is used {self._num_calls[unit]} times in a forward pass, under re-entrant "
                "checkpointing, and strategy 'sharded' would lose a part of its gradient: use "
                "torch.utils.checkpoint.checkpoint(…, use_reentrant=False), or set strategy.unit_bytes above the "
                f"{sum(parameter.nbytes for parameter in unit.parameters()):,} bytes of its parameters"
            )
