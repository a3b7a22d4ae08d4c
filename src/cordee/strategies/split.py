"""What strategies share in which a worker trains only a part of the model."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from cordee.checkpoint import (
    Kind,
    Slice,
    Slices,
    State,
    load_model_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
    require_fit,
)
from cordee.cluster import Team
from cordee.communication.exchange import GradientExchange, broadcast
from cordee.communication.shared_memory.gpus import PlainNccl, uses_nccl
from cordee.compute import Computation, Loss, OptimizerRecipe, Votes, hooked_parameters
from cordee.compute.averaging import swap_averages
from cordee.compute.gpus import synchronize
from cordee.compute.loss_scale import unscale
from cordee.core import Batch, Job
from cordee.core.errors import JobError, ModelError, TrainingError
from cordee.core.file_memory import FileMemory, Paging, give_back, is_large, take_out, zeros_strided
from cordee.core.mesh import Mesh
from cordee.strategies.buffers import SharedBuffers
from cordee.strategies.slices import Held, Holdings, square_norm
from cordee.strategies.strategy import SavesSlices, Update


class SplitModel(SavesSlices):
    """A part of the model and its optimizer here, the rest with others; the whole only to evaluate and save.

    A strategy computes a gradient (`_compute`) and says what it holds; stepping, clipping and checkpoints are here.
    """

    model: nn.Module
    _team: Team
    _recipe: OptimizerRecipe
    _whole: WholeModel
    _held: Holdings
    _optimizer: Optimizer | None
    _axes: Axes
    _exchange: GradientExchange | None  # with those who hold the same and compute other samples
    _working: nn.Module  # what computes: a copy of the model in which slices have the place of parameters
    _shared: SharedBuffers | None = None  # with those who hold the same buffers and compute other samples
    _is_speaker: bool  # whether this worker reports the loss of its share of the batch

    def __init__(self, job: Job, computation: Computation, mesh: Mesh) -> None:
        self._mesh = mesh
        self._clip_norm = job.training.clip_norm
        self._nominal_count = job.training.batch_size
        self._computation = computation
        self._norm: float | None = None
        self._is_sound = True  # no worker's gradient has overflown, with fp16

    def _recall(self, model: nn.Module) -> nn.Module:
        """Return the model on its device, whole in shape, with the first worker's values. Collective.

        What an earlier team had split is to be loaded again.
        """
        if hasattr(self, "_whole"):
            self._whole.restore()
        model.zero_grad()  # of a step that was dropped
        model = model.to(self._computation.device)
        for tensor in (*model.parameters(), *model.buffers()):
            broadcast([tensor])
            give_back([tensor])
        return model

    def _adopt(
        self,
        whole: WholeModel,
        held: Holdings,
        recipe: OptimizerRecipe,
        replicas: dist.ProcessGroup | None,
        team: Team,
    ) -> None:
        """Take the model over. `replicas` are those who hold the same and compute other samples, if there are any."""
        self.model, self._whole, self._held, self._team = whole.model, whole, held, team
        self._recipe = recipe if recipe.groups else recipe.fit(whole.model)
        trained = [parameter for _, parameter in held.named_parameters() if parameter.requires_grad]
        of_parts = recipe.for_parts_of(whole.model)
        self._optimizer = of_parts.make(held.named_parameters()) if trained else None
        self._exchange = GradientExchange(trained, 0, replicas) if trained and replicas else None

    @abstractmethod
    def _compute(self, parts: Sequence[Batch], *, measure: bool) -> Loss:
        """Compute the gradient of what is held, over this worker's share of the batch.

        Where batches are cut into shares it is the gradient of the sum over the share divided by the nominal count.
        Returns the loss of the share; those who do not speak know only its count.
        """

    def swap_averages(self) -> None:
        if self._optimizer is not None:
            swap_averages(self._optimizer)

    def consolidate(self) -> None:
        self._whole.restore()
        gather_weights(self._held, self.model)
        _copy_buffers(self._working, self.model)
        self._whole.page()

    def _spread(self) -> None:
        """Copy what is held, and all buffers, out of the whole model, which is here. Local."""
        cut_weights(self._held, self.model)
        _copy_buffers(self.model, self._working)

    def forward_backward(self, microbatches: Sequence[Batch], *, measure: bool, vote: Callable[[], Votes]) -> Loss:
        self._whole.release()
        if self._shared is not None:
            self._shared.begin()
        local = self._compute(microbatches, measure=measure)
        if self._shared is not None:
            self._shared.flags(has_samples=local.num_samples > 0)
            self._shared.agree()
        for one in self._held:
            one.take_gradient()
        if self._exchange is not None:
            self._exchange.reduce()
        loss_scale, has_overflown = self._computation.scale, 0.0
        if loss_scale is not None:
            has_overflown = float(not unscale(self._gradients(), loss_scale))
        own_square = square_norm(self._held) if self._clip_norm and not has_overflown else 0.0
        report = local.summands()
        own_report = report if self._is_speaker else [0.0] * len(report)
        # What GPUs exchange is done before anybody votes: a step with a member that was lost on the way does not count.
        synchronize(self._computation.device)
        square, num_overflown, *totals = self._team.sum([own_square, has_overflown, *own_report, *vote()])
        self._is_sound = num_overflown == 0
        loss = Loss.from_totals(totals, has_accuracy=measure and self._computation.counts_classes)
        # The share of one who is alone was divided by its own count.
        scale = self._nominal_count / loss.count if loss.count and self._mesh.num_shares > 1 else 1.0
        if scale != 1.0 and (gradients := self._gradients()):
            torch._foreach_mul_(gradients, scale)
        self._norm = math.sqrt(square) * scale
        return loss

    def update(self, step: int) -> Update:
        if (loss_scale := self._computation.scale) is not None:
            loss_scale.record(is_sound=self._is_sound)
            if not self._is_sound:
                return self.skip(step)
        norm = None
        if self._clip_norm:
            norm = self._norm
            assert norm is not None
            if not math.isfinite(norm):  # scaling by it would make every weight NaN
                raise TrainingError(f"the norm of the gradient is {norm} at step {step + 1}: lower optimizer.lr")
            factor = self._clip_norm / (norm + 1e-6)  # as torch's clip_grad_norm_ has it
            if factor < 1.0 and (gradients := self._gradients()):
                torch._foreach_mul_(gradients, factor)
        lr = self._set_rate(step)
        if self._optimizer is not None:
            self._optimizer.step()
        for one in self._held:
            one.drop_gradient()
        return Update(lr, norm)

    def skip(self, step: int) -> Update:
        for one in self._held:
            one.drop_gradient()
        return Update(self._set_rate(step))

    def _set_rate(self, step: int) -> float:
        """Set the rate of what is held; return that of the whole model's first group."""
        if self._optimizer is not None:
            self._recipe.set_rate(self._optimizer, step)
        return self._recipe.first_rate(step)

    def state_dict(self) -> State:
        own = self._optimizer_state()
        if not self._team.is_first:
            return State({}, {})
        return State.join(model=State(model_state(self.model), {}), optimizer=own)

    def slices(self) -> Slices | None:
        if self._optimizer is None or any(one.place is None for one in self._held):
            return None  # what is here of a parameter cannot be said in a few numbers
        place, mesh = self._axes.place, self._mesh

        def saves(one: Held) -> bool:
            """Of those who hold the same, the first saves it."""
            return place.data == 0 and (place.tensor == 0 or one.num_holders == mesh.data)

        return _slices_of(
            self.model, self._working, self._held, self._optimizer, saves=saves, is_first=self._team.is_first
        )

    @torch.no_grad()
    def load_state_dict(self, state: State) -> None:
        """Take what belongs here out of `state`, and nothing else of it, where the state can be saved that way."""
        if (slices := self.slices()) is None:
            self._load_whole(state)
            return
        weights = state.part("model").tensors
        kinds = {**slices.kinds, **{name: slices.kinds[first] for name, first in slices.aliases.items()}}
        own = {name.removeprefix("model."): kind for name, kind in kinds.items() if name.startswith("model.")}
        require_fit(own, weights, type(self.model).__name__)
        self._whole.release()
        for one in self._held:
            one.local.copy_(own_rows := one.cut(weights[one.name]))
            give_back([own_rows])
        for name, buffer in self._own_buffers().items():
            if name in own:
                buffer.copy_(weights[name])
        if self._optimizer is not None:
            load_optimizer_state(self._optimizer, self._held, self._held.cut(state.part("optimizer")))

    def _own_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that this worker computes with."""
        return dict(self._working.named_buffers())

    def _load_whole(self, state: State) -> None:
        self._whole.restore()
        with Paging():
            load_model_state(self.model, state.part("model").tensors)
        self._spread()
        if self._optimizer is not None:
            load_optimizer_state(self._optimizer, self._held, self._held.cut(state.part("optimizer")))

    def _optimizer_state(self) -> State:
        """Return the whole optimizer's state on the first worker. Collective."""
        assert self._optimizer is not None
        return self._held.gathered(optimizer_state(self._optimizer, self._held), keep=self._team.is_first)

    def _gradients(self) -> list[Tensor]:
        return [one.local.grad for one in self._held if one.local.grad is not None]


@torch.no_grad()
def gather_weights(held: Holdings, model: nn.Module) -> None:
    """Copy the whole of all parameters into the model. Collective."""
    targets = dict(model.named_parameters())
    for one in held:
        if one.local is not targets[one.name]:
            targets[one.name].copy_(one.gather(one.local.detach()))
            give_back([targets[one.name]])


@torch.no_grad()
def cut_weights(held: Holdings, model: nn.Module) -> None:
    """Copy out of the model what is held of it. Local."""
    sources = dict(model.named_parameters())
    for one in held:
        if one.local is not sources[one.name]:
            one.local.copy_(one.cut(sources[one.name]))
            give_back([sources[one.name]])


@torch.no_grad()
def _copy_buffers(source: nn.Module, target: nn.Module) -> None:
    """Copy all buffers by name."""
    targets = dict(target.named_buffers())
    for name, buffer in source.named_buffers():
        targets[name].copy_(buffer)


def _slices_of(
    model: nn.Module,
    working: nn.Module,
    held: Holdings,
    optimizer: Optimizer,
    *,
    saves: Callable[[Held], bool],
    is_first: bool,
) -> Slices | None:
    """Return what is here of the weights and of the optimizer's state; None where a module has its own way of saving.

    `model` gives the names; its memory is not looked at. Of what is held, this worker saves what it `saves`; what is
    whole on every worker is the first one's to save.
    """
    kinds: dict[str, Kind] = {}
    own: dict[str, Slice] = {}
    common: dict[str, Tensor] = {}
    places, others = places_of(model, held), aliases_of(model)
    buffers = dict(working.named_buffers(remove_duplicate=False))
    known, saved = places.keys(), model.state_dict().keys()
    if has_own_way(model) or known - saved or saved - known - buffers.keys():
        return None

    def add(name: str, one: Held | None, tensor: Tensor) -> None:
        if one is None or one.is_whole:
            common[name] = tensor
            return
        kinds[name] = Kind(tensor.dtype, one.shape)
        if saves(one):
            own[name] = one.slice_of(tensor)

    for name, one in places.items():
        if name not in others:
            add(f"model.{name}", one, one.local.detach())
    for name in saved - known:
        common[f"model.{name}"] = buffers[name].detach()
    state = optimizer_state(optimizer, held)
    described, sliced = held.sliced(state)
    for name, tensor in state.tensors.items():
        add(f"optimizer.{name}", sliced.get(name), tensor)
    for name, tensor in common.items():
        kinds[name] = Kind(tensor.dtype, tensor.shape)
        if is_first:
            own[name] = Slice(0, tensor)
    aliases = {f"model.{name}": f"model.{first}" for name, first in others.items()}
    return Slices(kinds, aliases, own, {"optimizer": described.values}, common)


def places_of(model: nn.Module, held: Holdings) -> dict[str, Held]:
    """Return where each parameter is, by all its names. `model` gives the names; its memory is not looked at."""
    firsts = {name: name for name, _ in model.named_parameters(remove_duplicate=False)} | aliases_of(model)
    by_first = {firsts[one.name]: one for one in held}
    return {name: by_first[first] for name, first in firsts.items()}


# The whole model on a worker that trains only a part of it: there to be evaluated and saved, and away in between.


class WholeModel:
    """Gives the memory of a model back while it is not needed; names, modules and tensor objects stay. Local.

    While it is here, its large tensors lie in temporary files.
    """

    def __init__(self, model: nn.Module, kept: Iterable[Tensor] = ()) -> None:
        """`kept` are tensors of the model that stay: those this worker trains."""
        self.model = model
        kept = list(kept)
        take_out(kept)
        kept_ids = {id(tensor) for tensor in kept}
        others = [t for t in [*model.parameters(), *model.buffers()] if id(t) not in kept_ids]
        self._others = [(tensor, tensor.shape, tensor.stride()) for tensor in others]
        self._is_here = True
        self._hooks: list[RemovableHandle] = []

    def page(self) -> None:
        """Let the model, which is here, be computed with few of its pages in memory."""
        self._stop_paging()
        for module in self.model.modules():
            if any(is_large(tensor) for tensor in module.parameters(recurse=False)):
                self._hooks.append(module.register_forward_hook(_give_back))

    def _stop_paging(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def release(self) -> None:
        """Give back the memory of all but the kept tensors; their values are lost."""
        self._stop_paging()
        if self._is_here:
            self._is_here = False
            for tensor, _, _ in self._others:
                # Not resize_ on the storage, which refuses once NumPy has seen it, as when it was saved.
                tensor.data = tensor.data.new_empty(0)

    def restore(self) -> None:
        """Take the memory again; what was away is zero until it is copied in."""
        self._stop_paging()
        if not self._is_here:
            self._is_here = True
            memory = FileMemory()
            for tensor, shape, stride in self._others:
                tensor.data = zeros_strided(shape, stride, tensor, memory)


def _give_back(module: nn.Module, inputs: object, output: object) -> None:
    give_back(module.parameters(recurse=False))


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Return the other names of tied parameters, with the one under which they are saved: the first in the alphabet."""
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    return {name: min(names) for names in names_of.values() for name in names if name != min(names)}


def has_own_way(model: nn.Module) -> bool:
    """Whether a module has its own way of saving."""
    return any(module._state_dict_hooks or module._load_state_dict_pre_hooks for module in model.modules())


# Optimizers that update each element by itself, and so work on slices of parameters as on the whole.

_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)


def require_elementwise(recipe: OptimizerRecipe, model: nn.Module, strategy: str) -> None:
    """Raise JobError for an optimizer that would compute something else on slices."""
    optimizer = recipe.make(model.named_parameters())
    if type(optimizer) not in _ELEMENTWISE:
        known = ", ".join(sorted(cls.__name__.lower() for cls in _ELEMENTWISE))
        raise JobError(
            f"optimizer '{type(optimizer).__name__}' may look at whole parameters, and strategy '{strategy}' gives "
            f"workers slices of them: use one of {known}, or strategy.name = 'data_parallel' or 'pipeline'"
        )


def refuse_hooks(model: nn.Module, strategy: str) -> None:
    """Raise ModelError for hooks on gradients, where `strategy` trains other tensors than the model's parameters."""
    for name in hooked_parameters(model):
        raise ModelError(
            f"parameter '{name}' has a hook on its gradient, and strategy '{strategy}' trains slices of it, which do "
            "not have the hook: remove the hook, or use strategy.name = 'data_parallel', 'parameter_server' or "
            "'pipeline'"
        )


# The groups of a team along the axes of its mesh.


@dataclass(frozen=True)
class Axes:
    """One worker's place on the mesh, and its groups. A group of one is None."""

    mesh: Mesh
    place: Mesh
    data: dist.ProcessGroup | None = None  # those that hold the same
    sharded: dist.ProcessGroup | None = None
    shares: dist.ProcessGroup | None = None  # those that differ in their samples only: data and sharded together
    pipeline: dist.ProcessGroup | None = None
    tensor: dist.ProcessGroup | None = None


def form_axes(team: Team, mesh: Mesh) -> Axes:
    """Form the groups of all axes. Collective over the team."""
    assert mesh.num_workers == team.num_workers
    formed: dict[str, dist.ProcessGroup | None] = {}
    known: dict[str, dist.ProcessGroup] = {}
    for name, along in (
        ("data", ("data",)),
        ("sharded", ("sharded",)),
        ("shares", ("data", "sharded")),
        ("pipeline", ("pipeline",)),
        ("tensor", ("tensor",)),
    ):
        rosters = mesh.rosters(along)
        if len(rosters[0]) == 1:
            continue
        key = repr(rosters)
        if key not in known:
            known[key] = form_groups(rosters, team.worker_index)
        formed[name] = known[key]
    return Axes(mesh, mesh.place_of(team.worker_index), **formed)


def form_groups(rosters: Sequence[Sequence[int]], worker_index: int) -> dist.ProcessGroup:
    """Form all groups, as torch wants everybody to, and return the own one. Collective over the team."""
    if len(rosters) == 1:
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    groups = [dist.new_group(list(roster)) for roster in rosters]
    return _own_of(groups, rosters, worker_index)


def form_gpu_pipelines(team: Team, mesh: Mesh) -> PlainNccl | None:
    """Form groups for what stages on GPUs send to each other; None where NCCL does not do it. Collective over the team.

    Stages send and receive at once. NCCL waits for the one before the other, unless torch puts both into one call, and
    it does so only in a group that is NCCL's alone.
    """
    if not uses_nccl(dist.group.WORLD):
        return None
    rosters = mesh.rosters(["pipeline"])
    groups = [dist.new_group(roster, backend="nccl") for roster in rosters]
    return PlainNccl(_own_of(groups, rosters, team.worker_index))


def _own_of(groups: Sequence[Any], rosters: Sequence[Sequence[int]], worker_index: int) -> dist.ProcessGroup:
    own = next(number for number, roster in enumerate(rosters) if worker_index in roster)
    group: dist.ProcessGroup = groups[own]
    return group
