"""Dies, freezes or fails at every fault point: the run ends with the weights that it would have had."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_trials import Result, Walker
from fault_walk import WALK, cases, make_walker, sample, walk_all
from fault_walk_served import WALK as SERVED_WALK
from fault_walk_split import STRATEGIES, choose
from fault_walk_split import make_walker as make_split_walker

from cordee.core.fault_points import POINTS
from warm_launch import WarmServer


class Walked:
    """The walker of the file's tests, and what they found."""

    def __init__(self, walker: Walker) -> None:
        self.walker, self.results = walker, list[Result]()

    def check(self, results: Iterator[Result]) -> None:
        found = list(results)
        self.results += found
        problems = [
            f"{result.scenario}: {result.fault}: {result.problem} ({result.folder})"
            for result in found
            if result.problem
        ]
        assert not problems, "\n".join(problems)


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Walked]:
    started_s = time.monotonic()
    with WarmServer() as server:
        walked = Walked(make_walker(server, tmp_path_factory.mktemp("walk")))
        yield walked
    writer = request.config.get_terminal_writer()
    writer.line(f"\n{len(walked.results)} faults at fault points in {time.monotonic() - started_s:.0f} s")


def test_every_point_is_walked() -> None:
    assert set(POINTS) == {*WALK, *SERVED_WALK}, (
        "a point in cordee/core/fault_points.py needs an entry in tests/faults/fault_walk.py, or fault_walk_served.py"
    )


@pytest.mark.timeout(900)
def test_killed_at_some_points(walked: Walked) -> None:
    """Every fourth point, for it to take a minute; `make test-long` walks all of them."""
    walked.check(walk_all(walked.walker, sample()[::4]))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("point", WALK)
def test_a_fault_point(walked: Walked, point: str) -> None:
    """Every process that passes it, several visits, killed and frozen there, and an error where one can happen."""
    walked.check(walk_all(walked.walker, cases({point: WALK[point]})))


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_points_of_a_split_model(tmp_path: Path, strategy: str) -> None:
    with WarmServer() as server:
        walker = make_split_walker(server, tmp_path, strategy)
        Walked(walker).check(walk_all(walker, choose(walker)))
