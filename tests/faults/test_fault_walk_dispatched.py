"""Dies, freezes or fails at every fault point of a run with parameter servers: it ends with the same weights."""

from __future__ import annotations

import pytest
from fault_walk_dispatched import WALK, make_walker
from walking import Walked, cases, draw, sample

__all__ = ["make_walker"]  # the fixture `walked` takes it from here


@pytest.mark.timeout(900)
def test_killed_at_some_points(walked: Walked) -> None:
    """Every sixth point, for it to take a minute; `make test-long` has one trial at each, `make test-faults` all."""
    walked.check(sample(cases(WALK))[::6])


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_one_trial_at_every_point(walked: Walked, walk_seed: int) -> None:
    walked.check(draw(cases(WALK), walk_seed))
