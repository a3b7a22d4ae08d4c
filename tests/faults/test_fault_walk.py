"""Dies, freezes or fails at every fault point: the run ends with the weights that it would have had."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_walk import AGENT_WALK, WALK, make_walker
from fault_walk_dispatched import WALK as DISPATCHED_WALK
from fault_walk_script import WALK as SCRIPT_WALK
from fault_walk_split import SLICES_WALK, STRATEGIES, choose
from fault_walk_split import make_walker as make_split_walker
from walking import Walked, cases, draw, sample

from cordee.core.fault_points import POINTS
from warm_launch import WarmServer

# What a lost worker did alone is lost: the weights are not those of the undisturbed run, but of plain torch without it.
WALKED_ELSEWHERE = {f"agree.{when}": "distributed/test_local_sgd.py" for when in ("gathered", "exchanged", "done")}
WALKED_ELSEWHERE |= {point: "distributed/test_federation.py" for point in POINTS if point.startswith("federation.")}

__all__ = ["make_walker"]  # the fixture `walked` takes it from here


def test_every_point_is_walked() -> None:
    assert set(POINTS) == {*WALK, *DISPATCHED_WALK, *AGENT_WALK, *SCRIPT_WALK, *SLICES_WALK, *WALKED_ELSEWHERE}, (
        "a point in core/fault_points.py needs an entry in tests/faults/fault_walk.py, or in that of another walk"
    )


@pytest.mark.timeout(900)
def test_killed_at_some_points(walked: Walked) -> None:
    """Every fourth point, for it to take a minute; `make test-long` has one trial at each, `make test-faults` all."""
    walked.check(sample(cases(WALK))[::4])


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_one_trial_at_every_point(walked: Walked, walk_seed: int) -> None:
    walked.check(draw(cases(WALK), walk_seed))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_trial_at_every_point_of_a_split_model(tmp_path: Path, strategy: str, walk_seed: int) -> None:
    with WarmServer() as server:
        walker = make_split_walker(server, tmp_path, strategy)
        Walked(walker).check(draw(choose(walker), walk_seed))
