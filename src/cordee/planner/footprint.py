"""How much memory a worker takes at its worst: while it computes, or while it saves. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cordee.planner.prediction import Candidate, Work, mesh_of
from cordee.planner.profile import Block
from cordee.strategies.table import strategies_on


def replica_bytes(candidate: Candidate, work: Work, *, flat_copies: int = 0, has_optimizer: bool = True) -> float:
    """Return what a worker with the whole model takes; `flat_copies` are further buffers as large as the parameters."""
    profile = work.profile
    state = (2 + flat_copies) * profile.parameter_bytes + profile.buffer_bytes
    state += profile.optimizer_state_bytes if has_optimizer else 0
    samples = math.ceil(work.batch_size / candidate.workers)
    return _base(candidate, work) + state + _computing(work, samples)


def sharded_bytes(candidate: Candidate, work: Work, units: Sequence[int]) -> float:
    """Return what a worker with a slice of everything takes; units are gathered one after the other."""
    profile, workers = work.profile, candidate.workers
    own = (2 * profile.parameter_bytes + profile.optimizer_state_bytes) / workers
    # The next unit is gathered while one is computed, and its gradient is whole until it is scattered.
    gathered = 3 * max(units, default=0)
    computing = gathered + _computing(work, math.ceil(work.batch_size / workers))
    return _base(candidate, work) + profile.buffer_bytes + own + computing + _whole(work)


def part_bytes(
    candidate: Candidate,
    work: Work,
    bounds: Sequence[Sequence[tuple[int, int]]],
    kept: Sequence[float],
    *,
    num_slices: int,
    num_data: int,
    num_sharded: int,
) -> float:
    """Return what the worker with the largest part of the model takes: worker `i` has the chunks `bounds[i]`.

    `kept[i]` is of how many samples it keeps activations of each at once.
    """
    profile = work.profile
    beyond = profile.peak_bytes / max(1.0, profile.activation_bytes)
    worst = 0.0
    for chunks, samples in zip(bounds, kept, strict=True):
        blocks = [block for start, end in chunks for block in profile.blocks[start:end]]
        share = sum(block.parameter_bytes for block in blocks) / num_slices
        own = share * (2 + profile.optimizer_state_bytes / max(1, profile.parameter_bytes))
        own /= num_sharded
        kept_bytes = sum(_kept_bytes(block, num_slices) for block in blocks)
        worst = max(worst, own + kept_bytes * samples * beyond)
    reading = profile.input_bytes * work.batch_size / num_data
    # A sliced model is a copy, made before it is sliced; stages are the model's own layers.
    whole = _whole(work) - (0 if num_slices > 1 or num_sharded > 1 else profile.parameter_bytes)
    return _base(candidate, work) + worst + whole + profile.buffer_bytes + profile.fixed_bytes + reading


def _kept_bytes(block: Block, num_slices: int) -> float:
    """Return the activations of a sample that a worker keeps: what is inside a sliced block is sliced as well."""
    inside = max(0.0, block.activation_bytes - block.output_bytes)
    return block.activation_bytes - inside * block.splittable * (1 - 1 / num_slices)


def _base(candidate: Candidate, work: Work) -> float:
    """Return what a worker takes without its model; one on a mesh is a worker of the strategy that splits the model."""
    inner = strategies_on(mesh_of(candidate))
    name = inner[0] if inner else candidate.strategy
    return work.hardware.worker_bytes(name, candidate.workers, has_computed=work.profile.is_fixed_whole)


def _computing(work: Work, samples: float) -> float:
    """Return what the passes over `samples` take at their worst, and the input."""
    part = math.ceil(samples / work.accumulate)
    return part * work.profile.peak_bytes + work.profile.fixed_bytes + samples * work.profile.input_bytes


def _whole(work: Work) -> float:
    """Return what a worker has beside its part: the model when it is split, model and optimizer when they are saved.

    It does not add up with computing by rights. But what a process gave back in pieces it rarely can use again as a
    whole, so that the peaks of the process came out as these sums, and not as the larger of both.
    """
    return 2 * work.profile.parameter_bytes + work.profile.optimizer_state_bytes
