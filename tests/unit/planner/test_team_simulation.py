"""A few workers, simulated, beside the formulas of the cost model."""

from __future__ import annotations

import msgspec
import pytest
from made_up import here, profile, work

from cordee.planner.cost_model import predict
from cordee.planner.pipelines import Task, simulate_tasks
from cordee.planner.prediction import Candidate, Work
from cordee.planner.simulator.team import simulate_team

WAYS = [
    Candidate(strategy="single", workers=1),
    Candidate(strategy="data_parallel", workers=2),
    Candidate(strategy="sharded", workers=2),
    Candidate(strategy="parameter_server", workers=2, settings={"servers": 1, "staleness": 0}),
    Candidate(strategy="pipeline", workers=2, settings={"microbatches": 8, "schedule": "1f1b"}),
    Candidate(strategy="pipeline", workers=2, settings={"microbatches": 4, "schedule": "interleaved"}),
    Candidate(strategy="tensor", workers=2),
    Candidate(strategy="hybrid", workers=4, settings={"mesh": {"data": 2, "pipeline": 2}, "microbatches": 4}),
    Candidate(strategy="hybrid", workers=4, settings={"mesh": {"data": 2, "tensor": 2}}),
]


def some_work(workers: int) -> Work:
    return work(profile(splittable=1.0), here(max(2, workers)))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.strategy}-{way.workers}")
def test_workers_that_are_alike_take_what_the_formulas_say(way: Candidate) -> None:
    task = some_work(way.workers)
    simulated = simulate_team(way, task, spread=0.0, steps=1)
    assert simulated.step_s == pytest.approx(predict(way, task).step_s, rel=0.03)


def test_workers_that_differ_wait_for_the_slowest() -> None:
    way = Candidate(strategy="data_parallel", workers=4)
    alike, unlike = (simulate_team(way, some_work(4), spread=spread, steps=30) for spread in (0.0, 0.3))
    assert alike.idle_share == 0.0
    assert unlike.step_s > 1.02 * alike.step_s and unlike.idle_share > 0.02  # most of a step is exchanging
    again = simulate_team(way, some_work(4), spread=0.3, steps=30)
    assert again == unlike


def test_more_workers_than_cores_share_them() -> None:
    hardware = here(4)
    hardware._machine = msgspec.structs.replace(hardware._machine, cores=2, slowdowns={2: 1.0, 4: 2.0})
    way = Candidate(strategy="data_parallel", workers=4)
    shared = simulate_team(way, work(profile(), hardware), spread=0.0)
    own = simulate_team(way, work(profile(), here(4)), spread=0.0)
    exchange_s = predict(way, work(profile(), here(4))).communication_s
    assert shared.step_s - exchange_s == pytest.approx(2 * (own.step_s - exchange_s))


def test_cores_are_shared_and_time_that_passes_takes_none() -> None:
    orders = [[Task("a", 1.0)], [Task("b", 1.0)], [Task("c", 1.0, is_computed=False), Task("d", 1.0, (("a", 0.5),))]]
    simulated = simulate_tasks(orders, num_lanes=1)
    # a and b take two seconds on one core; d begins half a second after a.
    assert simulated.end_s == pytest.approx(3.5)
    assert simulated.waited_s == pytest.approx(1.5)
