"""Shares by speed: in proportion, one at least, all of the batch; and changed only where that gains something."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cordee.core.shards import share_by_speed
from cordee.training.shares import EVERY_STEPS, FIRST_STEPS, Balance


@given(st.lists(st.floats(0.001, 1000.0), min_size=1, max_size=9), st.integers(0, 500))
def test_shares_are_all_of_the_batch_and_in_proportion(speeds: list[float], more: int) -> None:
    total = len(speeds) + more
    shares = share_by_speed(total, speeds)
    assert sum(shares) == total and min(shares) >= 1
    for share, speed in zip(shares, speeds, strict=True):
        assert abs(share - 1 - more * speed / sum(speeds)) < 1


def measured(balance: Balance, num_steps: int, seconds: float, num_samples: int) -> int:
    for _ in range(num_steps):
        assert not balance.is_due
        balance.record(seconds, num_samples)
    assert balance.is_due
    return balance.take_speed()


def test_a_worker_of_half_the_speed_gets_half_as_much() -> None:
    slow, fast = Balance(30, 2), Balance(30, 2)
    slow.record(99.0, 15)  # the first step of a team is not measured
    fast.record(99.0, 15)
    speeds = [measured(slow, FIRST_STEPS, 0.30, 15), measured(fast, FIRST_STEPS, 0.15, 15)]
    assert speeds == [50_000, 100_000]
    decisions = [balance.decide(speeds) for balance in (slow, fast)]
    assert decisions[0] == decisions[1], "workers decide alike"
    assert decisions[0] is not None
    assert decisions[0].samples == [10, 20] and decisions[0].samples_per_second == [50.0, 100.0]
    again = [measured(slow, EVERY_STEPS, 0.20, 10), measured(fast, EVERY_STEPS, 0.20, 20)]
    assert slow.decide(again) is None, "they are as fast as each other now"


def test_nothing_is_decided_for_little_or_without_a_speed() -> None:
    balance = Balance(32, 2)
    assert balance.decide([100, 101]) is None
    assert balance.decide([0, 100]) is None


def test_a_worker_alone_never_decides() -> None:
    balance = Balance(32, 1)
    for _ in range(3 * FIRST_STEPS):
        balance.record(0.1, 32)
    assert not balance.is_due
