"""The stages of a pipeline, and running micro-batches through them, on torch.distributed.pipelining.

torch's stages want every micro-batch of a step to have one shape. A batch that does not divide evenly is run as two
schedules one after the other, of the micro-batches that have one sample more and of the others; the last, smaller batch
of an epoch gets schedules of its own. Nothing is padded, and gradients add up as they do with accumulation.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)

from cordee.checkpoint import State, receive_state, send_state
from cordee.compute import Computation
from cordee.core import Batch
from cordee.core.errors import ModelError
from cordee.models.cutting import Block, Chain, Wire
from cordee.models.recomputation import recomputed
from cordee.strategies.pipeline.split_backward import SplittableStage

_MAX_SCHEDULES = 8  # shapes that are kept ready; a data set has four at most

LossOf = Callable[[Tensor, Tensor], Tensor]


def split_evenly(num_samples: int, num_microbatches: int) -> list[tuple[int, int]]:
    """Return (how many, of which size): the cut that accumulation makes, without its empty parts."""
    size, num_larger = divmod(num_samples, num_microbatches)
    groups = [(num_larger, size + 1), (num_microbatches - num_larger, size)]
    return [(count, each) for count, each in groups if count and each]


def schedule_class(name: str, num_microbatches: int, num_parts: int, num_stages: int) -> type[Any]:
    """Return torch's schedule; a simpler one with the same result where `num_microbatches` are too few for it."""
    has_one_stage_each = num_stages == num_parts
    simple = ScheduleGPipe if has_one_stage_each else ScheduleLoopedBFS
    if name == "gpipe":
        return simple
    if name == "1f1b":
        return Schedule1F1B if num_microbatches >= num_stages else simple
    if not are_rounds_even(num_microbatches, num_parts):
        return simple
    return ScheduleInterleavedZeroBubble if name == "zero-bubble" else ScheduleInterleaved1F1B


def are_rounds_even(num_microbatches: int, num_parts: int) -> bool:
    """Whether the interleaved schedules of torch can share this many micro-batches out."""
    return num_microbatches % max(1, num_microbatches // num_parts) == 0


class Runner:
    """Runs the stages of one worker. Collective over the workers of one pipeline, with batches of one size."""

    def __init__(
        self,
        stages: Sequence[tuple[Stage, nn.Module]],
        *,
        num_stages: int,
        schedule: str,
        group: dist.ProcessGroup | None,
        device: torch.device,
        loss: LossOf,
    ) -> None:
        self._stages = stages
        self._num_stages = num_stages
        self._schedule = schedule
        self._group = group
        self._device = device
        self._loss = loss
        self._ready: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._is_first = any(stage.index == 0 for stage, _ in stages)
        self.is_last = any(stage.index == num_stages - 1 for stage, _ in stages)

    def run(self, batch: Batch, num_microbatches: int) -> None:
        """Add the gradient of the batch's micro-batches to the parameters' gradients."""
        start = 0
        for count, size in split_evenly(batch.num_samples, num_microbatches):
            end = start + count * size
            schedule = self._schedule_for(count, size)
            inputs = (batch.inputs[start:end].to(self._device, non_blocking=True),) if self._is_first else ()
            targets = batch.targets[start:end].to(self._device, non_blocking=True) if self.is_last else None
            if problem := _step(schedule, inputs, targets):
                raise problem
            start = end

    def _schedule_for(self, num_microbatches: int, size: int) -> Any:
        key = (num_microbatches, size)
        if key in self._ready:
            self._ready.move_to_end(key)
        else:
            self._ready[key] = self._make(num_microbatches, size)
            if len(self._ready) > _MAX_SCHEDULES:
                self._ready.popitem(last=False)
        return self._ready[key]

    def _make(self, num_microbatches: int, size: int) -> Any:
        num_parts = dist.get_world_size(self._group)
        made = schedule_class(self._schedule, num_microbatches, num_parts, self._num_stages)
        stages = [self._make_stage(stage, module, size) for stage, module in self._stages]
        which = stages[0] if made in (ScheduleGPipe, Schedule1F1B) else stages
        # The loss is weighted by what it counts: torch must not divide by the number of micro-batches as well.
        return made(which, num_microbatches, loss_fn=self._loss, scale_grads=False)

    def _make_stage(self, stage: Stage, module: nn.Module, size: int) -> SplittableStage:
        # Shapes are given, so that torch need not find them out by a pass of its own and by pickled messages.
        if stage.given is None:
            given = torch.empty((size, 1), device=self._device)  # what the first stage reads is not sent by anybody
        else:
            given = torch.empty(stage.given.shape(size), dtype=stage.given.dtype, device=self._device)
            given.requires_grad_(stage.is_trained_before)
        gives = torch.empty(stage.gives.shape(size), dtype=stage.gives.dtype, device=self._device)
        is_trained = stage.is_trained_before or any(parameter.requires_grad for parameter in stage.parameters())
        gives.requires_grad_(is_trained)
        return SplittableStage(
            module, stage.index, self._num_stages, self._device, input_args=given, output_args=gives, group=self._group
        )


def _step(schedule: Any, inputs: tuple[Tensor, ...], targets: Tensor | None) -> Exception | None:
    """Run a schedule. What a layer raised is returned as it is: torch puts it into words of its own, without it."""
    try:
        schedule.step(*inputs, target=targets, return_outputs=False)
    except RuntimeError as error:
        wraps = "failed to run forward" in str(error) or "Failed to run stage backward" in str(error)
        if isinstance(error.__cause__, Exception) and wraps:
            return error.__cause__
        raise
    return None


# The stages of a model: which blocks, parameters and buffers each has, and who computes it. Pure.


@dataclass(frozen=True)
class Stage:
    """A run of blocks."""

    index: int
    blocks: tuple[Block, ...]
    given: Wire | None  # what comes in; None for the first stage, which reads the data
    gives: Wire
    is_trained_before: bool  # whether a gradient is to be sent back

    def parameters(self) -> list[nn.Parameter]:
        return list({id(p): p for block in self.blocks for p in block.parameters()}.values())

    def buffers(self) -> list[Tensor]:
        return list({id(b): b for block in self.blocks for b in block.buffers()}.values())


def make_stages(chain: Chain, counts: Sequence[int]) -> list[Stage]:
    """Return stages of so many blocks each."""
    assert sum(counts) == len(chain.blocks) and min(counts) > 0
    stages: list[Stage] = []
    start, is_trained = 0, False
    for index, count in enumerate(counts):
        given = chain.wires[start - 1] if start else None
        blocks = chain.blocks[start : start + count]
        stages.append(Stage(index, blocks, given, chain.wires[start + count - 1], is_trained))
        is_trained = is_trained or any(p.requires_grad for block in blocks for p in block.parameters())
        start += count
    return stages


@dataclass(frozen=True)
class Ownership:
    """Which parts of the team hold each tensor of the model, by the name that `named_parameters` gives it.

    A weight that several stages use (tied embeddings) is held by each; the first of its holders speaks for it. What
    no stage uses is held by the first part, so that nothing gets lost.
    """

    parameters: dict[str, tuple[int, ...]]
    buffers: dict[str, tuple[int, ...]]

    def tied(self) -> dict[str, tuple[int, ...]]:
        """Return the parameters that more than one part holds."""
        return {name: parts for name, parts in self.parameters.items() if len(parts) > 1}


def share_out(model: nn.Module, stages: Sequence[Stage], part_of: Sequence[int]) -> Ownership:
    """Return who holds what when `part_of[i]` computes stage i. Raises ModelError for buffers that two parts share."""
    parameter_parts: dict[int, set[int]] = {}
    buffer_parts: dict[int, set[int]] = {}
    for stage in stages:
        for parameter in stage.parameters():
            parameter_parts.setdefault(id(parameter), set()).add(part_of[stage.index])
        for buffer in stage.buffers():
            buffer_parts.setdefault(id(buffer), set()).add(part_of[stage.index])
    parameters = {n: tuple(sorted(parameter_parts.get(id(p), {0}))) for n, p in model.named_parameters()}
    buffers = {n: tuple(sorted(buffer_parts.get(id(b), {0}))) for n, b in model.named_buffers()}
    for name, parts in buffers.items():
        if len(parts) > 1:
            raise ModelError(
                f"buffer '{name}' belongs to a module that is used in several stages, which would each count by "
                "themselves: give each place a module of its own, or put both into one stage with strategy.placement"
            )
    check_conserved(model, stages)
    return Ownership(parameters, buffers)


def check_conserved(model: nn.Module, stages: Sequence[Stage]) -> None:
    """Raise ModelError unless the stages have all parameters the model has, and no others."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    used = {id(parameter) for stage in stages for parameter in stage.parameters()}
    strange = sum(1 for stage in stages for parameter in stage.parameters() if id(parameter) not in names)
    if strange:
        raise ModelError(f"{strange} parameters of the stages are not the model's: it cannot be cut")
    lost = [name for key, name in names.items() if key not in used]
    total = sum(parameter.numel() for parameter in model.parameters())
    found = {id(p): p.numel() for stage in stages for p in stage.parameters()}
    unused = sum(parameter.numel() for name, parameter in model.named_parameters() if name in lost)
    assert sum(found.values()) + unused == total, "parameters were lost or doubled by the cut"


# How long each block of a model takes, measured where it will run.

_NUM_TRIALS = 3
_LONG_S = 0.5  # blocks that take longer are measured once: nothing disturbs them by much


def measure_blocks(chain: Chain, inputs: Tensor, computation: Computation) -> list[float]:
    """Return the seconds of a forward and a backward pass of each block on these inputs. Gradients are left empty.

    Local. The caller keeps what the model counts while it computes (`unchanged`).
    """
    times = []
    for block in chain.blocks:
        seconds, outputs = _once(block, inputs, computation)  # the first time allocates
        num_trials = _NUM_TRIALS if seconds < _LONG_S else 0
        for _ in range(num_trials):
            again, outputs = _once(block, inputs, computation)
            seconds = min(seconds, again)
        times.append(seconds)
        inputs = outputs
        for parameter in block.parameters():
            parameter.grad = None
    return times


def _once(block: object, inputs: Tensor, computation: Computation) -> tuple[float, Tensor]:
    assert callable(block)
    leaf = inputs.detach()
    if leaf.is_floating_point():
        leaf = leaf.clone().requires_grad_()
    started = time.perf_counter()
    with computation.autocast():
        outputs: Tensor = block(leaf)
    if outputs.requires_grad:
        outputs.backward(torch.ones_like(outputs))  # type: ignore[no-untyped-call]
    return time.perf_counter() - started, outputs.detach()


# What torch runs as a stage: its blocks one after the other, in the job's precision, maybe computed twice.


class StageModule(nn.Module):
    """The blocks of a stage. Their modules are those of the whole model: modes and weights are the same objects.

    With `splits_backward` torch computes the gradients of the inputs and those of the parameters one after the other.
    """

    def __init__(
        self, blocks: Sequence[Block], computation: Computation, *, recompute: bool, splits_backward: bool
    ) -> None:
        super().__init__()
        self._blocks = blocks
        self._computation = computation
        self._recompute = recompute
        self._splits_backward = splits_backward
        self.members = nn.ModuleList([module for block in blocks for module in block.modules])

    def forward(self, inputs: Tensor) -> Tensor:
        if not self._recompute:
            return self._run(inputs)
        outputs: Tensor = recomputed(self, self._run, inputs)
        return outputs

    def _run(self, inputs: Tensor) -> Tensor:
        inputs = self._computation.in_format(inputs)
        with self._computation.autocast():
            for block in self._blocks:
                inputs = block(inputs)
        outputs = inputs.contiguous()  # as its neighbour expects to receive it
        # torch detaches the output in place between the two, which a view cannot be: a linear layer's on 3 dimensions.
        return outputs.clone() if self._splits_backward and outputs._is_view() else outputs


# Bringing the optimizer states of all parts together on the first worker.


def collect_states(own: State | None, group: dist.ProcessGroup | None) -> State:
    """Return the states of all members as one on the group's first member, nothing on the others. Collective.

    A parameter that several members hold is taken from the first of them.
    """
    if group is None:
        return merge_states([own] if own is not None else [])
    if dist.get_rank(group):
        send_state(own or State({}, {}), 0, group)
        return State({}, {})
    others = range(1, dist.get_world_size(group))
    states = [own or State({}, {}), *(receive_state(source, group) for source in others)]
    return merge_states([state for state in states if state.values])


def merge_states(states: Sequence[State]) -> State:
    """Return one optimizer state of those of several optimizers over different parameters of one model."""
    assert states, "no part has anything to train"
    groups: list[dict[str, Any]] = []
    state: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    seen: set[str] = set()
    for number, one in enumerate(states):
        # Settings that are tensors are called after the number of their group, which is another one now.
        renamed = {name: f"$part{number}.{name}" for name in one.tensors if name.startswith("$") and number}
        for group in one.values["groups"]:
            parameters = {name: shape for name, shape in group["parameters"].items() if name not in seen}
            groups.append({"parameters": parameters, "settings": _renamed(group["settings"], renamed)})
        fresh = {name for group in one.values["groups"] for name in group["parameters"]} - seen
        seen |= fresh
        state.update({name: inner for name, inner in one.values["state"].items() if name in fresh})
        for name, tensor in one.tensors.items():
            tensors.setdefault(renamed.get(name, name), tensor)
    return State(tensors, {**states[0].values, "groups": groups, "state": state})


def _renamed(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"$tensor"}:
            return {"$tensor": names.get(value["$tensor"], value["$tensor"])}
        return {key: _renamed(inner, names) for key, inner in value.items()}
    return [_renamed(inner, names) for inner in value] if isinstance(value, list) else value
