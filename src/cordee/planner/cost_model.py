"""The cost model: step time, memory, traffic and idle time of each strategy. Pure.

Times come from the profile and the hardware; what a strategy does with them follows its implementation where there is
one (docs/planner.md has the formulas).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cordee.planner.amounts import in_bytes, in_time
from cordee.planner.footprint import replica_bytes, sharded_bytes
from cordee.planner.hardware import gathering_s, ring_traffic, sharded_amount, sharded_units, summing_s
from cordee.planner.machine import Amount
from cordee.planner.mesh_costs import predict_mesh
from cordee.planner.prediction import Candidate, Prediction, Work, make_prediction
from cordee.planner.profile import Timing
from cordee.strategies.table import STRATEGIES, CostModel


def predict(candidate: Candidate, work: Work) -> Prediction:
    """Return what `candidate` would take for `work`."""
    return MODELS[STRATEGIES[candidate.strategy].cost_model](candidate, work)


def _alone(candidate: Candidate, work: Work) -> Prediction:
    step = _passes(work, work.batch_size, 0, 1)
    memory = replica_bytes(candidate, work)
    return make_prediction(candidate, work, step.step_s, step.step_s, 0.0, 0.0, memory, 0.0, "no exchange")


def _replicas(candidate: Candidate, work: Work) -> Prediction:
    members, hardware = range(candidate.workers), work.hardware
    steps, _ = _shares(work, members)
    slowest = max(step.step_s for step in steps)
    gradient_bytes = work.profile.parameter_bytes
    exchange_s = hardware.all_reduce_s(gradient_bytes, members)
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


def _shards(candidate: Candidate, work: Work) -> Prediction:
    members, hardware, profile = range(candidate.workers), work.hardware, work.profile
    steps, _ = _shares(work, members)
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
    steps, _ = _shares(work, members)
    computes = [step.step_s - step.optimizer_s for step in steps]
    exchange_s = hardware.serve_s(candidate.strategy, profile.parameter_bytes, members, servers)
    update_s = max(step.optimizer_s for step in steps) / servers
    slowest, mean = max(computes), sum(computes) / len(computes)
    pace = slowest if staleness != "unbounded" else len(computes) / sum(1 / seconds for seconds in computes)
    update_s *= 1 if staleness == 0 else candidate.workers  # in step one update for all, else one for each push
    step_s = pace + exchange_s + update_s
    idle = _waiting(computes, step_s) if staleness != "unbounded" else 0.0
    memory = replica_bytes(candidate, work, flat_copies=2, has_optimizer=False)  # to send from, to get into
    note = (
        f"sending and getting {in_bytes(profile.parameter_bytes)} through {_plural(servers, 'server')} takes "
        f"{in_time(exchange_s + update_s)} of a {in_time(step_s)} step"
    )
    traffic = float(profile.parameter_bytes)
    compute_s = max(mean, pace)
    return make_prediction(candidate, work, step_s, compute_s, exchange_s + update_s, idle, memory, traffic, note)


MODELS: Mapping[CostModel, Callable[[Candidate, Work], Prediction]] = {
    "alone": _alone,
    "replicas": _replicas,
    "shards": _shards,
    "stages": predict_mesh,
    "slices": predict_mesh,
    "mesh": predict_mesh,
    "servers": _servers,
}


def _passes(work: Work, samples: float, member: int, num_members: int) -> Timing:
    """Return a step over `samples`, computed in the job's number of parts."""
    if work.accumulate == 1:
        return work.hardware.step(work.profile, samples, member, num_members)
    part = work.hardware.step(work.profile, samples / work.accumulate, member, num_members)
    whole = work.hardware.step(work.profile, samples, member, num_members)
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
        speed = work.hardware.devices[member].speed
        if speed not in known:
            known[speed] = _passes(work, share, member, len(members))
        steps.append(known[speed])
    return steps, share


def _waiting(computes: Sequence[float], step_s: float) -> float:
    return sum(max(computes) - seconds for seconds in computes) / (len(computes) * step_s) if step_s else 0.0


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
