"""The simulator: workers that compute, exchange and wait, step by step and event by event. Pure.

All-reduce steps are in lock-step, so their events have one order and all workers are computed at once. Workers of
parameter servers go at their own pace: there a queue of events decides who is next.
"""

from __future__ import annotations

import heapq
import itertools
import math

import msgspec
import numpy as np
from numpy.typing import NDArray

from cordee.planner.hardware import DescribedCluster, Device, Link
from cordee.planner.simulator.scenario import ALONE, WINDOWS, Scenario


class ClusterOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a number of workers would do."""

    workers: int
    step_s: float  # from one step of a worker to its next, on average
    efficiency: float  # steps of all workers beside what as many would take that never wait nor exchange
    idle_share: float  # of the workers' time, waiting for others
    exchange_share: float  # of the workers' time, for bytes on their way that computing does not hide
    behind_mean: float  # other workers' updates that a worker had not seen when its own came, in steps of all workers
    apart_most: int  # steps between the first and the last worker, at worst
    sent_bytes: float  # by each worker in a step
    effective_share: float  # of the time, under failures: training that was not lost, nor spent on saving and starting
    throughput: float  # useful steps of all workers per second, failures included


def simulate(scenario: Scenario) -> list[ClusterOutcome]:
    """Return the outcome for each number of workers. The same scenario and seed give the same numbers."""
    return [_simulate_one(scenario, workers) for workers in scenario.workers]


def _simulate_one(scenario: Scenario, workers: int) -> ClusterOutcome:
    random = np.random.default_rng([scenario.seed, workers])
    times = _draw(random, scenario, workers)
    if workers == 1:
        busy_s = float(times.mean())
        step_s, idle, behind, apart, sent = busy_s, 0.0, 0.0, 0, 0.0
    elif scenario.strategy in ALONE:
        alone = _agree_apart if scenario.strategy in WINDOWS else _take_rounds
        step_s, idle, behind, apart = *alone(scenario, times), 0.0, 0
        ways = 2 * (workers - 1) / workers if scenario.strategy in WINDOWS else 1.0
        sent = ways * scenario.gradient_bytes / scenario.sync_every
    elif not scenario.has_servers:
        step_s, idle, behind, apart = *_all_reduce(scenario, times), 0.0, 0
        sent = 2 * (workers - 1) / workers * scenario.gradient_bytes
    else:
        step_s, idle, behind, apart = _serve(scenario, times)
        sent = scenario.gradient_bytes
    busy = float(times.mean()) / step_s
    effective = effective_share(scenario, workers)
    return ClusterOutcome(
        workers=workers,
        step_s=step_s,
        efficiency=busy,
        idle_share=idle,
        exchange_share=max(0.0, 1 - busy - idle),
        behind_mean=behind,
        apart_most=apart,
        sent_bytes=sent,
        effective_share=effective,
        throughput=workers / step_s * effective,
    )


def _draw(random: np.random.Generator, scenario: Scenario, workers: int) -> NDArray[np.float64]:
    """Return how long each step takes each worker: log-normal, so that slow ones are further off than fast ones."""
    shape = (scenario.steps, workers)
    times = np.full(shape, scenario.step_s)
    if scenario.spread:
        sigma = math.sqrt(math.log(1 + scenario.spread**2))
        times = scenario.step_s * random.lognormal(-(sigma**2) / 2, sigma, shape)
    if num_slow := round(scenario.stragglers * workers):  # which ones they are makes no difference
        times[:, -num_slow:] *= scenario.straggler_slowdown
    return times


def _agree_apart(scenario: Scenario, times: NDArray[np.float64]) -> tuple[float, float]:
    """Return the mean step and the idle share of workers that take steps alone, and then exchange what they learnt."""
    windows = _windows(scenario, times)
    slowest = windows.max(axis=1)
    exchange_s = _ring(scenario, times.shape[1]).exchange_s(
        "all_reduce", scenario.gradient_bytes, range(times.shape[1])
    )
    total_s = float((slowest + exchange_s).sum())
    return total_s / len(times), float((slowest[:, None] - windows).mean(axis=1).sum()) / total_s


def _take_rounds(scenario: Scenario, times: NDArray[np.float64]) -> tuple[float, float]:
    """Return the mean step and the idle share of clients of rounds: they get the model, take steps and send it back.

    The server's link is busy with one client after the other, in both directions. The round ends with the answer that
    makes the quorum.
    """
    windows, workers = _windows(scenario, times), times.shape[1]
    own_s = scenario.latency_s + scenario.gradient_bytes / scenario.bytes_per_s
    each_s = scenario.gradient_bytes / scenario.server_bytes_per_s
    has_model_s = np.maximum(own_s, scenario.latency_s + each_s * np.arange(1, workers + 1))
    answered = np.sort(has_model_s + windows + own_s, axis=1)
    # In a queue the k-th is done when the one before it is, or when it comes, and then takes its time.
    places = np.arange(workers)
    done = np.maximum.accumulate(answered - each_s * places, axis=1) + each_s * places
    ends = done[:, max(1, math.ceil(scenario.quorum * workers - 1e-9)) - 1]
    total_s = float(ends.sum())
    waiting = np.maximum(0.0, ends[:, None] - (has_model_s + windows + own_s)).mean(axis=1)
    return total_s / len(times), float(waiting.sum()) / total_s


def _windows(scenario: Scenario, times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how long each worker computes between two exchanges; the last time may be shorter."""
    return np.add.reduceat(times, np.arange(0, len(times), scenario.sync_every), axis=0)


def _all_reduce(scenario: Scenario, times: NDArray[np.float64]) -> tuple[float, float]:
    """Return the mean step and the share of time that workers wait for the slowest."""
    workers = times.shape[1]
    hardware, members = _ring(scenario, workers), range(workers)
    fixed_s = hardware.exchange_s("all_reduce", 0.0, members)
    per_byte_s = (hardware.exchange_s("all_reduce", 1e9, members) - fixed_s) / 1e9
    ready = [(1 - scenario.backward) + scenario.backward * share for share in _ready_shares(scenario)]
    slowest = times.max(axis=1)
    # The slowest worker's gradients are the last ones there, so only its step counts.
    steps = np.array([_step_end(scenario, ready, float(s), fixed_s, per_byte_s) for s in slowest])
    return float(steps.mean()), float((slowest[:, None] - times).mean() / steps.mean())


def _step_end(scenario: Scenario, ready: list[float], step_s: float, fixed_s: float, per_byte_s: float) -> float:
    """Return when the last gradients are summed. Whenever the link is free, all that is ready by then goes together."""
    layer_bytes = scenario.gradient_bytes / len(ready)
    at_once = max(1, int(scenario.bucket_bytes // layer_bytes))
    now_s, sent = 0.0, 0
    while sent < len(ready):
        now_s = max(now_s, ready[sent] * step_s if scenario.overlap else step_s)
        count = 1
        while (
            count < at_once
            and sent + count < len(ready)
            and (not scenario.overlap or ready[sent + count] * step_s <= now_s)
        ):
            count += 1
        now_s += fixed_s + per_byte_s * layer_bytes * count
        sent += count
    return max(step_s, now_s)


def _ring(scenario: Scenario, workers: int) -> DescribedCluster:
    hosts = [f"host-{index // scenario.per_host}" for index in range(workers)]
    devices = [Device(host, "any", 1.0, math.inf) for host in hosts]
    networks = dict.fromkeys(hosts, Link(scenario.latency_s, scenario.bytes_per_s))
    inside = Link(scenario.latency_s / 4, scenario.inside_bytes_per_s)
    return DescribedCluster(devices, inside, networks, overlaps=scenario.overlap)


def _ready_shares(scenario: Scenario) -> list[float]:
    """Return after which share of the backward pass each of the layers, of equal bytes, has its gradient."""
    order = ((0.0, 0.0), *(scenario.order or ((1.0, 1.0),)))
    shares = []
    for index in range(1, scenario.layers + 1):
        share = index / scenario.layers
        (low, part), (high, whole) = next((a, b) for a, b in itertools.pairwise(order) if b[1] >= share - 1e-12)
        shares.append(high if whole == part else low + (high - low) * (share - part) / (whole - part))
    return shares


def _serve(scenario: Scenario, times: NDArray[np.float64]) -> tuple[float, float, float, int]:
    """Return the mean step, the idle share, how far behind updates were on average, and the most steps apart."""
    num_steps, workers = times.shape
    bound = math.inf if scenario.staleness == "unbounded" else int(scenario.staleness)
    servers = scenario.num_servers(workers)
    # Servers take shares of each push side by side; their links are busy one push after the other.
    service_s = scenario.gradient_bytes / (servers * scenario.bytes_per_s)
    own_s = scenario.gradient_bytes / scenario.bytes_per_s
    free_in = free_out = 0.0
    clocks = [0] * workers
    at_clock = [0] * (num_steps + 1)
    at_clock[0] = workers
    lowest, num_updates, behind_sum, apart_most = 0, 0, 0.0, 0
    seen = [0] * workers  # updates applied when the worker last read the parameters
    waiting: dict[int, list[tuple[int, float]]] = {}  # clock that the slowest must reach -> workers, since when
    idle_s = exchange_s = 0.0
    events: list[tuple[float, int, int]] = []  # time, kind (0: computed, 1: may start), worker

    def start(worker: int, now_s: float) -> None:
        heapq.heappush(events, (now_s + float(times[clocks[worker], worker]), 0, worker))

    for worker in range(workers):
        start(worker, 0.0)
    end_s = 0.0
    while events:
        now_s, kind, worker = heapq.heappop(events)
        if kind == 1:
            seen[worker] = num_updates
            if clocks[worker] - lowest > bound:
                waiting.setdefault(clocks[worker] - int(bound), []).append((worker, now_s))
            else:
                start(worker, now_s)
            continue
        free_in = max(free_in, now_s) + service_s
        pushed_s = max(free_in, now_s + own_s) + scenario.latency_s
        free_out = max(free_out, pushed_s) + service_s
        pulled_s = max(free_out, pushed_s + own_s) + scenario.latency_s
        exchange_s += pulled_s - now_s
        behind_sum += num_updates - seen[worker]
        num_updates += 1
        clock = clocks[worker]
        at_clock[clock] -= 1
        at_clock[clock + 1] += 1
        clocks[worker] = clock + 1
        apart_most = max(apart_most, clock + 1 - lowest)
        end_s = max(end_s, pulled_s)
        if clock + 1 < num_steps:
            heapq.heappush(events, (pulled_s, 1, worker))
        while lowest < num_steps and at_clock[lowest] == 0:
            lowest += 1
            for other, since_s in waiting.pop(lowest, []):
                # It reads what the last push made: not before that push is in.
                idle_s += max(0.0, pulled_s - since_s)
                seen[other] = num_updates
                start(other, max(pulled_s, since_s))
    total_s = float(times.sum()) + exchange_s + idle_s
    step_s = total_s / (workers * num_steps)
    # Synchronously, all pushes of a step are applied as one update, which everybody waits for.
    behind = behind_sum / num_updates / workers if bound else 0.0
    return step_s, idle_s / total_s, behind, apart_most


NUM_FAILURES = 4000  # that are drawn: the share is then known to about 2 % of what is lost


def effective_share(scenario: Scenario, workers: int) -> float:
    """Return useful time over all time: without saving, starting again, and what was lost since the last checkpoint.

    Workers fail independently and at any time, also while all start again; one failure stops all. Where workers take
    steps alone, the others continue, and what the lost one did since the last exchange is lost.
    """
    if scenario.strategy in ALONE:
        return _share_of_survivors(scenario, workers)
    every_s, saving_s, restart_s = scenario.checkpoint_every_s, scenario.checkpoint_time_s, scenario.restart_s
    if not scenario.mtbf_s:
        return every_s / (every_s + saving_s)
    random = np.random.default_rng([scenario.seed, workers, 1])
    gaps = random.exponential(scenario.mtbf_s / workers, NUM_FAILURES)
    # A gap first goes into starting, then into whole rounds of training and saving; the broken round is lost.
    rounds = np.floor(np.maximum(gaps - restart_s, 0.0) / (every_s + saving_s))
    return float(rounds.sum() * every_s / gaps.sum())


def _share_of_survivors(scenario: Scenario, workers: int) -> float:
    """Return the share of the workers' time that counts, where a lost one costs the others nothing."""
    answers = math.ceil(scenario.quorum * workers - 1e-9) / workers
    if not scenario.mtbf_s:
        return answers
    away_s = scenario.restart_s + scenario.sync_every * scenario.step_s / 2  # half a window is lost on average
    return answers * scenario.mtbf_s / (scenario.mtbf_s + away_s)
