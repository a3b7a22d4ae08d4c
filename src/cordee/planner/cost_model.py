"""The cost model: step time, memory, traffic and idle time of each strategy. Pure.

Times come from the profile and the hardware; what a strategy does with them follows its implementation where there is
one (docs/reference/planner.md has the formulas).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from cordee.core.errors import CordeeError
from cordee.core.mesh import Mesh
from cordee.monitoring.wording import plural
from cordee.planner.amounts import in_bytes, in_time
from cordee.planner.hardware import gathering_s, num_sums, ring_traffic, sharded_amount, sharded_units, summing_s
from cordee.planner.history import PastRun, Way, plain_settings, refine, shift_of, usable
from cordee.planner.measurements import Amount, Block, Timing
from cordee.planner.pipelines import Pipeline, cut, last_pass_s, num_ahead, num_chunks_of
from cordee.planner.prediction import Candidate, Prediction, Work, make_prediction, mesh_of
from cordee.strategies.table import STRATEGIES, CostModel, strategies_on


def predict(candidate: Candidate, work: Work) -> Prediction:
    """Return what `candidate` would take for `work`, by the model and by earlier runs of it."""
    found = _modelled(candidate, work)
    runs: tuple[PastRun, ...] = ()
    if work.ways:
        settings = plain_settings(candidate.strategy, candidate.workers, candidate.settings, work.batch_size)
        same = Candidate(strategy=candidate.strategy, workers=candidate.workers, settings=settings)
        runs = next((way.runs for way in work.ways if way.is_of(same)), ())
    return refine(found, runs, work.shifts.get(candidate.workers, 1.0), is_reliable=work.is_reliable)


def with_runs(work: Work, ways: Iterable[Way], now: float) -> Work:
    """Return the work with those earlier runs of it that count at the time `now`, in unix seconds."""
    known: list[Way] = []
    ratios: defaultdict[int, list[float]] = defaultdict(list)
    for way in ways:
        try:
            modelled_s = _modelled(way.candidate, work).step_s if work.is_reliable else None
        except (CordeeError, ValueError, KeyError):
            modelled_s = None  # the model cannot say: a strategy of another kind, or too few blocks
        if runs := usable(way.runs, modelled_s, now):
            known.append(msgspec.structs.replace(way, runs=runs))
            if modelled_s:
                ratios[way.workers].append(statistics.median(run.step_s for run in runs) / modelled_s)
    shifts = {workers: shift_of(found) for workers, found in ratios.items()}
    return dataclasses.replace(work, ways=tuple(known), shifts=shifts)


def _modelled(candidate: Candidate, work: Work) -> Prediction:
    return MODELS[STRATEGIES[candidate.strategy].cost_model](candidate, work)


def _alone(candidate: Candidate, work: Work) -> Prediction:
    step = _passes(work, work.batch_size, 0, 1)
    memory = replica_bytes(candidate, work)
    return make_prediction(candidate, work, step.step_s, step.step_s, 0.0, 0.0, memory, 0.0, "no exchange")


def _replicas(candidate: Candidate, work: Work) -> Prediction:
    members, hardware = range(candidate.workers), work.hardware
    steps = _shares(work, members)
    slowest = max(step.step_s for step in steps)
    gradient_bytes = work.profile.parameter_bytes
    exchange_s = hardware.exchange_s("all_reduce", gradient_bytes, members)
    exposed_s = summing_s(hardware, gradient_bytes, members)
    exposed_s += hardware.overhead_s(candidate.strategy, candidate.workers, Amount(num_bytes=gradient_bytes))
    if hardware.overlaps:  # all but what the backward pass hides; the first layers' gradients come last
        hidden_s = max(sum(step.backward_s) for step in steps)
        exposed_s = max(exchange_s - hidden_s, exchange_s / 25)
    idle = _waiting([step.step_s for step in steps], slowest + exposed_s)
    memory = replica_bytes(candidate, work, flat_copies=1)
    traffic = ring_traffic(gradient_bytes, candidate.workers)
    note = (
        f"all-reduce of {in_bytes(gradient_bytes)} takes {in_time(exposed_s)} of a {in_time(slowest + exposed_s)} step"
    )
    return make_prediction(candidate, work, slowest + exposed_s, slowest, exposed_s, idle, memory, traffic, note)


def _windows(candidate: Candidate, work: Work) -> Prediction:
    """One all-reduce of all parameters for every `sync_every` steps, and in each step one in each group of workers."""
    members, hardware = range(candidate.workers), work.hardware
    steps = _shares(work, members)
    slowest = max(step.step_s for step in steps)
    num_bytes = work.profile.parameter_bytes
    sync_every = int(candidate.settings.get("sync_every", 1))
    exchange_s = max(summing_s(hardware, num_bytes, members), hardware.exchange_s("all_reduce", num_bytes, members))
    size = int(candidate.settings.get("workers_per_group", 1))
    exposed_s = exchange_s / sync_every + (summing_s(hardware, num_bytes, range(size)) if size > 1 else 0.0)
    idle = _waiting([step.step_s for step in steps], slowest + exposed_s)
    memory = replica_bytes(candidate, work, flat_copies=2)  # what all began with, and what is on its way
    traffic = ring_traffic(num_bytes, candidate.workers) / sync_every + ring_traffic(num_bytes, size)
    note = f"all-reduce of {in_bytes(num_bytes)} every {sync_every} steps; workers differ in between"
    if size > 1:
        note += f", but for those of a group of {size}, with an all-reduce in every step"
    return make_prediction(candidate, work, slowest + exposed_s, slowest, exposed_s, idle, memory, traffic, note)


def _shards(candidate: Candidate, work: Work) -> Prediction:
    members, hardware, profile = range(candidate.workers), work.hardware, work.profile
    steps = _shares(work, members)
    # The optimizer works on a slice of the parameters.
    computes = [step.step_s - step.optimizer_s * (1 - 1 / candidate.workers) for step in steps]
    units = sharded_units(profile)
    gather_s, scatter_s = gathering_s(hardware, units, members)
    exchange_s = 2 * gather_s + scatter_s  # gathered for both passes
    exposed_s = exchange_s + hardware.overhead_s(candidate.strategy, candidate.workers, sharded_amount(profile))
    if hardware.overlaps:
        exposed_s = max(exchange_s - max(sum(s.forward_s) + sum(s.backward_s) for s in steps), exchange_s / 10)
    slowest = max(computes)
    memory = sharded_bytes(candidate, work, units)
    traffic = 1.5 * ring_traffic(profile.parameter_bytes, candidate.workers)
    gathers = f"gathering {in_bytes(profile.parameter_bytes)} of parameters twice and scattering their gradients"
    note = f"{gathers} takes {in_time(exposed_s)} of a {in_time(slowest + exposed_s)} step"
    idle = _waiting(computes, slowest + exposed_s)
    return make_prediction(candidate, work, slowest + exposed_s, slowest, exposed_s, idle, memory, traffic, note)


def _servers(candidate: Candidate, work: Work) -> Prediction:
    members, hardware, profile = range(candidate.workers), work.hardware, work.profile
    servers = int(candidate.settings.get("servers", 1))
    staleness = candidate.settings.get("staleness", 0)
    steps = _shares(work, members)
    computes = [step.step_s - step.optimizer_s for step in steps]
    exchange_s = hardware.serve_s(candidate.strategy, profile.parameter_bytes, members, servers)
    update_s = max(step.optimizer_s for step in steps) / servers
    slowest, mean = max(computes), sum(computes) / len(computes)
    pace = slowest if staleness != "unbounded" else len(computes) / sum(1 / seconds for seconds in computes)
    update_s *= 1 if staleness == 0 else candidate.workers  # synchronous: one update for all, else one for each push
    step_s = pace + exchange_s + update_s
    idle = _waiting(computes, step_s) if staleness != "unbounded" else 0.0
    memory = replica_bytes(candidate, work, flat_copies=2, has_optimizer=False)  # to send from, to get into
    note = (
        f"sending and getting {in_bytes(profile.parameter_bytes)} through {plural(servers, 'server')} takes "
        f"{in_time(exchange_s + update_s)} of a {in_time(step_s)} step"
    )
    traffic = float(profile.parameter_bytes)
    compute_s = max(mean, pace)
    return make_prediction(candidate, work, step_s, compute_s, exchange_s + update_s, idle, memory, traffic, note)


def _passes(work: Work, samples: float, member: int, num_members: int) -> Timing:
    """Return a step over `samples`, computed in the job's number of parts."""
    if work.accumulate == 1:
        return work.hardware.step(work.profile, samples, member, num_members)
    part = work.hardware.step(work.profile, samples / work.accumulate, member, num_members)
    whole = work.hardware.step(work.profile, samples, member, num_members)
    return msgspec.structs.replace(
        part.times(work.accumulate), samples=round(samples), optimizer_s=whole.optimizer_s, other_s=whole.other_s
    )


def _shares(work: Work, members: Sequence[int]) -> list[Timing]:
    """Return the steps of members that have an equal share of the batch each; alike members are asked once."""
    share = work.batch_size / len(members)
    known: dict[float, Timing] = {}
    steps = []
    for member in members:
        speed = work.hardware.devices[member].speed
        if speed not in known:
            known[speed] = _passes(work, share, member, len(members))
        steps.append(known[speed])
    return steps


def _waiting(computes: Sequence[float], step_s: float) -> float:
    return sum(max(computes) - seconds for seconds in computes) / (len(computes) * step_s) if step_s else 0.0


WORTH_SAYING = 0.01  # share of a step


def predict_mesh(candidate: Candidate, work: Work) -> Prediction:
    """Return what stages, slices and replicas of both take: the slices of a stage are neighbours, then the stages."""
    hardware, mesh = work.hardware, mesh_of(candidate)
    parts = split_model(candidate, work, mesh)
    pipeline, optimizer_s = parts.pipeline, parts.optimizer_s / (mesh.pipeline * mesh.tensor)
    per_stage = mesh.num_shares * mesh.tensor
    # Of one pipeline, a slice of a stage on each.
    num_lanes = hardware.num_lanes(candidate.workers) / per_stage if mesh.pipeline > 1 else 1.0
    passes_s = last_pass_s(pipeline, num_lanes)
    largest = parts.largest_bytes(work) / mesh.tensor
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
        computed_again=parts.samples if candidate.settings.get("recompute") else 0.0,
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


class Parts(NamedTuple):
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

    def largest_bytes(self, work: Work) -> int:
        """Return the bytes of parameters of the stage that has most."""
        blocks = work.profile.blocks
        return max(
            sum(block.parameter_bytes for start, end in bounds for block in blocks[start:end])
            for bounds in self.bounds_of_stages
        )

    def kept(self) -> list[float]:
        """Return of how many samples each stage keeps the activations at once."""
        pipeline, num_stages = self.pipeline, self.pipeline.num_workers
        share = num_stages / len(self.bounds)
        return [
            self.samples * num_ahead(pipeline.schedule, stage, num_stages, pipeline.num_micro) * share
            for stage in range(num_stages)
        ]


def split_model(candidate: Candidate, work: Work, mesh: Mesh) -> Parts:
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
    if num_busy < candidate.workers:  # but they take turns on it, which costs more than to have it alone
        shares = [hardware.step(profile, samples, member, candidate.workers) for member in slowest]
        turns = [share.times(num_busy / candidate.workers) for share in shares]
        timings = [timing.at_least(turn) for timing, turn in zip(timings, turns, strict=True)]
    weights = [[(f + b) for f, b in zip(timing.forward_s, timing.backward_s, strict=True)] for timing in timings]
    bounds = _bounds(candidate.settings, weights, profile.blocks, num_stages)
    num_chunks = len(bounds)  # of the model, one after the other on the stages
    again = 1.0 if candidate.settings.get("recompute") else 0.0  # forward passes that backward passes begin with
    shrink = [_sliced(block.splittable, mesh.tensor) for block in profile.blocks]
    forward, backward, send_s, exchanged_s = [], [], 0.0, 0.0
    for chunk, (start, end) in enumerate(bounds):
        stage, own = chunk % num_stages, slice(start, end)
        inner_s = _inner_s(work, mesh, profile.blocks[own], samples)
        exchanged_s += 2 * inner_s * num_micro
        timing = timings[stage]
        forward.append(sum(t * k for t, k in zip(timing.forward_s[own], shrink[own], strict=True)) + inner_s)
        backward.append(sum(t * k for t, k in zip(timing.backward_s[own], shrink[own], strict=True)) + inner_s)
        backward[-1] += again * forward[-1]
        if chunk + 1 < num_chunks:
            size = profile.blocks[end - 1].output_bytes * samples
            ways = zip(mesh.stage_members(stage), mesh.stage_members((stage + 1) % num_stages), strict=True)
            send_s = max(send_s, *(hardware.send_s(size, source, target) for source, target in ways))
    return Parts(
        bounds,
        samples,
        Pipeline(forward, backward, send_s, num_micro, schedule, num_stages),
        exchanged_s,
        max(timing.optimizer_s for timing in timings),
        max(hardware.step(profile, samples * num_micro, member, candidate.workers).other_s for member in slowest),
    )


def _bounds(
    settings: Mapping[str, Any], weights: Sequence[Sequence[float]], blocks: Sequence[Block], num_stages: int
) -> list[tuple[int, int]]:
    """Return the blocks of each chunk: as `placement` says, else so that the longest chunk is as short as can be.

    `weights[stage][block]` is how long a block takes. Raises JobError for a placement that is none of these blocks.
    """
    if placement := settings.get("placement"):
        from cordee.models.cutting import cut_by_hand  # which imports torch: simulations do without

        counts = cut_by_hand([(block.name,) for block in blocks], placement)
        stops = list(itertools.accumulate(counts))
        return list(zip([0, *stops[:-1]], stops, strict=True))
    num_chunks = settings.get("stages") or num_chunks_of(settings.get("schedule", "1f1b"), num_stages)
    return cut([weights[chunk % num_stages] for chunk in range(num_chunks)], num_chunks)


def _inner_s(work: Work, mesh: Mesh, blocks: Sequence[Block], samples: float) -> float:
    """Return the seconds that slices of some blocks sum their outputs in a pass."""
    if mesh.tensor == 1:
        return 0.0
    widest = _widest(work, mesh.same_stages())
    return sum(
        num_sums(block) * work.hardware.exchange_s("all_reduce", block.output_bytes * samples, widest)
        for block in blocks
    )


def _gradient_s(work: Work, mesh: Mesh, num_bytes: float) -> float:
    """Return the seconds that replicas sum their gradients; rings that leave a host share its network."""
    if mesh.num_shares == 1:
        return 0.0
    devices, rings = work.hardware.devices, mesh.same_parts()
    widest = _widest(work, rings)
    leaving = [ring for ring in rings if len({devices[member].host for member in ring}) > 1]
    per_host = Counter(host for ring in leaving for host in {devices[member].host for member in ring})
    gradient_s = work.hardware.exchange_s("all_reduce", num_bytes * max(per_host.values(), default=1), widest)
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


def _traffic(work: Work, mesh: Mesh, parts: Parts, largest: float) -> float:
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
    return _base(candidate, work) + profile.buffer_bytes + own + computing + _built(work)


def part_bytes(
    candidate: Candidate,
    work: Work,
    bounds: Sequence[Sequence[tuple[int, int]]],
    kept: Sequence[float],
    *,
    num_slices: int,
    num_data: int,
    num_sharded: int,
    computed_again: float = 0.0,
) -> float:
    """Return what the worker with the largest part of the model takes: worker `i` has the chunks `bounds[i]`.

    `kept[i]` is of how many samples it keeps activations of each at once. With activations that are computed again,
    for `computed_again` samples at a time, it keeps the chunks' inputs instead.
    """
    profile = work.profile
    beyond = profile.peak_bytes / max(1.0, profile.activation_bytes)
    worst = 0.0
    for chunks, samples in zip(bounds, kept, strict=True):
        blocks = [block for start, end in chunks for block in profile.blocks[start:end]]
        share = sum(block.parameter_bytes for block in blocks) / num_slices
        own = share * (2 + profile.optimizer_state_bytes / max(1, profile.parameter_bytes))
        own /= num_sharded
        kept_bytes = samples * sum(_kept_bytes(block, num_slices) for block in blocks)
        if computed_again:
            inputs = [profile.blocks[start - 1].output_bytes if start else profile.input_bytes for start, _ in chunks]
            kept_bytes = min(kept_bytes, kept_bytes * computed_again / samples + samples * sum(inputs))
        worst = max(worst, own + kept_bytes * beyond)
    reading = profile.input_bytes * work.batch_size / num_data
    # Stages are saved by those who have them.
    whole = _whole(work) if num_slices > 1 or num_sharded > 1 else _built(work)
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


_RECENT_BYTES = 16 << 20  # as in core/file_memory.py, which imports torch


def _built(work: Work) -> float:
    """Return what a worker has in memory of the whole model while it is built, and tried, in files."""
    return min(work.profile.parameter_bytes, _RECENT_BYTES)


def _whole(work: Work) -> float:
    """Return what a worker has beside its part: the model when it is split, model and optimizer when they are saved.

    It does not add up with computing by rights. But what a process gave back in pieces it rarely can use again as a
    whole, so that the peaks of the process came out as these sums, and not as the larger of both.
    """
    return 2 * work.profile.parameter_bytes + work.profile.optimizer_state_bytes


MODELS: Mapping[CostModel, Callable[[Candidate, Work], Prediction]] = {
    "alone": _alone,
    "replicas": _replicas,
    "windows": _windows,
    "shards": _shards,
    "stages": predict_mesh,
    "slices": predict_mesh,
    "mesh": predict_mesh,
    "servers": _servers,
}
