"""When a team grows and shrinks, and what is not tried twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cordee.cluster.autoscaling import Autoscaler, Observation, Size


def see(workers: int, speed: float, *, threads: int = 1, busy: float = 0.9, free: float = 0.0) -> Observation:
    return Observation(Size(workers, threads), speed, busy, free)


@pytest.mark.parametrize(
    ("seen", "workers", "threads", "reason"),
    [
        (see(2, 10.0, free=1.5), 3, 1, "cores are free: 1.5"),
        (see(2, 10.0, free=0.5), None, None, None),
        (see(2, 10.0, threads=2, free=1.5), None, None, None),  # not enough for a worker like the others
        (see(3, 10.0, busy=0.3), 2, 1, "workers compute 30% of the time and wait for the rest"),
        (see(1, 10.0, busy=0.3), None, None, None),
        (see(4, 10.0, free=3.0), None, None, None),  # a thread more for each of four needs four
        (see(4, 10.0, threads=0, free=4.0), None, None, None),  # they have all the cores
        (see(4, 10.0, free=4.0), 4, 2, "cores are free, workers are enough: 4.0"),
    ],
)
def test_what_is_done_at_first(seen: Observation, workers: int | None, threads: int | None, reason: str | None) -> None:
    change = Autoscaler(min_workers=1, max_workers=4).decide(seen)
    assert (change and change.size.workers, change and change.size.threads) == (workers, threads)
    assert (change and change.reason) == reason


@pytest.mark.parametrize("threads", [1, 0])
def test_a_larger_team_that_is_not_faster_is_taken_back_and_not_tried_again(threads: int) -> None:
    scaler = Autoscaler(min_workers=1, max_workers=4)
    assert scaler.decide(see(2, 10.0, threads=threads, free=2.0))
    back = scaler.decide(see(3, 10.1, threads=threads, free=1.0))
    assert back and back.size == Size(2, threads)
    assert back.reason == "3 workers took 10.1 steps a second, 2 workers took 10"
    assert scaler.decide(see(2, 10.0, threads=threads, free=2.0)) is None


def test_a_larger_team_that_is_faster_stays_and_grows_on() -> None:
    scaler = Autoscaler(min_workers=1, max_workers=4)
    scaler.decide(see(2, 10.0, free=2.0))
    change = scaler.decide(see(3, 14.0, free=1.0))
    assert change and change.size == Size(4, 1)


def test_a_smaller_team_that_is_much_slower_is_taken_back() -> None:
    scaler = Autoscaler(min_workers=1, max_workers=4)
    scaler.decide(see(3, 10.0, busy=0.4))
    back = scaler.decide(see(2, 8.0))
    assert back and back.size == Size(3, 1)
    assert scaler.decide(see(3, 10.0, busy=0.4)) is None


def test_a_smaller_team_that_is_as_fast_stays_though_cores_are_free() -> None:
    scaler = Autoscaler(min_workers=1, max_workers=4)
    scaler.decide(see(3, 10.0, busy=0.4))
    assert scaler.decide(see(2, 9.9, free=1.5)) is None


def test_a_falling_speed_asks_for_more_workers() -> None:
    scaler = Autoscaler(min_workers=1, max_workers=4)
    assert scaler.decide(see(2, 10.0)) is None
    assert scaler.decide(see(2, 8.0)) is None
    change = scaler.decide(see(2, 6.0))
    assert change and change.size == Size(3, 1) and change.reason == "the speed fell from 10 to 6 steps a second"


def test_what_cannot_be_is_not_proposed_again() -> None:
    scaler = Autoscaler(min_workers=1, max_workers=4)
    change = scaler.decide(see(2, 10.0, free=2.0))
    assert change
    scaler.refused(change.size)
    assert scaler.decide(see(2, 10.0, free=2.0)) is None


@pytest.mark.parametrize("speed_of", [lambda n: n, lambda n: min(n, 3), lambda n: 1.0, lambda n: 4.0 / n])
def test_it_comes_to_rest_within_the_limits(speed_of: Callable[[int], float]) -> None:
    """On a host with 6 cores, whatever more workers bring."""
    scaler, size, visited = Autoscaler(min_workers=2, max_workers=5), Size(2, 1), list[Size]()
    for _ in range(40):
        busy = min(1.0, speed_of(size.workers) / size.workers)
        change = scaler.decide(
            see(size.workers, speed_of(size.workers), threads=size.threads, busy=busy, free=6 - size.workers)
        )
        size = change.size if change else size
        visited.append(size)
    assert len(set(visited[-5:])) == 1, visited
    assert all(2 <= one.workers <= 5 for one in visited)
