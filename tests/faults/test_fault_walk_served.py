"""Dies, freezes or fails at every fault point of a run with parameter servers: it ends with the same weights."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from fault_walk import cases, sample, walk_all
from fault_walk_served import WALK, make_walker
from test_fault_walk import Walked

from warm_launch import WarmServer


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Walked]:
    started_s = time.monotonic()
    with WarmServer() as server:
        walked = Walked(make_walker(server, tmp_path_factory.mktemp("walk")))
        yield walked
    writer = request.config.get_terminal_writer()
    writer.line(f"\n{len(walked.results)} faults at fault points in {time.monotonic() - started_s:.0f} s")


@pytest.mark.timeout(900)
def test_killed_at_some_points(walked: Walked) -> None:
    """Every sixth point, for it to take a minute; `make test-long` walks all of them."""
    walked.check(walk_all(walked.walker, sample(WALK)[::6]))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("point", WALK)
def test_a_fault_point(walked: Walked, point: str) -> None:
    """Every process that passes it, several visits, killed and frozen there, and an error where one can happen."""
    walked.check(walk_all(walked.walker, cases({point: WALK[point]})))
