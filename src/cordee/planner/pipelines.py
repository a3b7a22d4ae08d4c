"""Pipelines on paper: where to cut a model, and how long the tasks of a schedule take. Pure."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

SCHEDULES = ("gpipe", "1f1b", "interleaved")
IN_TURNS = ("interleaved", "zero-bubble")  # schedules in which a worker has several chunks of the model
CHUNKS_PER_WORKER = 2  # of those
MICROBATCHES_PER_WORKER = 4  # as in strategies/pipeline, which imports torch
MOST_SIMULATED = 256  # passes of a schedule that is simulated task by task; a formula does for longer ones


def cut(weights: Sequence[Sequence[float]], num_stages: int) -> list[tuple[int, int]]:
    """Return the blocks of each stage, as (first, after the last), so that the longest stage is as short as can be.

    `weights[stage][block]` is how long a block takes on the device of a stage. Every stage gets a block; raises
    ValueError if there are too few.
    """
    num_blocks = len(weights[0])
    if num_blocks < num_stages:
        raise ValueError(f"{num_blocks} blocks cannot make {num_stages} stages")
    low, high = 0.0, max(sum(row) for row in weights)
    for _ in range(50):  # to 15 digits; each trial goes once over the blocks
        middle = (low + high) / 2
        if _fill(weights, num_stages, middle) is None:
            low = middle
        else:
            high = middle
    bounds = _fill(weights, num_stages, high * (1 + 1e-9))
    assert bounds is not None
    return bounds


def _fill(weights: Sequence[Sequence[float]], num_stages: int, limit: float) -> list[tuple[int, int]] | None:
    """Return stages of at most `limit` each, or None if that cannot be. Leaves a block for each stage to come."""
    num_blocks, bounds, start = len(weights[0]), [], 0
    for stage in range(num_stages):
        end, total = start, 0.0
        last = num_blocks - (num_stages - stage - 1)
        while end < last and (end == start or total + weights[stage][end] <= limit):
            total += weights[stage][end]
            end += 1
        if total > limit:
            return None
        bounds.append((start, end))
        start = end
    return bounds if start == num_blocks else None


def num_chunks_of(schedule: str, num_workers: int) -> int:
    """Return into how many chunks a model is cut; chunk c is on worker c modulo the workers."""
    return num_workers * (CHUNKS_PER_WORKER if schedule in IN_TURNS else 1)


def usual_microbatches(num_workers: int, samples: float) -> int:
    """Return into how many micro-batches a pipeline cuts its share of a batch where the job leaves that to it."""
    return max(1, min(MICROBATCHES_PER_WORKER * num_workers, math.ceil(samples)))


def num_ahead(schedule: str, worker: int, num_workers: int, num_micro: int) -> int:
    """Return how many forward passes of its chunks a worker makes before its first backward pass.

    So many micro-batches' activations of a chunk are what it keeps at most.
    """
    if schedule not in IN_TURNS:
        return num_micro if schedule == "gpipe" else min(num_micro, num_workers - worker)
    ahead = (CHUNKS_PER_WORKER - 1) * _per_round(num_workers, num_micro) + 2 * (num_workers - 1 - worker) + 1
    return min(ahead, CHUNKS_PER_WORKER * num_micro)


class Pipeline(NamedTuple):
    """One step of a pipeline: its passes, and how they are ordered."""

    forward_s: Sequence[float]  # of one micro-batch through each chunk, on a core of its own
    backward_s: Sequence[float]
    send_s: float  # from one chunk to the next
    num_micro: int
    schedule: str
    num_workers: int

    @property
    def compute_s(self) -> float:
        """What one micro-batch takes on one core."""
        return sum(self.forward_s) + sum(self.backward_s)


def last_pass_s(pipeline: Pipeline, num_lanes: float = math.inf) -> float:
    """Return the seconds from the first forward pass of a step to the end of its last backward pass.

    `num_lanes` is how many workers can compute at once. A worker that waits leaves its core to the others.
    """
    if pipeline.num_workers == 1:
        return pipeline.num_micro * pipeline.compute_s / min(1.0, num_lanes)
    if len(pipeline.forward_s) * pipeline.num_micro <= MOST_SIMULATED:
        return simulate_tasks(tasks_of(pipeline), num_lanes).end_s
    together_s = pipeline.num_micro * pipeline.compute_s / min(pipeline.num_workers, num_lanes)
    return max(together_s, _estimate(pipeline))


def _estimate(pipeline: Pipeline) -> float:
    """Return the seconds where every worker has a core: the busiest one is busy, before and after it others are."""
    forward, backward, send_s, num_micro, schedule, num_workers = pipeline
    busiest = max(sum(forward[w::num_workers]) + sum(backward[w::num_workers]) for w in range(num_workers))
    # The other workers' passes of the first and the last micro-batch: of one chunk each.
    fill = (pipeline.compute_s - busiest) * num_workers / len(forward)
    hops = 2 * (len(forward) - 1) * send_s
    # A message is on its way while its sender continues; in 1f1b each micro-batch waits for one now and then.
    return num_micro * busiest + fill + hops + (num_micro * send_s if schedule == "1f1b" else 0.0)


class Pass(NamedTuple):
    """One micro-batch through one chunk of the model."""

    is_backward: bool
    chunk: int  # of all, in the order of the model; chunk c is on worker c modulo the workers
    micro: int

    def needs(self, last_chunk: int) -> tuple[Pass, bool] | None:
        """Return the pass that comes before this one, and whether it is another chunk's; None for the very first."""
        if not self.is_backward:
            return None if self.chunk == 0 else (Pass(False, self.chunk - 1, self.micro), True)
        if self.chunk == last_chunk:
            return Pass(False, self.chunk, self.micro), False
        return Pass(True, self.chunk + 1, self.micro), True


def order_of(schedule: str, worker: int, num_workers: int, num_micro: int) -> list[Pass]:
    """Return the passes of a worker in the order that torch's schedules have."""
    ahead = num_ahead(schedule, worker, num_workers, num_micro)
    if schedule in IN_TURNS:
        return _merged(*_in_turns(worker, num_workers, num_micro), ahead)
    forward = [Pass(False, worker, micro) for micro in range(num_micro)]
    backward = [Pass(True, worker, micro) for micro in range(num_micro)]
    return _merged(forward, backward, ahead)


def _in_turns(worker: int, num_workers: int, num_micro: int) -> tuple[list[Pass], list[Pass]]:
    forward, backward = [], []
    per_round = _per_round(num_workers, num_micro)
    for first in range(0, num_micro, per_round):
        micros = range(first, min(first + per_round, num_micro))
        for number in range(CHUNKS_PER_WORKER):
            forward += [Pass(False, number * num_workers + worker, micro) for micro in micros]
            late = CHUNKS_PER_WORKER - 1 - number
            backward += [Pass(True, late * num_workers + worker, micro) for micro in micros]
    return forward, backward


def _per_round(num_workers: int, num_micro: int) -> int:
    return num_micro // max(1, num_micro // num_workers)


def _merged(forward: list[Pass], backward: list[Pass], ahead: int) -> list[Pass]:
    """Return `ahead` forward passes, then a backward and a forward one in turn, then what is left."""
    order = forward[:ahead]
    for index, back in enumerate(backward):
        order.append(back)
        order += forward[ahead + index : ahead + index + 1]
    return order


def tasks_of(pipeline: Pipeline) -> list[list[Task]]:
    """Return the passes of each worker, as torch's schedules have them."""
    forward, backward, send_s, num_micro, schedule, num_workers = pipeline
    orders = []
    for worker in range(num_workers):
        tasks = []
        for one in order_of(schedule, worker, num_workers, num_micro):
            seconds = (backward if one.is_backward else forward)[one.chunk]
            need = one.needs(len(forward) - 1)
            tasks.append(Task(one, seconds, () if need is None else ((need[0], send_s if need[1] else 0.0),)))
        orders.append(tasks)
    return orders


TINY_S = 1e-12  # differences of times that are only rounding


class Task(NamedTuple):
    """A piece of a worker's work."""

    key: Hashable
    seconds: float  # on a core of its own
    needs: tuple[tuple[Hashable, float], ...] = ()  # tasks that must have ended, and how long their news is on its way
    is_computed: bool = True  # takes a core; else it is only time that passes


class TaskTimes(NamedTuple):
    """How it went."""

    end_s: float
    waited_s: float  # by all workers, for others' news


def simulate_tasks(orders: Sequence[Sequence[Task]], num_lanes: float = math.inf) -> TaskTimes:
    """Simulate every worker's tasks in their order; at most `num_lanes` compute at once, and share evenly beyond that.

    A worker that waits, for another's task or for time to pass, leaves its core to the others.
    """
    places = [0] * len(orders)
    ended_s: dict[Hashable, float] = {}
    left: dict[int, float] = {}  # of each worker's present task, in seconds of a core
    now_s = waited_s = 0.0
    while True:
        wake_s, num_waiting, num_computing = math.inf, 0, 0
        for worker, order in enumerate(orders):
            if places[worker] == len(order):
                continue
            task = order[places[worker]]
            if worker not in left:
                begin_s = max((ended_s.get(key, math.inf) + delay_s for key, delay_s in task.needs), default=now_s)
                if begin_s > now_s + TINY_S:
                    wake_s = min(wake_s, begin_s)
                    num_waiting += 1
                    continue
                left[worker] = task.seconds
            num_computing += task.is_computed
        if not left and wake_s == math.inf:
            assert not num_waiting, "somebody waits for what nobody does"
            return TaskTimes(now_s, waited_s)
        pace = min(1.0, num_lanes / num_computing) if num_computing else 1.0
        paces = {worker: pace if orders[worker][places[worker]].is_computed else 1.0 for worker in left}
        spent_s = max(0.0, min([wake_s - now_s, *(rest / paces[worker] for worker, rest in left.items())]))
        now_s += spent_s
        waited_s += spent_s * num_waiting
        for worker in list(left):
            left[worker] -= spent_s * paces[worker]
            if left[worker] <= TINY_S:
                del left[worker]
                ended_s[orders[worker][places[worker]].key] = now_s
                places[worker] += 1
