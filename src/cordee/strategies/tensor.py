"""`tensor`: the same batch on all workers, and a slice of each layer on each (DTensor's parallel layers)."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.utils.parametrize import is_parametrized

from cordee.cluster import Team
from cordee.compute import Computation, Loss, OptimizerRecipe
from cordee.compute.gpus import generator_of
from cordee.core import Batch, Job
from cordee.core.errors import JobError, ModelError
from cordee.core.file_memory import Paging
from cordee.core.mesh import Mesh
from cordee.core.seeds import derive_seed
from cordee.core.settings import Section
from cordee.models.slicing import CannotSliceError, Style, choose_slicing
from cordee.strategies.buffers import SharedBuffers
from cordee.strategies.slices import Holdings, hold
from cordee.strategies.split import (
    SplitModel,
    WholeModel,
    form_axes,
    refuse_hooks,
    require_elementwise,
)
from cordee.strategies.strategy import Requirements, require_plain, require_samples


class TensorSettings(Section, frozen=True, kw_only=True):
    """Keys of [strategy] that belong to tensor."""

    # How layers are split, by name patterns; empty: there is a plan for perceptrons and gpt.
    plan: dict[str, Style] = msgspec.field(default_factory=dict)


class TensorParallel(SplitModel):
    """All workers compute the same batch; each has a slice of the layers, and they put activations together.

    With several replicas, each of them computes its own share of the batch.
    """

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
        require_plain(model, example, self._computation, "strategy 'tensor'")
        inputs = example.inputs.to(next((p.device for p in model.parameters()), "cpu"))
        check_plan(model, self._mesh.tensor, self._settings.plan, inputs, self._computation)
        require_elementwise(recipe, model, "tensor")

    def setup(self, model: nn.Module, recipe: OptimizerRecipe, team: Team, example: Batch) -> None:
        model = self._recall(model)
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

    def _compute(self, parts: Sequence[Batch], *, measure: bool) -> Loss:
        self._working.train(self.model.training)
        count = self._computation.loss.count
        own_count = sum(count(part.targets) for part in parts)
        divisor = own_count if self._mesh.data == 1 else self._nominal_count
        return self._computation.forward_backward(self._working, parts, total_count=divisor, measure=measure)


# Layers that are slices of a model's own: how they are made, with DTensor, and whether they compute the same.

_TOLERANCE = 1e-3  # of outputs, relative to the largest: in bf16 a sum in another order differs by as much

_PAIRS = (
    "a layer of the style 'column' gives slices, which only a layer of the style 'row' takes, with nothing but "
    "element-wise functions between them; use 'gather' and 'scatter' where whole activations are needed"
)


def working_copy(model: nn.Module, plan: Mapping[str, Style]) -> nn.Module:
    """Return a copy of the model to be sliced; it has the very weights of the layers that slices will replace."""
    replaced = [parameter for name in plan for parameter in model.get_submodule(name).parameters(recurse=False)]
    return copy.deepcopy(model, {id(parameter): parameter for parameter in replaced})


def slice_model(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, Style]) -> nn.Module:
    """Replace the parameters of the planned layers by slices; tied weights stay tied. Collective over the mesh."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    ties = [aliases for aliases in names.values() if len(aliases) > 1]
    styles = {name: _style(model.get_submodule(name), plan[name]) for name in plan}
    for style in styles.values():
        style.src_data_rank = None  # everybody has the whole: nothing is sent
    parallelize_module(model, mesh, styles, src_data_rank=None)
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):  # rows that follow each other are a view of the whole, which would stay
            parameter._local_tensor = parameter._local_tensor.detach().clone()
    for first, *others in ties:
        kept = model.get_parameter(first)
        for other in others:
            owner, _, attribute = other.rpartition(".")
            setattr(model.get_submodule(owner), attribute, kept)
    return model


def check_same(model: nn.Module, sliced: nn.Module, inputs: Tensor, computation: Computation) -> None:
    """Raise JobError unless the sliced model computes what the whole one does. Collective."""
    with Paging():
        expected = compute_whole(model, inputs, computation)
    try:
        found = compute_whole(sliced, inputs, computation)
    except Exception as error:  # shapes that do not fit: everybody has the same
        raise misfit(error) from error
    refuse_difference(expected, found, computation)


def compute_whole(model: nn.Module, inputs: Tensor, computation: Computation) -> Tensor:
    """Return what the model computes when it is evaluated; its mode stays what it is."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), computation.autocast():
            outputs: Tensor = model(inputs)
        return outputs.float()
    finally:
        model.train(was_training)


def misfit(error: Exception) -> JobError:
    """Return what to say of a sliced model that cannot compute."""
    problem = str(error).splitlines()[0] if str(error) else type(error).__name__
    return JobError(f"strategy.plan does not fit the model ({problem}): {_PAIRS}")


def refuse_difference(expected: Tensor, found: Tensor, computation: Computation) -> None:
    """Raise JobError unless a sliced model's outputs are those of the whole one, up to rounding."""
    limit = _TOLERANCE if computation.precision == "fp32" else 30 * _TOLERANCE
    is_close = found.shape == expected.shape
    if not is_close or not (found - expected).abs().max() <= limit * expected.abs().max().clamp(min=1.0):
        raise JobError(f"strategy.plan changes what the model computes: {_PAIRS}")


def _style(layer: nn.Module, style: Style) -> ParallelStyle:
    is_embedding = isinstance(layer, nn.Embedding)
    if style in ("column", "gather"):
        gives = Replicate() if style == "gather" or is_embedding else Shard(-1)
        return ColwiseParallel(input_layouts=Replicate(), output_layouts=gives, use_local_output=True)
    takes = Replicate() if style == "scatter" or is_embedding else Shard(-1)
    return RowwiseParallel(input_layouts=takes, output_layouts=Replicate(), use_local_output=True)


# Random numbers of a sliced model: the same on all workers for whole activations, each worker's own for slices.
#
# Workers start every step with one seed, so that dropout of what all of them have is the same everywhere. What lies
# between a layer of the style 'column' and one of the style 'row' is a slice, and with the same numbers each slice
# would get the same mask: from the one layer to the other, numbers come from a stream of the worker's own. It follows
# from a number of everybody's stream, so that a pass that is computed again draws the same masks again.


class SliceStreams:
    """Switches this process's random numbers while `model`, which is sliced by `plan`, computes on slices."""

    def __init__(self, model: nn.Module, plan: Mapping[str, Style], slice_index: int, device: torch.device) -> None:
        self._slice_index = slice_index
        self._generator = generator_of(device)
        self._common: Tensor | None = None  # the state of everybody's stream, while the worker's own is in use
        model.register_forward_pre_hook(lambda *_: self.begin())
        for name, style in plan.items():
            layer = model.get_submodule(name)
            if isinstance(layer, nn.Linear) and style == "column":
                layer.register_forward_hook(lambda *_: self._enter())
            elif isinstance(layer, nn.Linear) and style == "row":
                layer.register_forward_pre_hook(lambda *_: self._leave())

    def begin(self) -> None:
        """Forget a pass that ended between the two layers, as torch ends one that it computes again."""
        self._common = None

    def _enter(self) -> None:
        if self._common is None:
            number = torch.randint(1 << 62, (1,), generator=self._generator, device=self._generator.device)
            self._common = self._generator.get_state()
            self._generator.manual_seed(derive_seed(int(number), "slice", self._slice_index))

    def _leave(self) -> None:
        if self._common is not None:
            self._generator.set_state(self._common)
            self._common = None


# A sliced model rehearsed in one process, so that a plan that is wrong is refused before any worker starts.

_PATIENCE_S = 60.0  # for the other slices: a model may take another path on each of them


def check_plan(
    model: nn.Module, num_slices: int, given: Mapping[str, Style], inputs: Tensor, computation: Computation
) -> None:
    """Raise a CordeeError if the model cannot be sliced, or if `given` would change what it computes. Local.

    Each slice is computed by a thread, with views of the model's own weights. Only 'column' and 'row' are rehearsed:
    what the other styles take and give is whole. The plans that come with Cordée need no rehearsal.
    """
    refuse_hooks(model, "tensor")
    try:
        plan = choose_slicing(model, num_slices, given)
    except CannotSliceError as error:
        raise ModelError(
            f"{error}: use strategy.name = 'data_parallel', 'pipeline' or 'sharded', or name the layers to split in "
            "strategy.plan"
        ) from None
    for name in plan:
        if is_parametrized(model.get_submodule(name)):
            raise ModelError(
                f"layer '{name}' has a weight that is computed from others (torch.nn.utils.parametrize), which "
                "strategy 'tensor' cannot slice: leave the layer out of strategy.plan, or use another strategy"
            )
    linear = {name: style for name, style in plan.items() if isinstance(model.get_submodule(name), nn.Linear)}
    open_styles = {name: style for name, style in linear.items() if style in ("column", "row")}
    if not given or not open_styles:
        return
    expected = compute_whole(model, inputs, computation)
    barrier = _SumBarrier(num_slices)
    found: list[Tensor | Exception | None] = [None] * num_slices

    def rehearse(index: int) -> None:
        try:
            found[index] = compute_whole(_sliced(model, open_styles, index, barrier), inputs, computation)
        except Exception as error:  # noqa: BLE001 - a user's model may raise anything for shapes it does not expect
            found[index] = error
            barrier.abort()

    threads = [threading.Thread(target=rehearse, args=(index,), daemon=True) for index in range(num_slices)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [one for one in found if isinstance(one, Exception)]
    if errors:
        raise misfit(next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0]))
    for outputs in found:
        assert isinstance(outputs, Tensor)
        refuse_difference(expected, outputs, computation)


class _SumBarrier:
    """Where the threads of all slices exchange tensors."""

    def __init__(self, num_slices: int) -> None:
        self.num_slices = num_slices
        self._barrier = threading.Barrier(num_slices)
        self._given: list[Tensor | None] = [None] * num_slices

    def add(self, index: int, tensor: Tensor) -> Tensor:
        """Return the sum of what all slices bring."""
        self._given[index] = tensor
        self._barrier.wait(_PATIENCE_S)
        total = sum(one for one in self._given if one is not None)
        self._barrier.wait(_PATIENCE_S)
        assert isinstance(total, Tensor)
        return total

    def abort(self) -> None:
        self._barrier.abort()


def _sliced(model: nn.Module, plan: Mapping[str, Style], index: int, barrier: _SumBarrier) -> nn.Module:
    """Return a copy of the model as the worker `index` along 'tensor' has it."""
    shared: Sequence[Tensor] = [*model.parameters(), *model.buffers()]
    sliced = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    for name, style in plan.items():
        layer = sliced.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        weight, bias = layer.weight, layer.bias
        if style == "column":
            layer.weight = _part(weight, 0, index, barrier.num_slices)
            if bias is not None:
                layer.bias = _part(bias, 0, index, barrier.num_slices)
        else:
            layer.weight = _part(weight, 1, index, barrier.num_slices)
            layer.register_parameter("bias", None)
            layer.register_forward_hook(_adding(barrier, index, bias))
    return sliced


def _part(tensor: Tensor, side: int, index: int, num_slices: int) -> nn.Parameter:
    return nn.Parameter(tensor.detach().chunk(num_slices, side)[index], requires_grad=False)


def _adding(barrier: _SumBarrier, index: int, bias: Tensor | None) -> Any:
    def add(layer: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> Tensor:
        total = barrier.add(index, outputs)
        return total if bias is None else total + bias

    return add
