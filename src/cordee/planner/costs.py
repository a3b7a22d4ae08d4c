"""The cost model: step time, memory, traffic and idle time of each strategy. Pure.

Times come from the profile and the site; what a strategy does with them follows its implementation where there is
one (docs/planner.md has the formulas).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from cordee.planner.footprint import part_bytes, replica_bytes, sharded_bytes
from cordee.planner.machine import Amount
from cordee.planner.pipelines import Pipeline, cut, last_pass_s, num_ahead, num_chunks_of
from cordee.planner.prediction import Candidate, Prediction, Work
from cordee.planner.profile import Block, ModelProfile, Timing
from cordee.planner.site import Site

DEFAULT_EVERY = 16  # steps between two averagings of local_sgd
UNIT_BYTES = 4 << 20  # of sharded, as in its settings


def predict(candidate: Candidate, work: Work) -> Prediction:
    """Return what `candidate` would take for `work`."""
    return MODELS[candidate.strategy](candidate, work)


def _single(candidate: Candidate, work: Work) -> Prediction:
    step = _passes(work, work.batch_size, 0, 1)
    memory = replica_bytes(candidate, work)
    return _prediction(candidate, work, step.step_s, step.step_s, 0.0, 0.0, memory, 0.0, "no exchange")


def _data_parallel(candidate: Candidate, work: Work) -> Prediction:
    members, site = range(candidate.workers), work.site
    steps, _ = _shares(work, members)
    slowest = max(step.step_s for step in steps)
    gradient_bytes = work.profile.parameter_bytes
    exchange_s = site.all_reduce_s(gradient_bytes, members)
    exposed_s = summing_s(site, gradient_bytes, members)
    exposed_s += site.overhead_s("data_parallel", candidate.workers, Amount(num_bytes=gradient_bytes))
    if site.overlaps:  # all but what the backward pass hides; the first layers' gradients come last
        hidden_s = max(sum(step.backward_s) for step in steps)
        exposed_s = max(exchange_s - hidden_s, exchange_s / 25)
    idle = _waiting([step.step_s for step in steps], slowest + exposed_s)
    memory = replica_bytes(candidate, work, flat_copies=1)
    traffic = _ring_traffic(gradient_bytes, candidate.workers)
    note = (
        f"all-reduce of {in_bytes(gradient_bytes)} takes {in_time(exposed_s)} of a {in_time(slowest + exposed_s)} step"
    )
    return _prediction(candidate, work, slowest + exposed_s, slowest, exposed_s, idle, memory, traffic, note)


def _sharded(candidate: Candidate, work: Work) -> Prediction:
    members, site, profile = range(candidate.workers), work.site, work.profile
    steps, _ = _shares(work, members)
    # The optimizer works on a slice of the parameters.
    computes = [step.step_s - step.optimizer_s * (1 - 1 / candidate.workers) for step in steps]
    units = sharded_units(profile)
    gather_s, scatter_s = gathering_s(site, units, members)
    exchange_s = 2 * gather_s + scatter_s  # gathered for both passes
    exposed_s = exchange_s + site.overhead_s("sharded", candidate.workers, sharded_amount(profile))
    if site.overlaps:
        exposed_s = max(exchange_s - max(sum(s.forward_s) + sum(s.backward_s) for s in steps), exchange_s / 10)
    slowest = max(computes)
    memory = sharded_bytes(candidate, work, units)
    traffic = 1.5 * _ring_traffic(profile.parameter_bytes, candidate.workers)
    note = f"gathers {in_bytes(profile.parameter_bytes)} of parameters twice a step"
    idle = _waiting(computes, slowest + exposed_s)
    return _prediction(candidate, work, slowest + exposed_s, slowest, exposed_s, idle, memory, traffic, note)


def _local_sgd(candidate: Candidate, work: Work) -> Prediction:
    every = int(candidate.settings.get("every", DEFAULT_EVERY))
    members = range(candidate.workers)
    steps, _ = _shares(work, members)
    slowest = max(step.step_s for step in steps)
    exposed_s = work.site.all_reduce_s(work.profile.parameter_bytes, members) / every
    memory = replica_bytes(candidate, work, flat_copies=1)
    traffic = _ring_traffic(work.profile.parameter_bytes, candidate.workers) / every
    idle = _waiting([step.step_s for step in steps], slowest + exposed_s)
    note = f"averages the parameters every {every} steps, so it is not the same training"
    return _prediction(candidate, work, slowest + exposed_s, slowest, exposed_s, idle, memory, traffic, note)


def _parameter_server(candidate: Candidate, work: Work) -> Prediction:
    members, site, profile = range(candidate.workers), work.site, work.profile
    servers = int(candidate.settings.get("servers", 1))
    staleness = candidate.settings.get("staleness", 0)
    steps, _ = _shares(work, members)
    computes = [step.step_s - step.optimizer_s for step in steps]
    exchange_s = site.serve_s(profile.parameter_bytes, members, servers)
    update_s = max(step.optimizer_s for step in steps) / servers
    slowest, mean = max(computes), sum(computes) / len(computes)
    pace = slowest if staleness != "unbounded" else len(computes) / sum(1 / seconds for seconds in computes)
    update_s *= 1 if staleness == 0 else candidate.workers  # in step one update for all, else one for each push
    step_s = pace + exchange_s + update_s
    idle = _waiting(computes, step_s) if staleness != "unbounded" else 0.0
    memory = replica_bytes(candidate, work, flat_copies=2)  # one to send from, one to get into
    note = f"each worker sends and gets {in_bytes(profile.parameter_bytes)} a step through {_plural(servers, 'server')}"
    traffic = float(profile.parameter_bytes)
    compute_s = max(mean, pace)
    return _prediction(candidate, work, step_s, compute_s, exchange_s + update_s, idle, memory, traffic, note)


class Mesh(NamedTuple):
    """How many workers of a strategy there are along each axis."""

    num_data: int = 1
    num_stages: int = 1
    num_slices: int = 1
    num_sharded: int = 1  # of those along the data axis, that have slices of the optimizer and the gradients

    @property
    def is_sharded(self) -> bool:
        return self.num_sharded > 1


def mesh_of(candidate: Candidate) -> Mesh:
    """Return the axes that a candidate's workers are on."""
    workers = candidate.workers
    if candidate.strategy == "pipeline":
        return Mesh(num_stages=workers)
    if candidate.strategy == "tensor":
        return Mesh(num_slices=workers)
    if candidate.strategy != "hybrid":
        return Mesh(num_data=workers)
    axes: Mapping[str, int] = candidate.settings["mesh"]
    return Mesh(
        num_data=axes.get("data", 1) * axes.get("sharded", 1),
        num_stages=axes.get("pipeline", 1),
        num_slices=axes.get("tensor", 1),
        num_sharded=axes.get("sharded", 1),
    )


def _mesh(candidate: Candidate, work: Work) -> Prediction:
    """Data over tensor over pipeline: members of a slice are neighbours, then those of a replica, then stages."""
    site, profile = work.site, work.profile
    mesh = mesh_of(candidate)
    num_data, num_stages, num_slices, is_sharded = mesh.num_data, mesh.num_stages, mesh.num_slices, mesh.is_sharded
    num_micro = int(candidate.settings.get("microbatches", 1)) if num_stages > 1 else 1
    schedule = str(candidate.settings.get("schedule", "1f1b"))
    samples = work.batch_size / num_data / num_micro
    per_stage = num_data * num_slices
    first = [stage * per_stage for stage in range(num_stages)]  # a device of each stage
    # Stages that wait for each other leave their cores to others: what counts is how many compute at once.
    num_lanes = site.num_lanes(candidate.workers)
    num_busy = candidate.workers if num_stages == 1 else num_lanes
    timings = [site.step(profile, samples, member, num_busy) for member in first]
    weights = [[(f + b) for f, b in zip(timing.forward_s, timing.backward_s, strict=True)] for timing in timings]
    num_chunks = num_chunks_of(schedule, num_stages)  # of the model, one after the other on the stages
    bounds = cut([weights[chunk % num_stages] for chunk in range(num_chunks)], num_chunks)
    slices = list(range(num_slices))
    forward, backward, sends, exchanged = [], [], 0.0, 0.0
    for chunk, (start, end) in enumerate(bounds):
        stage = chunk % num_stages
        shrink = [_sliced(profile.blocks[i].splittable, num_slices) for i in range(start, end)]
        inner = 0.0
        if num_slices > 1:
            for block in profile.blocks[start:end]:
                inner += num_sums(block) * site.all_reduce_s(block.output_bytes * samples, slices)
        exchanged += 2 * inner * num_micro
        forward.append(sum(t * k for t, k in zip(timings[stage].forward_s[start:end], shrink, strict=True)) + inner)
        backward.append(sum(t * k for t, k in zip(timings[stage].backward_s[start:end], shrink, strict=True)) + inner)
        if chunk + 1 < num_chunks:
            size = profile.blocks[end - 1].output_bytes * samples
            sends = max(sends, site.send_s(size, first[stage], first[(stage + 1) % num_stages]))
    lanes_each = num_lanes / per_stage if num_stages > 1 else 1.0  # of one pipeline, a slice of a stage on each
    passes_s = last_pass_s(Pipeline(forward, backward, sends, num_micro, schedule, num_stages), lanes_each)
    other_s = max(site.step(profile, samples * num_micro, member, candidate.workers).other_s for member in first)
    optimizer_s = max(t.optimizer_s for t in timings) / (num_stages * num_slices)
    chunk_bytes = [sum(block.parameter_bytes for block in profile.blocks[a:b]) for a, b in bounds]
    largest = max(sum(chunk_bytes[stage::num_stages]) for stage in range(num_stages)) / num_slices
    gradient_s = site.all_reduce_s(largest, range(num_data)) if num_data > 1 else 0.0
    gradient_s *= 1.5 if is_sharded else 1.0
    busy = [
        (sum(forward[stage::num_stages]) + sum(backward[stage::num_stages])) * num_micro for stage in range(num_stages)
    ]
    overhead_s = site.overhead_s("pipeline", candidate.workers, Amount(num_micro)) if num_stages > 1 else 0.0
    if num_slices > 1:
        num_layers = sum(block.sliceable for block in profile.blocks)
        overhead_s += site.overhead_s("tensor", candidate.workers, Amount(num_layers * num_micro))
    if is_sharded:
        overhead_s += site.overhead_s("sharded", candidate.workers, sharded_amount(profile))
    elif num_data > 1:
        overhead_s += site.copy_s(largest, candidate.workers)  # into one flat buffer
    step_s = passes_s + other_s + optimizer_s + gradient_s + overhead_s
    kept = [
        samples * num_ahead(schedule, stage, num_stages, num_micro) * num_stages / num_chunks
        for stage in range(num_stages)
    ]
    memory = part_bytes(
        candidate,
        work,
        [bounds[stage::num_stages] for stage in range(num_stages)],
        kept,
        num_slices=num_slices,
        num_data=num_data,
        num_sharded=mesh.num_sharded,
    )
    idle = 1 - sum(busy) / (min(num_stages, lanes_each) * passes_s) if passes_s and num_stages > 1 else 0.0
    stage_traffic = max((profile.blocks[end - 1].output_bytes for _, end in bounds[:-1]), default=0.0)
    traffic = stage_traffic * work.batch_size / num_data * 2
    traffic += _ring_traffic(largest, num_data) * (1.5 if is_sharded else 1)
    if num_slices > 1:
        outputs = sum(b.output_bytes for b in profile.blocks if b.splittable)
        traffic += 2 * _ring_traffic(outputs * work.batch_size / num_data, num_slices)
    communication_s = gradient_s + exchanged + 2 * sends * num_micro * (num_stages > 1) + overhead_s
    note = _mesh_note(num_stages, num_slices, idle, exchanged, step_s)
    return _prediction(
        candidate,
        work,
        step_s,
        max(busy) + optimizer_s + other_s,
        min(communication_s, step_s),
        idle,
        memory,
        traffic,
        note,
    )


MODELS: Mapping[str, Callable[[Candidate, Work], Prediction]] = {
    "single": _single,
    "data_parallel": _data_parallel,
    "sharded": _sharded,
    "parameter_server": _parameter_server,
    "local_sgd": _local_sgd,
    "pipeline": _mesh,
    "tensor": _mesh,
    "hybrid": _mesh,
}


def _passes(work: Work, samples: float, member: int, num_members: int) -> Timing:
    """Return a step over `samples`, computed in the job's number of parts."""
    if work.accumulate == 1:
        return work.site.step(work.profile, samples, member, num_members)
    part = work.site.step(work.profile, samples / work.accumulate, member, num_members)
    whole = work.site.step(work.profile, samples, member, num_members)
    return Timing(
        num_processes=part.num_processes,
        num_threads=part.num_threads,
        samples=round(samples),
        forward_s=tuple(seconds * work.accumulate for seconds in part.forward_s),
        backward_s=tuple(seconds * work.accumulate for seconds in part.backward_s),
        optimizer_s=whole.optimizer_s,
        other_s=whole.other_s,
    )


def _shares(work: Work, members: Sequence[int]) -> tuple[list[Timing], float]:
    """Return the steps of members that have an equal share of the batch each; alike members are asked once."""
    share = work.batch_size / len(members)
    known: dict[float, Timing] = {}
    steps = []
    for member in members:
        speed = work.site.devices[member].speed
        if speed not in known:
            known[speed] = _passes(work, share, member, len(members))
        steps.append(known[speed])
    return steps, share


def sharded_units(profile: ModelProfile) -> list[int]:
    """Return the bytes that `sharded` gathers at once: blocks that are large enough, and what is left, together."""
    sizes = [block.parameter_bytes for block in profile.blocks]
    large = [size for size in sizes if size >= UNIT_BYTES]
    return [*large, sum(size for size in sizes if size < UNIT_BYTES)]


def sharded_amount(profile: ModelProfile) -> Amount:
    return Amount(len(sharded_units(profile)), profile.num_tensors, profile.parameter_bytes)


def summing_s(site: Site, num_bytes: float, members: Sequence[int]) -> float:
    """Return the seconds to copy gradients into one flat buffer and to sum it over the members."""
    return site.copy_s(num_bytes, len(members)) + site.all_reduce_s(num_bytes, members)


def gathering_s(site: Site, units: Sequence[int], members: Sequence[int]) -> tuple[float, float]:
    """Return the seconds to gather all units and copy them into the parameters, and to scatter their gradients."""
    copy_s = site.copy_s(sum(units), len(members))
    gather_s = copy_s + sum(site.all_gather_s(size, members) for size in units)
    return gather_s, copy_s + sum(site.reduce_scatter_s(size, members) for size in units)


def num_sums(block: Block) -> float:
    """Return how often the outputs of a sliced block are summed in a forward pass, and gradients in a backward pass.

    Once for two layers, of which the first has a slice of its outputs and the second of its inputs.
    """
    return block.sliceable / 2 if block.splittable else 0.0


def _sliced(splittable: float, num_slices: int) -> float:
    return 1 - splittable * (1 - 1 / num_slices)


def _ring_traffic(num_bytes: float, num_workers: int) -> float:
    """Return what each worker sends in an all-reduce that is as sparing as possible."""
    return 2 * (num_workers - 1) / num_workers * num_bytes


def _waiting(computes: Sequence[float], step_s: float) -> float:
    return sum(max(computes) - seconds for seconds in computes) / (len(computes) * step_s) if step_s else 0.0


def _prediction(
    candidate: Candidate,
    work: Work,
    step_s: float,
    compute_s: float,
    communication_s: float,
    idle: float,
    memory: float,
    traffic: float,
    note: str,
) -> Prediction:
    return Prediction(
        strategy=candidate.strategy,
        workers=candidate.workers,
        settings=candidate.settings,
        step_s=step_s,
        compute_s=compute_s,
        communication_s=communication_s,
        idle_share=max(0.0, idle),
        memory_bytes=memory,
        memory_limit_bytes=work.site.memory_limit(candidate.workers),
        traffic_bytes=traffic,
        samples_per_second=work.batch_size / step_s if step_s else 0.0,
        note=note,
    )


def _mesh_note(num_stages: int, num_slices: int, idle: float, exchanged_s: float, step_s: float) -> str:
    parts = []
    if num_stages > 1:
        parts.append(f"stages idle {idle:.0%} of the time")
    if num_slices > 1:
        parts.append(f"all-reduces inside the layers take {in_time(exchanged_s)} of a {in_time(step_s)} step")
    return "; ".join(parts)


def in_bytes(num_bytes: float) -> str:
    """Return "46 MB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= 0.9995 * size:
            return f"{num_bytes / size:.3g} {unit}" if num_bytes < 999.5 * size else f"{num_bytes / size:,.0f} {unit}"
    return f"{num_bytes:.0f} B"


def in_time(seconds: float) -> str:
    """Return "38 ms"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * size:
            return f"{seconds / size:.3g} {unit}" if seconds < 999.5 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds * 1e6:.0f} µs"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
