"""A few workers on a described or measured hardware, step by step: who computes, exchanges and waits when. Pure.

Where the cost model adds up typical times, workers here differ from step to step, share the cores that there are, and
wait for the slowest. Costs of exchanges and overheads are the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from cordee.planner.cost_model import split_model
from cordee.planner.hardware import gathering_s, num_sums, sharded_amount, sharded_units, summing_s
from cordee.planner.measurements import Amount, Timing
from cordee.planner.pipelines import Task, simulate_tasks, tasks_of
from cordee.planner.prediction import Candidate, Work, mesh_of
from cordee.strategies.table import STRATEGIES, CostModel, strategies_on


class TeamOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a team would do."""

    step_s: float
    idle_share: float  # of the workers' time, waiting for each other's news


def simulate_team(
    candidate: Candidate, work: Work, *, steps: int = 8, spread: float = 0.03, seed: int = 0
) -> TeamOutcome:
    """Return the mean step of a synchronous strategy, with its numbers.

    `spread` is by how much a worker's computing differs from one piece to the next, as a share of it.
    """
    random = np.random.default_rng(seed)
    sigma = math.sqrt(math.log(1 + spread**2))

    def drawn(seconds: float) -> float:
        return seconds * float(random.lognormal(-(sigma**2) / 2, sigma))

    total_s = waited_s = 0.0
    for _ in range(steps):
        orders, num_lanes = _orders(candidate, work, drawn)
        done = simulate_tasks(orders, num_lanes)
        total_s += done.end_s
        waited_s += done.waited_s / len(orders)
    return TeamOutcome(step_s=total_s / steps, idle_share=waited_s / total_s if total_s else 0.0)


def _orders(candidate: Candidate, work: Work, drawn: Callable[[float], float]) -> tuple[list[list[Task]], float]:
    """Return every worker's tasks of one step, and how many can compute at once."""
    mesh = mesh_of(candidate)
    if mesh.pipeline > 1:
        return _in_stages(candidate, work, drawn)
    hardware, profile, size = work.hardware, work.profile, candidate.workers
    num_lanes = hardware.num_lanes(size)
    members = range(size)
    timings = [hardware.step(profile, work.batch_size / mesh.num_shares, member, num_lanes) for member in members]
    if mesh.sharded > 1:
        return [_sharded(worker, timings[worker], candidate, work, drawn) for worker in members], num_lanes
    if mesh.tensor > 1:
        return [_sliced(worker, timings[worker], candidate, work, drawn) for worker in members], num_lanes
    exchange_s = 0.0
    cost_model = STRATEGIES[candidate.strategy].cost_model
    if cost_model == "replicas":
        exchange_s = summing_s(hardware, profile.parameter_bytes, members)
        exchange_s += hardware.overhead_s(candidate.strategy, size, Amount(num_bytes=profile.parameter_bytes))
    elif cost_model == "windows":
        sync_every = int(candidate.settings.get("sync_every", 1))
        exchange_s = summing_s(hardware, profile.parameter_bytes, members) / sync_every
        group = range(int(candidate.settings.get("workers_per_group", 1)))
        exchange_s += summing_s(hardware, profile.parameter_bytes, group) if len(group) > 1 else 0.0
    elif cost_model == "servers":
        num_servers = int(candidate.settings.get("servers", 1))
        exchange_s = hardware.serve_s(candidate.strategy, profile.parameter_bytes, members, num_servers)
    orders = []
    for worker, timing in enumerate(timings):
        computing = sum(timing.forward_s) + sum(timing.backward_s) + timing.other_s
        orders.append(
            [
                Task(("compute", worker), drawn(computing)),
                _exchange("exchange", worker, members, "compute", exchange_s),
                Task(("update", worker), drawn(timing.optimizer_s), ((("exchange", worker), 0.0),)),
            ]
        )
    return orders, num_lanes


def _along(candidate: Candidate, cost_model: CostModel) -> str:
    """Return the strategy along the axis of the candidate's mesh that has this cost model."""
    return next(name for name in strategies_on(mesh_of(candidate)) if STRATEGIES[name].cost_model == cost_model)


def _exchange(name: str, worker: int, members: Sequence[int], after: str, seconds: float) -> Task:
    """Return an exchange that begins when all have done what comes before it."""
    return Task((name, worker), seconds, tuple(((after, other), 0.0) for other in members), is_computed=False)


def _sharded(
    worker: int, timing: Timing, candidate: Candidate, work: Work, drawn: Callable[[float], float]
) -> list[Task]:
    hardware, size = work.hardware, candidate.workers
    members = range(size)
    gather_s, scatter_s = gathering_s(hardware, sharded_units(work.profile), members)
    scatter_s += hardware.overhead_s(_along(candidate, "shards"), size, sharded_amount(work.profile))
    return [
        Task(("gather", worker), gather_s, is_computed=False),
        Task(("forward", worker), drawn(sum(timing.forward_s) + timing.other_s)),
        _exchange("again", worker, members, "forward", gather_s),
        Task(("backward", worker), drawn(sum(timing.backward_s))),
        _exchange("scatter", worker, members, "backward", scatter_s),
        Task(("update", worker), drawn(timing.optimizer_s / size)),
    ]


def _sliced(
    worker: int, timing: Timing, candidate: Candidate, work: Work, drawn: Callable[[float], float]
) -> list[Task]:
    """All blocks forward and back; those that are sliced take a share, and their outputs are summed."""
    hardware, profile = work.hardware, work.profile
    mesh = mesh_of(candidate)
    members = range(candidate.workers)
    num_layers = sum(block.sliceable for block in profile.blocks)
    amount = Amount(num_layers, num_bytes=profile.parameter_bytes)
    part_s = hardware.overhead_s(_along(candidate, "slices"), candidate.workers, amount) / max(1, num_layers)
    tasks: list[Task] = []
    before = ""
    passes = [(f"forward {i}", i, timing.forward_s[i]) for i in range(len(profile.blocks))]
    passes += [(f"backward {i}", i, timing.backward_s[i]) for i in reversed(range(len(profile.blocks)))]
    for name, index, seconds in passes:
        block = profile.blocks[index]
        share = 1 - block.splittable * (1 - 1 / mesh.tensor)
        tasks.append(Task((name, worker), drawn(seconds * share)))
        if block.splittable:
            output_bytes = block.output_bytes * work.batch_size / mesh.num_shares
            summed_s = num_sums(block) * hardware.exchange_s("all_reduce", output_bytes, range(mesh.tensor))
            before = f"sum {name}"
            tasks.append(_exchange(before, worker, members, name, summed_s + block.sliceable * part_s / 2))
    tasks.append(Task(("other", worker), drawn(timing.other_s + timing.optimizer_s / mesh.tensor)))
    if mesh.num_shares > 1:
        share_bytes = profile.parameter_bytes / mesh.tensor
        seconds = hardware.copy_s(share_bytes, candidate.workers)
        seconds += hardware.exchange_s("all_reduce", share_bytes, range(mesh.num_shares))
        tasks.append(_exchange("gradients", worker, members, "other", seconds))
    return tasks


def _in_stages(candidate: Candidate, work: Work, drawn: Callable[[float], float]) -> tuple[list[list[Task]], float]:
    """One of the pipelines: those of other copies do the same on cores of their own."""
    hardware, mesh = work.hardware, mesh_of(candidate)
    parts = split_model(candidate, work, mesh)
    members, num_micro = range(mesh.pipeline), parts.pipeline.num_micro
    last_s = parts.other_s + hardware.overhead_s(_along(candidate, "stages"), candidate.workers, Amount(num_micro))
    if mesh.num_shares > 1:
        largest = parts.largest_bytes(work) / mesh.tensor
        last_s += hardware.copy_s(largest, candidate.workers)
        last_s += hardware.exchange_s("all_reduce", largest, range(mesh.num_shares))
    orders = []
    for worker, tasks in enumerate(tasks_of(parts.pipeline)):
        order = [task._replace(seconds=drawn(task.seconds)) for task in tasks]
        order.append(Task(("passes", worker), 0.0))
        order.append(_exchange("agree", worker, members, "passes", last_s))
        order.append(Task(("update", worker), drawn(parts.optimizer_s / (mesh.pipeline * mesh.tensor))))
        orders.append(order)
    return orders, hardware.num_lanes(candidate.workers) / mesh.num_shares
