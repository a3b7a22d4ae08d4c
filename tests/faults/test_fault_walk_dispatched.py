"""Dies, freezes or fails at every fault point of a run with parameter servers: it ends with the same weights."""

from __future__ import annotations

import pytest
from fault_walk_dispatched import WALK, make_walker
from walking import Walked, cases, sample

__all__ = ["make_walker"]  # the fixture `walked` takes it from here


@pytest.mark.timeout(900)
def test_killed_at_some_points(walked: Walked) -> None:
    """Every sixth point, for it to take a minute; `make test-long` walks all of them."""
    walked.check(sample(cases(WALK))[::6])


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("point", WALK)
def test_a_fault_point(walked: Walked, point: str) -> None:
    """Every process that passes it, several visits, killed and frozen there, and an error where one can happen."""
    walked.check(cases({point: WALK[point]}))
