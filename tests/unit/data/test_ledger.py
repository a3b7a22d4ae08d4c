"""The sample ledger under random schedules of workers that take, finish, die and come back."""

from __future__ import annotations

import random

import msgspec
import pytest

from cordee.data import Exchanges, Ledger, Unit
from cordee.data.ledger import LedgerState


def run_schedule(seed: int) -> None:
    """Take a random team through a random run; check at every hand-out what the ledger promises."""
    draw = random.Random(seed)
    num_samples, batch_size = draw.randint(1, 60), 0
    batch_size = draw.randint(1, num_samples)
    num_shares, size, first = draw.randint(1, 5), draw.choice([1, 1, 2, 4]), draw.randint(0, 6)
    exchanges = Exchanges(num_samples, batch_size, first + draw.randint(1, 12), first, size)
    num_steps = exchanges.num_steps
    staleness = draw.choice([0, 0, 1, 2, 5, None])
    ledger = Ledger(exchanges, num_shares)
    workers = [f"w{index}" for index in range(draw.randint(1, 5))]
    in_hand: dict[str, list[Unit]] = {worker: [] for worker in workers}
    committed: list[Unit] = []
    for _ in range(100_000):
        if ledger.is_complete:
            break
        worker = draw.choice(workers)
        limit = num_steps if staleness is None else ledger.committed_steps + staleness + 1
        if draw.random() < 0.05:  # another ledger continues from there
            state = msgspec.msgpack.decode(msgspec.msgpack.encode(ledger.state), type=LedgerState)
            ledger = Ledger(exchanges, num_shares)
            ledger.restore(state)
        if draw.random() < 0.02:  # a server is lost with what it had of the steps that are open
            ledger.reopen()
            in_hand = {worker: [] for worker in workers}
            committed = [unit for unit in committed if unit.step < ledger.committed_steps]
        event = draw.random()
        if event < 0.05:  # it dies, and another takes its place
            ledger.requeue(worker)
            in_hand[worker] = []
        elif event < 0.1 and in_hand[worker]:  # it is late: somebody else does its work as well
            ledger.give_up(in_hand[worker][0].number)
        elif in_hand[worker] and event < 0.6:
            unit = in_hand[worker].pop(0)
            if ledger.commit(unit.number):
                committed.append(unit)
        elif not in_hand[worker]:
            unit = ledger.take(worker, limit_step=limit)
            if unit is not None:
                in_hand[worker].append(unit)
                open_steps = [other.step for _, other in ledger.taken.values()]  # one given up does not count
                if staleness is not None:
                    assert unit.step - min(open_steps) <= staleness
                    # Everything older than the bound has gone into the weights it starts from.
                    assert ledger.committed_steps >= unit.step - staleness
    assert ledger.is_complete
    assert ledger.take("w0", limit_step=num_steps) is None
    counted = sorted((unit.epoch, position) for unit in committed for position in range(unit.start, unit.stop))
    per_epoch = exchanges.batches_per_epoch
    assert counted == [
        (batch // per_epoch, position)
        for batch in range(first, exchanges.last)
        for position in range(batch % per_epoch * batch_size, min((batch % per_epoch + 1) * batch_size, num_samples))
    ]


def test_no_worker_runs_ahead_and_every_sample_counts_once_in_1000_schedules() -> None:
    for seed in range(1000):
        run_schedule(seed)


def test_a_late_worker_that_finishes_after_all_is_not_counted_twice() -> None:
    ledger = Ledger(Exchanges(8, 4, last=2), num_shares=2)
    slow = ledger.take("slow", limit_step=1)
    assert slow is not None
    ledger.give_up(slow.number)
    again = ledger.take("fast", limit_step=1)
    assert again == slow
    assert ledger.commit(slow.number)
    assert not ledger.commit(slow.number)


def test_what_a_lost_worker_had_comes_before_anything_new() -> None:
    ledger = Ledger(Exchanges(8, 4, last=2), num_shares=2)
    lost = ledger.take("lost", limit_step=2)
    ledger.take("other", limit_step=2)
    assert ledger.requeue("lost") == [lost]
    assert ledger.take("other", limit_step=2) == lost


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_a_batch_with_fewer_samples_than_shares_has_fewer_units(batch_size: int) -> None:
    ledger = Ledger(Exchanges(3, batch_size, last=1), num_shares=4)
    units = []
    while (unit := ledger.take("w", limit_step=1)) is not None:
        units.append(unit)
    assert [unit.num_samples for unit in units] == [1] * batch_size
    assert all(unit.num_shares == batch_size for unit in units)


def test_a_run_goes_on_in_mid_epoch() -> None:
    ledger = Ledger(Exchanges(10, 4, last=6, first=4), num_shares=1)
    unit = ledger.take("w", limit_step=6)
    assert unit is not None
    assert (unit.step, unit.epoch, unit.start, unit.stop) == (4, 1, 4, 8)


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (0, 20, [(0, 4), (4, 5), (5, 9), (9, 10), (10, 14), (14, 15), (15, 19), (19, 20)]),  # whole epochs of 5
        (0, 8, [(0, 4), (4, 5), (5, 8)]),  # the last one is cut by the end of the run
        (7, 12, [(7, 9), (9, 10), (10, 12)]),  # the first one begins where a run of another strategy ended
        (6, 8, [(6, 8)]),
        (8, 8, []),
    ],
)
def test_exchanges_cover_every_batch_once(first: int, last: int, expected: list[tuple[int, int]]) -> None:
    exchanges = Exchanges(num_samples=60, batch_size=12, last=last, first=first, size=4)
    steps = range(exchanges.first_step, exchanges.num_steps)
    assert [exchanges.batches(step) for step in steps] == expected
    taken = [exchanges.batches_before(step) for step in range(exchanges.first_step, exchanges.num_steps + 1)]
    assert taken == [first, *(stop for _, stop in expected)]
