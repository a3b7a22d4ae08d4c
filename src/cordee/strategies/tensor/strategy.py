"""The tensor strategy: its settings, and how DTensor's parallel layers fit the protocol."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from cordee.cluster import Team
from cordee.communication.exchange import broadcast
from cordee.compute import Computation, Loss, OptimizerRecipe
from cordee.core import Batch, Job
from cordee.core.errors import JobError
from cordee.core.settings import Section
from cordee.models.slicing import Style, choose_slicing
from cordee.strategies.axes import Axes, form_axes
from cordee.strategies.data_parallel.batch_norm import average_tensors
from cordee.strategies.elementwise import require_elementwise
from cordee.strategies.slices import Holdings, hold
from cordee.strategies.split import SplitModel, copy_buffers, cut_weights, gather_weights
from cordee.strategies.strategy import Requirements, require_samples
from cordee.strategies.tensor.streams import SliceStreams
from cordee.strategies.whole import WholeModel

_TOLERANCE = 1e-3  # of outputs, relative to the largest: in bf16 a sum in another order differs by as much


class TensorSettings(Section, frozen=True, kw_only=True):
    """Keys of [strategy] that belong to tensor."""

    # How layers are split, by name patterns; empty: there is a plan for perceptrons and gpt.
    plan: dict[str, Style] = msgspec.field(default_factory=dict)


class TensorParallel(SplitModel):
    """All workers compute the same batch; each has a slice of the layers, and they put activations together.

    With several replicas, each of them computes its own share of the batch.
    """

    _axes: Axes

    def __init__(self, job: Job, settings: TensorSettings, computation: Computation, *, num_replicas: int = 1) -> None:
        super().__init__(job, computation)
        self._settings = settings
        self._num_replicas = num_replicas
        self._num_slices = job.strategy.workers // num_replicas

    def requirements(self, job: Job) -> Requirements:
        workers = job.strategy.workers
        if self._num_slices < 2:
            raise JobError(
                f"strategy 'tensor' needs 2 workers or more, the job has {workers}: set strategy.workers = 2"
            )
        require_samples(job, self._num_replicas, "replicas")
        return Requirements(num_workers=workers, num_data_shards=self._num_replicas)

    def check(self, model: nn.Module, recipe: OptimizerRecipe, example: Batch) -> None:
        choose_slicing(model, self._num_slices, self._settings.plan)
        require_elementwise(recipe, "tensor")

    def setup(self, model: nn.Module, recipe: OptimizerRecipe, team: Team, example: Batch) -> None:
        model = self._recall(model)
        broadcast([*model.parameters(), *model.buffers()])
        self._axes = axes = form_axes(team, self._num_replicas)
        assert axes.parts is not None
        plan = choose_slicing(model, axes.num_parts, self._settings.plan)
        mesh = DeviceMesh.from_group(axes.parts, self._computation.device.type)
        self._working = slice_model(copy.deepcopy(model), mesh, plan)
        self._check_same(model, example.inputs.to(self._computation.device))
        self._streams = SliceStreams(self._working, plan, axes.part_index, self._computation.device)
        held = Holdings(
            [
                hold(name, parameter, num_holders=team.num_workers, num_slice_holders=self._num_replicas)
                for name, parameter in self._working.named_parameters()
            ]
        )
        self._adopt(WholeModel(model), held, recipe, axes, team)
        self._is_speaker = axes.part_index == 0

    def consolidate(self) -> None:
        if self._axes.replicas is not None:
            average_tensors(list(self._working.buffers()), self._num_replicas, self._axes.replicas)
        self._whole.restore()
        gather_weights(self._held, self.model)
        copy_buffers(self._working, self.model)

    def _compute(self, parts: Sequence[Batch], *, measure: bool) -> Loss:
        self._working.train(self.model.training)
        count = self._computation.loss.count
        own_count = sum(count(part.targets) for part in parts)
        divisor = own_count if self._num_replicas == 1 else self._nominal_count
        self._streams.begin()
        return self._computation.forward_backward(self._working, parts, total_count=divisor, measure=measure)

    def _spread(self) -> None:
        cut_weights(self._held, self.model)
        copy_buffers(self.model, self._working)

    def _check_same(self, model: nn.Module, inputs: Tensor) -> None:
        """Raise JobError unless the sliced model computes what the whole one does. Collective."""
        outputs = []
        for one in (model, self._working):
            was_training = one.training
            one.eval()
            with torch.no_grad(), self._computation.autocast():
                try:
                    outputs.append(one(inputs).float())
                except RuntimeError as error:  # shapes that do not fit: everybody has the same
                    raise JobError(f"strategy.plan does not fit the model: {str(error).splitlines()[0]}") from error
            one.train(was_training)
        whole, sliced = outputs
        limit = _TOLERANCE if self._computation.precision == "fp32" else 30 * _TOLERANCE
        if whole.shape != sliced.shape or not (whole - sliced).abs().max() <= limit * whole.abs().max().clamp(min=1.0):
            raise JobError(
                "strategy.plan changes what the model computes: a layer of the style 'column' gives slices, which only "
                "a layer of the style 'row' takes, with nothing but element-wise functions between them; use 'gather' "
                "and 'scatter' where whole activations are needed"
            )


def slice_model(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, Style]) -> nn.Module:
    """Replace the parameters of the planned layers by slices; tied weights stay tied. Collective over the mesh."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    ties = [aliases for aliases in names.values() if len(aliases) > 1]
    parallelize_module(model, mesh, {name: _style(model.get_submodule(name), plan[name]) for name in plan})
    for first, *others in ties:
        kept = model.get_parameter(first)
        for other in others:
            owner, _, attribute = other.rpartition(".")
            setattr(model.get_submodule(owner), attribute, kept)
    return model


def _style(layer: nn.Module, style: Style) -> ParallelStyle:
    is_embedding = isinstance(layer, nn.Embedding)
    if style in ("column", "gather"):
        gives = Replicate() if style == "gather" or is_embedding else Shard(-1)
        return ColwiseParallel(input_layouts=Replicate(), output_layouts=gives, use_local_output=True)
    takes = Replicate() if style == "scatter" or is_embedding else Shard(-1)
    return RowwiseParallel(input_layouts=takes, output_layouts=Replicate(), use_local_output=True)
