"""Workers that take steps alone: local_sgd and federated clusters, beside sums done by hand; and slow workers."""

from __future__ import annotations

from typing import Any

import pytest

from cordee.core.errors import JobError
from cordee.planner.simulator import ClusterOutcome, read_scenario, simulate

BASE: dict[str, Any] = {
    "workers": 4,
    "step": 1.0,
    "gradients": "100 MB",
    "bandwidth": "1 GB/s",
    "latency": 0.0,
    "steps": 20,
    "checkpoint_time": "0s",
}
ROUNDS = {"strategy": "federated", "sync_every": 5}


def one(**changes: Any) -> ClusterOutcome:
    (outcome,) = simulate(read_scenario({**BASE, **changes}))
    return outcome


def test_an_exchange_after_every_window() -> None:
    outcome = one(strategy="local_sgd", sync_every=5)
    assert outcome.step_s == pytest.approx(1 + 2 * 3 / 4 * 0.1 / 5)  # a ring of four sends 2 · 3/4 of the bytes
    assert outcome.sent_bytes == pytest.approx(2 * 3 / 4 * 100e6 / 5)
    assert outcome.idle_share == 0.0


def test_the_last_window_may_be_shorter() -> None:
    outcome = one(strategy="local_sgd", sync_every=8)  # 8, 8 and 4 of 20 steps: three exchanges
    assert outcome.step_s == pytest.approx((20 + 3 * 0.15) / 20)


def test_a_round_goes_through_the_server() -> None:
    outcome = one(**ROUNDS, server_bandwidth="1.25 GB/s")
    # The first client has the model after 0.1 s; its answer is there 5.1 s later, and three follow in line.
    assert outcome.step_s == pytest.approx((0.1 + 5 + 0.1 + 3 * 0.08) / 5)
    assert outcome.sent_bytes == pytest.approx(100e6 / 5)


def test_a_round_that_waits_for_half_of_the_clients() -> None:
    outcome = one(**ROUNDS, quorum=0.5)
    assert outcome.step_s == pytest.approx((0.1 + 5 + 0.1 + 1 * 0.08) / 5)
    assert outcome.effective_share == 0.5  # the others' steps are lost
    slow = one(**ROUNDS, quorum=0.5, stragglers=0.5, straggler_slowdown=3.0)
    assert slow.step_s == pytest.approx(outcome.step_s)  # nobody waits for the slow half
    assert one(**ROUNDS, stragglers=0.5, straggler_slowdown=3.0).step_s > 3.0


def test_a_narrow_server_is_what_counts_with_many_clients() -> None:
    outcome = one(**ROUNDS, workers=1000, server_bandwidth="0.1 GB/s")
    # A thousand models go out one after the other, and the last answer comes back with no line before it.
    assert outcome.step_s == pytest.approx((1000 * 1.0 + 5 + 0.1) / 5, rel=1e-3)


def test_one_slow_worker_holds_up_all_in_lock_step() -> None:
    outcome = one(stragglers=0.25, straggler_slowdown=2.0, overlap=False)
    assert outcome.step_s == pytest.approx(2 + 0.15, rel=0.01)
    assert outcome.idle_share == pytest.approx(0.75 * 1.0 / outcome.step_s)


def test_a_lost_worker_costs_the_others_nothing() -> None:
    failing = {"mtbf": 100_000.0, "restart": 100.0}
    assert one(strategy="local_sgd", sync_every=10, **failing).effective_share == pytest.approx(100_000 / 100_105)
    many = {"workers": 10_000, "steps": 20}
    alone, together = one(strategy="local_sgd", sync_every=10, **failing, **many), one(**failing, **many)
    assert alone.effective_share > 0.99 > together.effective_share


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sync_every": 2}, "sync_every belongs to"),
        ({"strategy": "local_sgd", "sync_every": 30}, "more than steps = 20"),
        ({"strategy": "local_sgd", "quorum": 0.5}, "belong to strategy = 'federated'"),
        ({"strategy": "federated", "quorum": 0.0}, "quorum = 0.0"),
        ({"strategy": "federated", "server_bandwidth": "0 GB/s"}, "above 0"),
        ({"stragglers": 2.0}, "stragglers = 2.0"),
        ({"straggler_slowdown": 0.5}, "at least 1"),
        ({"strategy": "local-sgd"}, "did you mean 'local_sgd'"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(JobError, match=says):
        one(**changes)
