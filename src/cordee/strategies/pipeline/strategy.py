"""The pipeline strategy: its settings, and how stages fit the protocol."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cordee.checkpoint import State, optimizer_state
from cordee.cluster import Team
from cordee.communication.exchange import broadcast
from cordee.compute import Computation, Loss, OptimizerRecipe
from cordee.compute.computation import count_correct
from cordee.core import Batch, Job
from cordee.core.errors import JobError, ModelError
from cordee.core.seeds import derive_seed
from cordee.core.settings import Section
from cordee.models.blocks import Chain, make_chain, repeat_to, undisturbed
from cordee.models.cutting import cut_by_hand, cut_by_time, listed
from cordee.strategies.axes import Axes, form_axes
from cordee.strategies.data_parallel.batch_norm import average_tensors
from cordee.strategies.pipeline.collecting import collect_states
from cordee.strategies.pipeline.modules import StageModule
from cordee.strategies.pipeline.schedules import Runner, are_rounds_even
from cordee.strategies.pipeline.stages import Ownership, Stage, make_stages, share_out
from cordee.strategies.pipeline.timing import measure_blocks
from cordee.strategies.slices import Holdings, WholeParameter
from cordee.strategies.split import SplitModel
from cordee.strategies.strategy import Requirements, require_samples
from cordee.strategies.whole import WholeModel

log = logging.getLogger("cordee.pipeline")

_MICROBATCHES_PER_PART = 4


class PipelineSettings(Section, frozen=True, kw_only=True):
    """Keys of [strategy] that belong to pipeline."""

    stages: int = 0  # 0: one per worker, two per worker with the interleaved schedule
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = "1f1b"
    microbatches: int = 0  # 0: four per worker of the pipeline, as far as the batch goes
    recompute: bool = False  # compute activations again in the backward pass instead of keeping them
    placement: tuple[tuple[str, ...], ...] = ()  # names of the blocks of each stage, patterns allowed; empty: by time

    def __post_init__(self) -> None:
        for key in ("stages", "microbatches"):
            if getattr(self, key) < 0:
                raise JobError(f"strategy.{key} = {getattr(self, key)} must be at least 0")


class Pipeline(SplitModel):
    """Every worker has some layers of the model and passes activations on, micro-batch after micro-batch.

    With several replicas, each of them is a pipeline over its own share of the batch.
    """

    _axes: Axes

    def __init__(
        self, job: Job, settings: PipelineSettings, computation: Computation, *, num_replicas: int = 1
    ) -> None:
        super().__init__(job, computation)
        self._settings = settings
        self._num_replicas = num_replicas
        num_parts = job.strategy.workers // num_replicas
        default = 2 * num_parts if settings.schedule == "interleaved" else num_parts
        self._num_stages = len(settings.placement) or settings.stages or default
        self._chain: Chain | None = None
        self._share_size = -(-job.training.batch_size // num_replicas // job.training.accumulate)

    def requirements(self, job: Job) -> Requirements:
        settings, workers = self._settings, job.strategy.workers
        num_parts = workers // self._num_replicas
        if num_parts < 2:
            raise JobError(f"a pipeline needs 2 workers or more, the job has {workers}: set strategy.workers = 2")
        num_stages = self._num_stages
        if settings.placement and settings.stages and settings.stages != len(settings.placement):
            raise JobError(
                f"strategy.stages = {settings.stages} and strategy.placement of {len(settings.placement)} stages "
                "contradict each other: remove one of them"
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
        if settings.recompute and settings.schedule == "zero-bubble":
            raise JobError(
                "strategy.recompute does not go with strategy.schedule = 'zero-bubble', which goes backwards in two "
                "halves: use '1f1b' or 'interleaved'"
            )
        self._check_microbatches(job, num_parts, num_stages)
        return Requirements(num_workers=workers, num_data_shards=self._num_replicas)

    def check(self, model: nn.Module, recipe: OptimizerRecipe, example: Batch) -> None:
        with self._computation.autocast():
            self._chain = make_chain(model, example.inputs.to(next((p.device for p in model.parameters()), "cpu")))
        names = [block.name for block in self._chain.blocks]
        if self._settings.placement:
            cut_by_hand(names, self._settings.placement)
        elif self._num_stages > len(names):
            raise ModelError(
                f"the model can be cut into at most {len(names)} stages, the job has {self._num_stages}: set "
                f"strategy.stages to at most {len(names)}, and strategy.workers to match (blocks: {listed(names)})"
            )

    def setup(self, model: nn.Module, recipe: OptimizerRecipe, team: Team, example: Batch) -> None:
        device = self._computation.device
        model = self._recall(model)
        broadcast([*model.parameters(), *model.buffers()])
        self._axes = axes = form_axes(team, self._num_replicas)
        inputs = example.inputs.to(device)
        if self._chain is None:
            self.check(model, recipe, Batch(inputs, example.targets))
        assert self._chain is not None
        stages = self._cut(model, self._chain, inputs, team)
        part_of = [stage.index % axes.num_parts for stage in stages]
        self._ownership = owned = share_out(model, stages, part_of)
        self._log_cut(stages, part_of)

        names = {id(p): name for name, p in model.named_parameters()}
        held = Holdings(
            [
                WholeParameter(names[id(p)], p, num_holders=len(owned.parameters[names[id(p)]]) * self._num_replicas)
                for p in model.parameters()
                if axes.part_index in owned.parameters[names[id(p)]]
            ]
        )
        buffers = [b for n, b in model.named_buffers() if axes.part_index in owned.buffers[n]]
        self._adopt(WholeModel(model, [*(one.local for one in held), *buffers]), held, recipe, axes, team)
        self._own_buffers = buffers
        self._tied = self._form_ties(owned, dict(model.named_parameters()))
        own = [stage for stage in stages if part_of[stage.index] == axes.part_index]
        modules = [
            (stage, StageModule(stage.blocks, self._computation, recompute=self._settings.recompute)) for stage in own
        ]
        self._runner = Runner(
            modules,
            num_stages=len(stages),
            schedule=self._settings.schedule,
            group=axes.parts,
            device=device,
            loss=self._loss_of,
        )
        self._is_speaker = self._runner.is_last
        self._num_microbatches = self._choose_microbatches(axes.num_parts)

    def consolidate(self) -> None:
        if self._axes.replicas is not None:
            average_tensors(self._own_buffers, self._num_replicas, self._axes.replicas)
        self._whole.restore()
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        owners = {**self._ownership.parameters, **self._ownership.buffers}
        with torch.no_grad():
            for name, tensor in tensors.items():
                dist.broadcast(tensor, group=self._axes.parts, group_src=owners[name][0])

    def _compute(self, parts: Sequence[Batch], *, measure: bool) -> Loss:
        count = self._computation.loss.count
        own_count = sum(count(part.targets) for part in parts)
        num_samples = sum(part.num_samples for part in parts)
        self._begin(own_count if self._num_replicas == 1 else self._nominal_count, measure)
        for part in parts:
            if part.num_samples:
                self._runner.run(part, self._num_microbatches)
        self._sum_tied()
        mean = self._loss_sum / own_count if own_count else 0.0
        return Loss(mean, own_count, self._num_correct if measure else None, num_samples)

    def _begin(self, divisor: float, measure: bool) -> None:
        self._loss_divisor, self._measures = divisor, measure and self._computation.counts_classes
        self._loss_sum, self._num_correct = 0.0, 0
        # All workers of a pipeline were given one seed, of which each of them makes a stream of its own.
        torch.default_generator.manual_seed(derive_seed(torch.initial_seed(), "part", self._axes.part_index))

    def _loss_of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the share of a micro-batch in the loss of the whole batch. Called by torch on the last stage."""
        count = self._computation.loss.count(targets)
        if not count:
            return outputs.sum() * 0.0
        with self._computation.autocast():
            loss = self._computation.loss.mean(outputs, targets)
        self._loss_sum += loss.item() * count
        if self._measures:
            self._num_correct += count_correct(outputs, targets, ignored=self._computation.loss.ignored)
        return loss * (count / self._loss_divisor)

    def _spread(self) -> None:
        pass  # stages and the whole model have the same tensors

    def _optimizer_state(self) -> State:
        own = None if self._optimizer is None else optimizer_state(self._optimizer, self._held)
        if self._axes.replica_index:
            return State({}, {})
        return collect_states(own, self._axes.parts)

    def _form_ties(
        self, owned: Ownership, parameters: dict[str, nn.Parameter]
    ) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
        """Form a group for every set of parts that have a weight in common; return those of this worker. Collective."""
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        ties = []
        for name, parts in owned.tied().items():
            if parts not in groups:
                rosters = [[copy * self._axes.num_parts + part for part in parts] for copy in range(self._num_replicas)]
                formed = [dist.new_group(roster) for roster in rosters]
                groups[parts] = formed[self._axes.replica_index]
            if self._axes.part_index in parts and parameters[name].requires_grad:
                ties.append((parameters[name], groups[parts]))
        return ties

    def _sum_tied(self) -> None:
        """Give all stages that use a weight the sum of their gradients, so that they take the same step."""
        for parameter, group in self._tied:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)

    def _cut(self, model: nn.Module, chain: Chain, inputs: Tensor, team: Team) -> list[Stage]:
        names = [block.name for block in chain.blocks]
        if self._settings.placement:
            return make_stages(chain, cut_by_hand(names, self._settings.placement))
        times = torch.zeros(len(names), dtype=torch.float64)
        if team.is_first:  # one measures for all: cuts must be the same
            num_microbatches = self._choose_microbatches(self._axes.num_parts)
            with undisturbed(model):
                model.train()
                batch = repeat_to(inputs, max(2, self._share_size // num_microbatches))
                times = torch.tensor(measure_blocks(chain, batch, self._computation), dtype=torch.float64)
        broadcast([times])
        return make_stages(chain, cut_by_time(times.tolist(), self._num_stages))

    def _choose_microbatches(self, num_parts: int) -> int:
        return self._settings.microbatches or max(1, min(_MICROBATCHES_PER_PART * num_parts, self._share_size))

    def _check_microbatches(self, job: Job, num_parts: int, num_stages: int) -> None:
        number, schedule = self._choose_microbatches(num_parts), self._settings.schedule
        require_samples(job, self._num_replicas, "replicas")
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
            worker = self._axes.worker_index(part_of[stage.index])
            log.info("stage %d on worker %d: %s to %s, %d parameters", stage.index, worker, first, last, size)
