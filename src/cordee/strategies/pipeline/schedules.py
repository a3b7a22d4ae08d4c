"""Running micro-batches through the stages, on torch.distributed.pipelining.

torch's stages want every micro-batch of a step to have one shape. A batch that does not divide evenly is run as two
schedules one after the other, of the micro-batches that have one sample more and of the others; the last, smaller batch
of an epoch gets schedules of its own. Nothing is padded, and gradients add up as they do with accumulation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)

from cordee.core import Batch
from cordee.strategies.pipeline.stages import Stage

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
            inputs = (batch.inputs[start:end].to(self._device),) if self._is_first else ()
            targets = batch.targets[start:end].to(self._device) if self.is_last else None
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

    def _make_stage(self, stage: Stage, module: nn.Module, size: int) -> PipelineStage:
        # Shapes are given, so that torch need not find them out by a pass of its own and by pickled messages.
        if stage.given is None:
            given = torch.empty((size, 1), device=self._device)  # what the first stage reads is not sent by anybody
        else:
            given = torch.empty(stage.given.shape(size), dtype=stage.given.dtype, device=self._device)
            given.requires_grad_(stage.is_trained_before)
        gives = torch.empty(stage.gives.shape(size), dtype=stage.gives.dtype, device=self._device)
        is_trained = stage.is_trained_before or any(parameter.requires_grad for parameter in stage.parameters())
        gives.requires_grad_(is_trained)
        return PipelineStage(
            module, stage.index, self._num_stages, self._device, input_args=given, output_args=gives, group=self._group
        )


def _step(schedule: Any, inputs: tuple[Tensor, ...], targets: Tensor | None) -> Exception | None:
    """Run a schedule. What a layer raised is returned as it is: torch puts it into words of its own, without it."""
    try:
        schedule.step(*inputs, target=targets, return_outputs=False)
    except RuntimeError as error:
        if isinstance(error.__cause__, Exception) and "failed to run forward" in str(error):
            return error.__cause__
        raise
    return None
