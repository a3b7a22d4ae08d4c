"""Dies, freezes or fails at every fault point of a script's run: its loop ends with the weights it would have had."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_walk_script import WALK, make_walker
from walking import Walked, cases, draw, sample

from warm_launch import WarmServer

__all__ = ["make_walker"]  # the fixture `walked` takes it from here


@pytest.mark.timeout(900)
def test_killed_at_the_points_of_a_loop(walked: Walked) -> None:
    loop = {point: walk for point, walk in WALK.items() if point.startswith("loop.")}
    walked.check(sample(cases(loop)))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("two_models", [False, True])
def test_one_trial_at_every_point_of_a_script(tmp_path: Path, two_models: bool, walk_seed: int) -> None:
    with WarmServer() as server:
        Walked(make_walker(server, tmp_path, two_models=two_models)).check(draw(cases(WALK), walk_seed))
