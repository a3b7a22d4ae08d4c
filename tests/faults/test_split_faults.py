"""A lost worker of a model that is split: all start again from the last checkpoint, or the run ends and names it."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from test_team_faults import Launched, launch

pytestmark = [pytest.mark.long, pytest.mark.timeout(150)]

EVERY_STEPS = 20
STEPS = 60
VICTIM = 1
COMMON = ["--set", "training.reproducible=false", "--set", f"checkpoint.every_steps={EVERY_STEPS}"]
STRATEGIES = {
    "pipeline": ["--strategy", "pipeline"],
    "sharded": ["--strategy", "sharded"],
    "tensor": ["--strategy", "tensor", "--set", 'strategy.plan={"0"="column","3"="row"}'],
    "hybrid": ["--strategy", "hybrid", "--workers", "4", "--set", "strategy.mesh={data=2,pipeline=2}"],
    "sharded pipeline": ["--strategy", "hybrid", "--workers", "4", "--set", "strategy.mesh={sharded=2,pipeline=2}"],
}


def kill(run: Launched, step: int, number: signal.Signals = signal.SIGKILL) -> None:
    run.wait_for_step(step)
    os.kill(run.pids()[VICTIM], number)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_killed_worker_costs_the_steps_since_the_last_checkpoint(tmp_path: Path, name: str) -> None:
    with launch(tmp_path, *STRATEGIES[name], *COMMON, steps=STEPS) as run:
        kill(run, EVERY_STEPS + 5)
        code, stderr = run.finish(timeout_s=100)
        assert code == 0, stderr
        assert not run.survivors()
        summary = run.summary()
        assert (summary["status"], summary["steps"], summary["recoveries"]) == ("completed", STEPS, 1)
        assert 0 < summary["steps_redone"] <= EVERY_STEPS + 1  # a step may have been under way
        assert [event["worker"] for event in run.of("worker_lost")] == [VICTIM]


def test_without_restarts_the_run_ends_and_can_be_resumed(tmp_path: Path) -> None:
    arguments = [*STRATEGIES["pipeline"], *COMMON, "--set", "cluster.max_restarts=0"]
    with launch(tmp_path, *arguments, steps=STEPS) as run:
        kill(run, EVERY_STEPS + 5)
        code, stderr = run.finish(timeout_s=30)
        assert code == 1
        assert re.search(rf"worker {VICTIM} was killed by SIGKILL \(in step \d+\)", stderr), stderr
        assert "Traceback" not in stderr
        assert not run.survivors()
    with launch(tmp_path, *arguments, "--resume", steps=STEPS) as again:
        code, stderr = again.finish(timeout_s=60)
        assert code == 0, stderr
        assert again.of("run_started")[-1]["start_step"] in (EVERY_STEPS, 2 * EVERY_STEPS)
        assert again.summary()["steps"] == STEPS


def test_a_frozen_stage_is_named(tmp_path: Path) -> None:
    with launch(tmp_path, *STRATEGIES["pipeline"], *COMMON, "--set", "cluster.max_restarts=0") as run:
        kill(run, 5, signal.SIGSTOP)
        code, stderr = run.finish(timeout_s=30)
        assert code == 1
        assert f"worker {VICTIM} is frozen" in stderr
        assert not run.survivors()


def test_a_worker_that_is_told_to_leave_loses_nothing(tmp_path: Path) -> None:
    with launch(tmp_path, *STRATEGIES["pipeline"], *COMMON) as run:
        kill(run, 5, signal.SIGTERM)
        code, stderr = run.finish(timeout_s=60)
        assert code == 1
        saved = re.search(r"were told to leave, and too few are left to continue. Step (\d+) is saved", stderr)
        assert saved, stderr
        assert "Traceback" not in stderr
        assert int(saved[1]) == run.of("checkpoint")[-1]["step"] >= max(int(event["step"]) for event in run.of("step"))
