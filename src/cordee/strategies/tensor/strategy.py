"""The tensor strategy: its settings, and how DTensor's parallel layers fit the protocol."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cordee.cluster import Team
from cordee.communication.exchange import broadcast
from cordee.compute import Computation, Loss, OptimizerRecipe
from cordee.core import Batch, Job
from cordee.core.errors import JobError
from cordee.core.settings import Section
from cordee.models.slicing import Style, choose_slicing
from cordee.strategies.axes import Axes, Mesh, form_axes
from cordee.strategies.elementwise import require_elementwise
from cordee.strategies.shared_buffers import SharedBuffers
from cordee.strategies.slices import Holdings, hold
from cordee.strategies.split import SplitModel, copy_buffers, cut_weights, gather_weights
from cordee.strategies.strategy import Requirements, require_samples
from cordee.strategies.tensor.layers import check_same, slice_model, working_copy
from cordee.strategies.tensor.rehearsal import check_plan
from cordee.strategies.tensor.streams import SliceStreams
from cordee.strategies.whole import WholeModel


class TensorSettings(Section, frozen=True, kw_only=True):
    """Keys of [strategy] that belong to tensor."""

    # How layers are split, by name patterns; empty: there is a plan for perceptrons and gpt.
    plan: dict[str, Style] = msgspec.field(default_factory=dict)


class TensorParallel(SplitModel):
    """All workers compute the same batch; each has a slice of the layers, and they put activations together.

    With several replicas, each of them computes its own share of the batch.
    """

    _axes: Axes

    def __init__(
        self, job: Job, settings: TensorSettings, computation: Computation, *, mesh: Mesh | None = None
    ) -> None:
        super().__init__(job, computation, mesh or Mesh(tensor=job.strategy.workers))
        self._settings = settings

    def requirements(self, job: Job) -> Requirements:
        workers = job.strategy.workers
        if self._mesh.tensor < 2:
            raise JobError(
                f"strategy 'tensor' needs 2 workers or more, the job has {workers}: set strategy.workers = 2"
            )
        require_samples(job, self._mesh.data, "replicas")
        return Requirements(num_workers=workers, num_data_shards=self._mesh.data, cuts_batches=self._mesh.data > 1)

    def check(self, model: nn.Module, recipe: OptimizerRecipe, example: Batch) -> None:
        inputs = example.inputs.to(next((p.device for p in model.parameters()), "cpu"))
        check_plan(model, self._mesh.tensor, self._settings.plan, inputs, self._computation)
        require_elementwise(recipe, model, "tensor")

    def setup(self, model: nn.Module, recipe: OptimizerRecipe, team: Team, example: Batch) -> None:
        model = self._recall(model)
        broadcast([*model.parameters(), *model.buffers()])
        self._axes = axes = form_axes(team, self._mesh)
        assert axes.tensor is not None
        plan = choose_slicing(model, self._mesh.tensor, self._settings.plan)
        group = DeviceMesh.from_group(axes.tensor, self._computation.device.type)
        self._working = slice_model(working_copy(model, plan), group, plan)
        check_same(model, self._working, example.inputs.to(self._computation.device), self._computation)
        SliceStreams(self._working, plan, axes.place.tensor, self._computation.device)
        held = Holdings(
            [
                hold(name, parameter, num_holders=team.num_workers, num_slice_holders=self._mesh.data)
                for name, parameter in self._working.named_parameters()
            ]
        )
        self._adopt(WholeModel(model), held, recipe, axes.data, team)
        self._is_speaker = axes.place.tensor == 0
        if axes.data is not None:
            working = self._working
            self._shared = SharedBuffers(
                lambda: list(working.buffers()), is_first=axes.place.data == 0, group=axes.data
            )

    def consolidate(self) -> None:
        self._whole.restore()
        gather_weights(self._held, self.model)
        copy_buffers(self._working, self.model)

    def _compute(self, parts: Sequence[Batch], *, measure: bool) -> Loss:
        self._working.train(self.model.training)
        count = self._computation.loss.count
        own_count = sum(count(part.targets) for part in parts)
        divisor = own_count if self._mesh.data == 1 else self._nominal_count
        return self._computation.forward_backward(self._working, parts, total_count=divisor, measure=measure)

    def _spread(self) -> None:
        cut_weights(self._held, self.model)
        copy_buffers(self.model, self._working)
