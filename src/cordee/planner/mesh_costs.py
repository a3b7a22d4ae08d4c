"""What strategies that split a model take: stages, slices, and replicas of both. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from cordee.core.mesh import Mesh
from cordee.planner.amounts import in_time
from cordee.planner.footprint import part_bytes
from cordee.planner.hardware import num_sums, ring_traffic, sharded_amount
from cordee.planner.machine import Amount
from cordee.planner.pipelines import Pipeline, cut, last_pass_s, num_ahead, num_chunks_of
from cordee.planner.prediction import Candidate, Prediction, Work, make_prediction, mesh_of
from cordee.planner.profile import Block
from cordee.strategies.table import STRATEGIES, CostModel, strategies_on

WORTH_SAYING = 0.01  # share of a step


def predict_mesh(candidate: Candidate, work: Work) -> Prediction:
    """Return what stages, slices and replicas of both take: the slices of a stage are neighbours, then the stages."""
    hardware, mesh = work.hardware, mesh_of(candidate)
    parts = _split(candidate, work, mesh)
    pipeline, optimizer_s = parts.pipeline, parts.optimizer_s / (mesh.pipeline * mesh.tensor)
    per_stage = mesh.num_shares * mesh.tensor
    # Of one pipeline, a slice of a stage on each.
    num_lanes = hardware.num_lanes(candidate.workers) / per_stage if mesh.pipeline > 1 else 1.0
    passes_s = last_pass_s(pipeline, num_lanes)
    largest = max(sum(block.parameter_bytes for block in blocks) for blocks in parts.blocks(work)) / mesh.tensor
    gradient_s = _gradient_s(work, mesh, largest)
    overhead_s = _overhead_s(candidate, work, mesh, pipeline.num_micro, largest)
    step_s = passes_s + parts.other_s + optimizer_s + gradient_s + overhead_s
    busy = [
        (sum(pipeline.forward_s[stage :: mesh.pipeline]) + sum(pipeline.backward_s[stage :: mesh.pipeline]))
        * pipeline.num_micro
        for stage in range(mesh.pipeline)
    ]
    is_idle = passes_s > 0 and mesh.pipeline > 1
    idle = 1 - sum(busy) / (min(mesh.pipeline, num_lanes) * passes_s) if is_idle else 0.0
    memory = part_bytes(
        candidate,
        work,
        parts.bounds_of_stages,
        parts.kept(),
        num_slices=mesh.tensor,
        num_data=mesh.num_shares,
        num_sharded=mesh.sharded,
    )
    sends_s = 2 * pipeline.send_s * pipeline.num_micro if mesh.pipeline > 1 else 0.0
    return make_prediction(
        candidate,
        work,
        step_s,
        max(busy) + optimizer_s + parts.other_s,
        min(gradient_s + parts.exchanged_s + sends_s + overhead_s, step_s),
        idle,
        memory,
        _traffic(work, mesh, parts, largest),
        _note(mesh, idle, gradient_s, parts.exchanged_s, overhead_s, step_s),
    )


class _Parts(NamedTuple):
    """A model that is cut into stages and slices."""

    bounds: Sequence[tuple[int, int]]  # blocks of each chunk; chunk c is on stage c modulo the stages
    samples: float  # of a micro-batch
    pipeline: Pipeline
    exchanged_s: float  # inside the layers, of a step
    optimizer_s: float  # for the whole model, on the slowest device
    other_s: float

    @property
    def bounds_of_stages(self) -> list[Sequence[tuple[int, int]]]:
        num_stages = self.pipeline.num_workers
        return [self.bounds[stage::num_stages] for stage in range(num_stages)]

    def blocks(self, work: Work) -> list[list[Block]]:
        """Return the blocks of each stage."""
        return [
            [block for start, end in bounds for block in work.profile.blocks[start:end]]
            for bounds in self.bounds_of_stages
        ]

    def kept(self) -> list[float]:
        """Return of how many samples each stage keeps the activations at once."""
        pipeline, num_stages = self.pipeline, self.pipeline.num_workers
        share = num_stages / len(self.bounds)
        return [
            self.samples * num_ahead(pipeline.schedule, stage, num_stages, pipeline.num_micro) * share
            for stage in range(num_stages)
        ]


def _split(candidate: Candidate, work: Work, mesh: Mesh) -> _Parts:
    """Cut the model so that the longest stage is as short as can be."""
    hardware, profile, num_stages = work.hardware, work.profile, mesh.pipeline
    num_micro = int(candidate.settings.get("microbatches", 1)) if num_stages > 1 else 1
    schedule = str(candidate.settings.get("schedule", "1f1b"))
    samples = work.batch_size / mesh.num_shares / num_micro
    slowest = [
        min(mesh.stage_members(stage), key=lambda member: hardware.devices[member].speed) for stage in range(num_stages)
    ]
    # Stages that wait for each other leave their cores to others: what counts is how many compute at once.
    num_busy = candidate.workers if num_stages == 1 else hardware.num_lanes(candidate.workers)
    timings = [hardware.step(profile, samples, member, num_busy) for member in slowest]
    weights = [[(f + b) for f, b in zip(timing.forward_s, timing.backward_s, strict=True)] for timing in timings]
    num_chunks = num_chunks_of(schedule, num_stages)  # of the model, one after the other on the stages
    bounds = cut([weights[chunk % num_stages] for chunk in range(num_chunks)], num_chunks)
    shrink = [_sliced(block.splittable, mesh.tensor) for block in profile.blocks]
    forward, backward, send_s, exchanged_s = [], [], 0.0, 0.0
    for chunk, (start, end) in enumerate(bounds):
        stage, own = chunk % num_stages, slice(start, end)
        inner_s = _inner_s(work, mesh, profile.blocks[own], samples)
        exchanged_s += 2 * inner_s * num_micro
        timing = timings[stage]
        forward.append(sum(t * k for t, k in zip(timing.forward_s[own], shrink[own], strict=True)) + inner_s)
        backward.append(sum(t * k for t, k in zip(timing.backward_s[own], shrink[own], strict=True)) + inner_s)
        if chunk + 1 < num_chunks:
            size = profile.blocks[end - 1].output_bytes * samples
            ways = zip(mesh.stage_members(stage), mesh.stage_members((stage + 1) % num_stages), strict=True)
            send_s = max(send_s, *(hardware.send_s(size, source, target) for source, target in ways))
    return _Parts(
        bounds,
        samples,
        Pipeline(forward, backward, send_s, num_micro, schedule, num_stages),
        exchanged_s,
        max(timing.optimizer_s for timing in timings),
        max(hardware.step(profile, samples * num_micro, member, candidate.workers).other_s for member in slowest),
    )


def _inner_s(work: Work, mesh: Mesh, blocks: Sequence[Block], samples: float) -> float:
    """Return the seconds that slices of some blocks sum their outputs in a pass."""
    if mesh.tensor == 1:
        return 0.0
    widest = _widest(work, mesh.same_stages())
    return sum(num_sums(block) * work.hardware.all_reduce_s(block.output_bytes * samples, widest) for block in blocks)


def _gradient_s(work: Work, mesh: Mesh, num_bytes: float) -> float:
    """Return the seconds that replicas sum their gradients; rings that leave a host share its network."""
    if mesh.num_shares == 1:
        return 0.0
    devices, rings = work.hardware.devices, mesh.same_parts()
    widest = _widest(work, rings)
    leaving = [ring for ring in rings if len({devices[member].host for member in ring}) > 1]
    per_host = Counter(host for ring in leaving for host in {devices[member].host for member in ring})
    gradient_s = work.hardware.all_reduce_s(num_bytes * max(per_host.values(), default=1), widest)
    return gradient_s * (1.5 if mesh.sharded > 1 else 1.0)


def _widest(work: Work, groups: Sequence[range]) -> range:
    """Return the group that is on most hosts."""
    return max(groups, key=lambda group: len({work.hardware.devices[member].host for member in group}))


def _overhead_s(candidate: Candidate, work: Work, mesh: Mesh, num_micro: int, largest: float) -> float:
    """Return what the strategies themselves take; `largest` is the bytes of parameters that a worker has at most."""
    hardware, profile, workers = work.hardware, work.profile, candidate.workers
    num_layers = sum(block.sliceable for block in profile.blocks)
    amounts: dict[CostModel, Amount] = {
        "stages": Amount(num_micro),
        "slices": Amount(num_layers * num_micro, num_bytes=largest * mesh.tensor),
        "shards": sharded_amount(profile),
    }
    overhead_s = sum(
        hardware.overhead_s(name, workers, amounts[STRATEGIES[name].cost_model]) for name in strategies_on(mesh)
    )
    if mesh.data > 1 and mesh.sharded == 1:
        overhead_s += hardware.copy_s(largest, workers)  # into one flat buffer
    return overhead_s


def _traffic(work: Work, mesh: Mesh, parts: _Parts, largest: float) -> float:
    """Return the bytes that a worker sends at most: to the next stage, to other replicas, to other slices."""
    blocks, samples = work.profile.blocks, work.batch_size / mesh.num_shares
    traffic = 2 * samples * max((blocks[end - 1].output_bytes for _, end in parts.bounds[:-1]), default=0.0)
    traffic += ring_traffic(largest, mesh.num_shares) * (1.5 if mesh.sharded > 1 else 1)
    if mesh.tensor > 1:
        outputs = sum(block.output_bytes for block in blocks if block.splittable)
        traffic += 2 * ring_traffic(outputs * samples, mesh.tensor)
    return traffic


def _sliced(splittable: float, num_slices: int) -> float:
    return 1 - splittable * (1 - 1 / num_slices)


def _note(mesh: Mesh, idle: float, gradient_s: float, exchanged_s: float, overhead_s: float, step_s: float) -> str:
    """Return what takes time beside computing, the largest first."""
    spent = {
        "all-reduces inside the layers take": exchanged_s if mesh.tensor > 1 else 0.0,
        "summing gradients over the replicas takes": gradient_s,
        "the strategy itself takes": overhead_s,
    }
    parts = [f"stages idle {idle:.0%} of the time"] if mesh.pipeline > 1 else []
    ordered = sorted(spent.items(), key=lambda item: -item[1])
    parts += [f"{what} {in_time(seconds)}" for what, seconds in ordered if seconds >= WORTH_SAYING * step_s]
    return "; ".join(parts) + (f" of a {in_time(step_s)} step" if len(parts) > (mesh.pipeline > 1) else "")
