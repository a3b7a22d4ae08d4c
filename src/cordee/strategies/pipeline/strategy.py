"""The pipeline strategy: its settings, and how stages fit the protocol."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cordee.checkpoint import Slice, Slices, State, optimizer_state
from cordee.cluster import Team
from cordee.communication.exchange import broadcast
from cordee.compute import Computation, Loss, OptimizerRecipe
from cordee.compute.computation import find_correct, read_numbers
from cordee.compute.gpus import seed_generators
from cordee.compute.losses import require_even_parts
from cordee.core import Batch, Job
from cordee.core.errors import JobError, ModelError
from cordee.core.file_memory import give_back
from cordee.core.mesh import Mesh
from cordee.core.seeds import derive_seed
from cordee.core.settings import Section
from cordee.models.cutting import CUT_ADVICE, Chain, cut_by_hand, cut_by_time, listed, make_chain, repeat_to
from cordee.models.effects import unchanged
from cordee.models.slicing import check_called, choose_slicing, keep_pairs
from cordee.strategies.buffers import SharedBuffers
from cordee.strategies.pipeline.saving import slices_of_stages
from cordee.strategies.pipeline.stages import (
    Ownership,
    Runner,
    Stage,
    StageModule,
    are_rounds_even,
    collect_states,
    make_stages,
    measure_blocks,
    share_out,
)
from cordee.strategies.slices import Held, Holdings, Shares, hold
from cordee.strategies.split import (
    Axes,
    SplitModel,
    WholeModel,
    aliases_of,
    cut_weights,
    form_axes,
    form_gpu_pipelines,
    gather_weights,
    has_own_way,
    require_elementwise,
)
from cordee.strategies.strategy import Requirements, Update, require_plain, require_samples
from cordee.strategies.tensor import SliceStreams, TensorSettings, check_plan, check_same, slice_model, working_copy

log = logging.getLogger("cordee.pipeline")

_MICROBATCHES_PER_PART = 4


class PipelineSettings(Section, frozen=True, kw_only=True):
    """Keys of [strategy] that belong to pipeline."""

    stages: int = 0  # 0: one per worker, two per worker with the interleaved schedule
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = "1f1b"  # the order of passes
    microbatches: int = 0  # 0: four per worker of the pipeline, as far as the batch goes
    recompute: bool = False  # compute activations again in the backward pass instead of keeping them
    placement: tuple[tuple[str, ...], ...] = ()  # names of the blocks of each stage, patterns allowed; empty: by time

    def __post_init__(self) -> None:
        for key in ("stages", "microbatches"):
            if getattr(self, key) < 0:
                raise JobError(f"strategy.{key} = {getattr(self, key)} must be at least 0")


class Pipeline(SplitModel):
    """Every worker has some layers of the model and passes activations on, micro-batch after micro-batch.

    With several replicas, each of them is a pipeline over its own share of the batch. With a tensor axis the layers of
    a stage are sliced; with a sharded one, gradients and optimizer state of a stage are shared out.
    """

    _axes: Axes

    def __init__(
        self,
        job: Job,
        settings: PipelineSettings,
        computation: Computation,
        *,
        mesh: Mesh | None = None,
        slicing: TensorSettings | None = None,
    ) -> None:
        super().__init__(job, computation, mesh or Mesh(pipeline=job.strategy.workers))
        self._settings = settings
        self._slicing = slicing or TensorSettings()
        self._recompute = settings.recompute or job.training.recompute
        num_parts = self._mesh.pipeline
        default = 2 * num_parts if settings.schedule == "interleaved" else num_parts
        self._num_stages = len(settings.placement) or settings.stages or default
        self._chain: Chain | None = None
        self._share_size = -(-job.training.batch_size // self._mesh.num_shares // job.training.accumulate)

    def requirements(self, job: Job) -> Requirements:
        settings, workers = self._settings, job.strategy.workers
        num_parts = self._mesh.pipeline
        if num_parts < 2:
            raise JobError(f"a pipeline needs 2 workers or more, the job has {workers}: set strategy.workers = 2")
        num_stages = self._num_stages
        if settings.placement and settings.stages and settings.stages != len(settings.placement):
            raise JobError(
                f"strategy.stages = {settings.stages} and strategy.placement of {len(settings.placement)} stages "
                "contradict each other: remove one of them"
            )
        if num_stages % num_parts and settings.placement:
            raise JobError(
                f"strategy.placement has {num_stages} stages, which {num_parts} workers cannot share out evenly: give "
                f"it {num_parts}, or {2 * num_parts} with strategy.schedule = 'interleaved'"
            )
        if num_stages % num_parts:
            raise JobError(
                f"strategy 'pipeline' cannot share {num_stages} stages out evenly over {num_parts} workers: set "
                f"strategy.stages to {num_parts}, or to {2 * num_parts} with strategy.schedule = 'interleaved'"
            )
        if num_stages > num_parts and settings.schedule in ("gpipe", "1f1b"):
            raise JobError(
                f"strategy.schedule = '{settings.schedule}' has one stage per worker, the job has {num_stages} stages "
                f"on {num_parts} workers: set strategy.stages = {num_parts}, or strategy.schedule = 'interleaved'"
            )
        if self._recompute and settings.schedule == "zero-bubble":
            raise JobError(
                "strategy.recompute, or training.recompute, does not go with strategy.schedule = 'zero-bubble', which "
                "goes backwards in two halves: use '1f1b' or 'interleaved'"
            )
        self._check_microbatches(job, num_parts, num_stages)
        cuts_batches = self._mesh.num_shares > 1 or self._choose_microbatches(num_parts) > 1
        return Requirements(num_workers=workers, num_data_shards=self._mesh.num_shares, cuts_batches=cuts_batches)

    def check(self, model: nn.Module, recipe: OptimizerRecipe, example: Batch) -> None:
        require_plain(model, example, self._computation, "a pipeline")
        with self._computation.autocast():
            inputs = example.inputs.to(next((p.device for p in model.parameters()), "cpu"))
            self._chain = self._make_chain(model, inputs)
        if self._mesh.tensor > 1:
            check_plan(model, self._mesh.tensor, self._slicing.plan, inputs, self._computation)
        if self._mesh.sharded > 1 or self._mesh.tensor > 1:
            require_elementwise(recipe, model, "hybrid")
        names = [block.name for block in self._chain.blocks]
        if self._settings.placement:
            cut_by_hand([block.names for block in self._chain.blocks], self._settings.placement)
        elif len(names) == 1:
            reason = self._chain.bond or f"it has one block only, '{names[0]}'"
            raise ModelError(f"the model {type(model).__name__} cannot be cut into stages: {reason}: {CUT_ADVICE}")
        elif self._num_stages > len(names):
            raise ModelError(
                f"the model can be cut into at most {len(names)} stages, the job has {self._num_stages}: set "
                f"strategy.stages to at most {len(names)}, and strategy.workers to match (blocks: {listed(names)})"
            )

    def setup(self, model: nn.Module, recipe: OptimizerRecipe, team: Team, example: Batch) -> None:
        device = self._computation.device
        model = self._recall(model)
        self._axes = axes = form_axes(team, self._mesh)
        self._gpu_group = form_gpu_pipelines(team, self._mesh) if device.type == "cuda" else None
        inputs = example.inputs.to(device)
        if self._chain is None:
            self.check(model, recipe, Batch(inputs, example.targets))
        assert self._chain is not None
        counts = self._cut(model, self._chain, inputs, team)
        working, chain = self._slice(model, self._chain, inputs)
        stages = make_stages(chain, counts)
        self._check_schedule(stages)
        part_of = [stage.index % self._mesh.pipeline for stage in stages]
        self._ownership = owned = share_out(working, stages, part_of)
        self._log_cut(stages, part_of)

        held = self._hold(working, owned)
        self._working = working
        self._tied = self._form_ties(owned, {one.name: one for one in held})
        self._shares = Shares(held, axes.sharded) if axes.sharded is not None else None
        kept = [*(one.local for one in held), *self._own_buffers().values()] if working is model else []
        holdings = Holdings(held if self._shares is None else self._shares.held)
        self._adopt(WholeModel(model, kept), holdings, recipe, axes.data, team)
        own = [stage for stage in stages if part_of[stage.index] == axes.place.pipeline]
        modules = [
            (
                stage,
                StageModule(
                    stage.blocks,
                    self._computation,
                    recompute=self._recompute,
                    splits_backward=self._settings.schedule == "zero-bubble",
                ),
            )
            for stage in own
        ]
        self._runner = Runner(
            modules,
            num_stages=len(stages),
            schedule=self._settings.schedule,
            group=axes.pipeline if self._gpu_group is None else self._gpu_group.group,
            device=device,
            loss=self._loss_of,
        )
        self._is_speaker = self._runner.is_last and axes.place.tensor == 0
        self._num_microbatches = self._choose_microbatches(self._mesh.pipeline)
        if axes.shares is not None:
            self._shared = SharedBuffers(
                lambda: list(self._own_buffers().values()),
                is_first=axes.place.data == axes.place.sharded == 0,
                group=axes.shares,
            )

    def consolidate(self) -> None:
        self._whole.restore()
        gather_weights(self._held, self.model)
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        owners = {**self._ownership.parameters, **self._ownership.buffers}
        with torch.no_grad():
            for name, buffer in self._own_buffers().items():
                tensors[name].copy_(buffer)
            for name, tensor in tensors.items():
                dist.broadcast(tensor, group=self._axes.pipeline, group_src=owners[name][0])
                give_back([tensor])
        self._whole.page()

    def slices(self) -> Slices | None:
        mesh, place = self._mesh, self._axes.place
        if has_own_way(self.model) or (mesh.tensor > 1 and mesh.sharded > 1):
            return None  # an even share of a slice is no run of the whole
        aliases = aliases_of(self.model)
        tensors: dict[str, tuple[Tensor, Held | None]] = {}  # with what it is a part of; None: others have the same
        for one in self._held:
            if place.pipeline == self._ownership.parameters[one.name][0]:
                tensors[f"model.{aliases.get(one.name, one.name)}"] = one.local.detach(), one
        names = self.model.state_dict().keys()
        for name, buffer in self._own_buffers().items():
            if name in names and place.pipeline == self._ownership.buffers[name][0]:
                tensors[f"model.{name}"] = buffer, None
        values = {}
        if self._optimizer is not None:
            state, sliced = self._held.sliced(optimizer_state(self._optimizer, self._held))
            tensors |= {f"optimizer.{name}": (tensor, sliced.get(name)) for name, tensor in state.tensors.items()}
            values = {"optimizer": state.values}
        described = {
            name: tensor.new_empty(tensor.shape if one is None else one.shape, device="meta")
            for name, (tensor, one) in tensors.items()
        }
        own = {
            name: Slice(0, tensor) if one is None else one.slice_of(tensor)
            for name, (tensor, one) in tensors.items()
            if place.data == 0 and self._saves(one)
        }
        sources = [mesh.worker_at(Mesh(0, 0, part, 0)) for part in range(mesh.pipeline)]
        return slices_of_stages(own, State(described, values), aliases, names, sources=sources, part=place.pipeline)

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        if self._shares is not None:
            self._shares.publish()

    def _saves(self, one: Held | None) -> bool:
        """Whether this worker saves what it has of a parameter, or of what is the same along all but `pipeline`."""
        place, mesh = self._axes.place, self._mesh
        if one is None:
            return place.sharded == place.tensor == 0
        is_slice = one.num_holders == mesh.data * len(self._ownership.parameters[one.name])
        return place.tensor == 0 or is_slice

    def update(self, step: int) -> Update:
        done = super().update(step)
        if self._shares is not None:
            self._shares.publish()
        return done

    def _compute(self, parts: Sequence[Batch], *, measure: bool) -> Loss:
        count = self._computation.loss.count
        own_count = sum(count(part.targets) for part in parts)
        num_samples = sum(part.num_samples for part in parts)
        self._begin(own_count if self._mesh.num_shares == 1 else self._nominal_count, measure)
        for part in parts:
            if part.num_samples:
                self._runner.run(part, self._num_microbatches)
        self._sum_tied()
        if self._shares is not None:
            self._shares.reduce()
        means, right = read_numbers([[loss for loss, _ in self._losses], self._right], self._computation.device)
        loss_sum = sum(one * count for one, (_, count) in zip(means, self._losses, strict=True))
        mean = loss_sum / own_count if own_count else 0.0
        num_correct = int(sum(right)) if measure else None
        return Loss(mean, own_count, num_correct, num_samples, num_items=self._num_items)

    def _begin(self, divisor: float, measure: bool) -> None:
        self._loss_divisor, self._measures = divisor, measure and self._computation.counts_classes
        self._losses: list[tuple[Tensor, float]] = []  # of each micro-batch, with what it counts
        self._right: list[Tensor] = []
        self._num_items = 0
        # All workers of a pipeline were given one seed, of which each of them makes a stream of its own.
        seed_generators(derive_seed(torch.initial_seed(), "part", self._axes.place.pipeline), self._computation.device)

    def _loss_of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the share of a micro-batch in the loss of the whole batch. Called by torch on the last stage."""
        count = self._computation.loss.count(targets)
        if not count:
            return outputs.sum() * 0.0
        with self._computation.autocast():
            loss = self._computation.loss.mean(outputs, targets)
            if count != self._loss_divisor:
                require_even_parts(self._computation.loss, outputs, targets)
        self._losses.append((loss.detach(), count))
        if self._measures:
            self._right.append(find_correct(outputs, targets, ignored=self._computation.loss.ignored))
            self._num_items += self._computation.loss.num_items(targets)
        scale = self._computation.scale
        return loss * (count / self._loss_divisor * (1.0 if scale is None else scale.factor))

    def _spread(self) -> None:
        cut_weights(self._held, self.model)
        sources = dict(self.model.named_buffers())
        with torch.no_grad():
            for name, buffer in self._own_buffers().items():
                buffer.copy_(sources[name])

    def _own_buffers(self) -> dict[str, Tensor]:
        """Return the buffers of this worker's stages; a forward pass may have put other tensors in their places."""
        own, owners = self._axes.place.pipeline, self._ownership.buffers
        return {name: buffer for name, buffer in self._working.named_buffers() if own in owners[name]}

    def _optimizer_state(self) -> State:
        own = None if self._optimizer is None else optimizer_state(self._optimizer, self._held)
        place = self._axes.place
        if place.data:
            return State({}, {})
        is_first = place.sharded == place.tensor == 0
        if own is not None:
            own = self._held.gathered(own, keep=is_first)
        return collect_states(own, self._axes.pipeline) if is_first else State({}, {})

    def _hold(self, working: nn.Module, owned: Ownership) -> list[Held]:
        """Return what this worker has of its stages' parameters."""
        mesh, held = self._mesh, []
        for name, parameter in working.named_parameters():
            parts = owned.parameters[name]
            if self._axes.place.pipeline in parts:
                num_slice_holders = len(parts) * mesh.data
                num_holders = num_slice_holders * mesh.tensor
                held.append(hold(name, parameter, num_holders=num_holders, num_slice_holders=num_slice_holders))
        return held

    def _form_ties(self, owned: Ownership, held: Mapping[str, Held]) -> list[tuple[Held, dist.ProcessGroup]]:
        """Form a group for every set of parts that have a weight in common; return those of this worker. Collective."""
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        ties = []
        for name, parts in owned.tied().items():
            if parts not in groups:
                rosters = [[roster[part] for part in parts] for roster in self._mesh.rosters(["pipeline"])]
                formed = [dist.new_group(roster) for roster in rosters]
                groups[parts] = next(g for g, r in zip(formed, rosters, strict=True) if self._is_among(r, parts))
            if name in held and held[name].local.requires_grad:
                ties.append((held[name], groups[parts]))
        return ties

    def _is_among(self, roster: Sequence[int], parts: Sequence[int]) -> bool:
        """Whether these workers are those of this worker's own pipeline, with the given parts."""
        place = self._axes.place
        return list(roster) == [self._mesh.worker_at(replace(place, pipeline=part)) for part in parts]

    def _sum_tied(self) -> None:
        """Give all stages that use a weight the sum of their gradients, so that they take the same step."""
        for one, group in self._tied:
            one.take_gradient()
            if one.local.grad is None:
                one.local.grad = torch.zeros_like(one.local)
            dist.all_reduce(one.local.grad, group=group)

    def _make_chain(self, model: nn.Module, inputs: Tensor) -> Chain:
        chain = make_chain(model, inputs)
        if self._mesh.tensor == 1:
            return chain
        plan = choose_slicing(model, self._mesh.tensor, self._slicing.plan)
        check_called(chain, model, plan)
        return keep_pairs(chain, model, plan)

    def _slice(self, model: nn.Module, chain: Chain, inputs: Tensor) -> tuple[nn.Module, Chain]:
        """Return a copy of the model with sliced layers, and its blocks; the model itself without a tensor axis."""
        if self._axes.tensor is None:
            return model, chain
        plan = choose_slicing(model, self._mesh.tensor, self._slicing.plan)
        working = working_copy(model, plan)
        with self._computation.autocast():
            chain = self._make_chain(working, inputs)
        slice_model(working, DeviceMesh.from_group(self._axes.tensor, self._computation.device.type), plan)
        check_same(model, working, inputs, self._computation)
        streams = SliceStreams(working, plan, self._axes.place.tensor, self._computation.device)
        for block in chain.blocks:  # the model itself is never called
            block.modules[0].register_forward_pre_hook(lambda *_: streams.begin())
        return working, chain

    def _cut(self, model: nn.Module, chain: Chain, inputs: Tensor, team: Team) -> list[int]:
        """Return how many blocks each stage gets. Collective: the first worker measures for all."""
        names = [block.name for block in chain.blocks]
        if self._settings.placement:
            return cut_by_hand([block.names for block in chain.blocks], self._settings.placement)
        times = torch.zeros(len(names), dtype=torch.float64)
        if team.is_first:  # one measures for all: cuts must be the same
            num_microbatches = self._choose_microbatches(self._mesh.pipeline)
            with unchanged(model):
                model.train()
                batch = repeat_to(inputs, max(2, self._share_size // num_microbatches))
                times = torch.tensor(measure_blocks(chain, batch, self._computation), dtype=torch.float64)
        broadcast([times])
        return cut_by_time(times.tolist(), self._num_stages)

    def _check_schedule(self, stages: Sequence[Stage]) -> None:
        """Refuse stages whose first layer torch would not train when it splits the backward pass."""
        for stage in stages[1:]:
            is_trained = any(parameter.requires_grad for parameter in stage.parameters())
            if self._settings.schedule == "zero-bubble" and is_trained and not stage.is_trained_before:
                raise JobError(
                    f"strategy.schedule = 'zero-bubble' cannot train stage {stage.index}, before which nothing is "
                    "trained: set strategy.schedule = '1f1b', or strategy.placement with trained layers in the first "
                    "stage"
                )

    def _choose_microbatches(self, num_parts: int) -> int:
        return self._settings.microbatches or max(1, min(_MICROBATCHES_PER_PART * num_parts, self._share_size))

    def _check_microbatches(self, job: Job, num_parts: int, num_stages: int) -> None:
        number, schedule = self._choose_microbatches(num_parts), self._settings.schedule
        require_samples(job, self._mesh.num_shares, "replicas")
        if number > self._share_size:
            raise JobError(
                f"strategy.microbatches = {number} cuts {self._share_size} samples into empty parts: set it to at most "
                f"{self._share_size}, or training.batch_size higher"
            )
        if schedule == "1f1b" and self._settings.microbatches and number < num_stages:
            raise JobError(
                f"strategy.schedule = '1f1b' needs as many micro-batches as stages, the job has {number} and "
                f"{num_stages}: set strategy.microbatches = {num_stages} or more, or strategy.schedule = 'gpipe'"
            )
        if schedule in ("interleaved", "zero-bubble") and not are_rounds_even(number, num_parts):
            raise JobError(
                f"strategy.schedule = '{schedule}' cannot share {number} micro-batches out over {num_parts} workers: "
                f"set strategy.microbatches to a multiple of {num_parts}"
            )

    def _log_cut(self, stages: Sequence[Stage], part_of: Sequence[int]) -> None:
        for stage in stages:
            first, last = stage.blocks[0].name, stage.blocks[-1].name
            size = sum(parameter.numel() for parameter in stage.parameters())
            worker = self._mesh.worker_at(replace(self._axes.place, pipeline=part_of[stage.index]))
            log.info("stage %d on worker %d: %s to %s, %d parameters", stage.index, worker, first, last, size)
