"""A lost worker of a model that is split: named at once, and the run goes on from the last checkpoint."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_team_faults import Launched

pytestmark = pytest.mark.timeout(150)

EVERY_STEPS = 20
STRATEGIES = {
    "pipeline": ["--strategy", "pipeline"],
    "sharded": ["--strategy", "sharded"],
    "hybrid": ["--strategy", "hybrid", "--workers", "4", "--set", "strategy.mesh={data=2,pipeline=2}"],
}

Launch = Callable[..., Launched]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    runs: list[Launched] = []

    def start(*args: str) -> Launched:
        runs.append(Launched(tmp_path, *args, "--set", f"checkpoint.every_steps={EVERY_STEPS}"))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
            run.process.communicate()


def last_step(run: Launched) -> int:
    return max(int(event["step"]) for event in run.events() if event["type"] == "step")  # type: ignore[call-overload]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_killed_worker_costs_the_steps_since_the_last_checkpoint(launch: Launch, name: str) -> None:
    run = launch(*STRATEGIES[name])
    run.wait_for_step(EVERY_STEPS + 5)
    victim = 1
    os.kill(run.pids()[victim], signal.SIGKILL)
    killed_s = time.monotonic()
    code, stderr = run.finish(timeout_s=20)
    assert time.monotonic() - killed_s < 10.0
    assert code == 1
    assert re.search(rf"worker {victim} was killed by SIGKILL \(in step \d+\)", stderr), stderr
    assert "Traceback" not in stderr
    assert not run.survivors()
    reached = last_step(run)

    again = launch(*STRATEGIES[name], "--resume", "--set", f"stop.steps={reached + 10}")
    code, stderr = again.finish(timeout_s=60)
    assert code == 0, stderr
    (_, started) = [event for event in again.events() if event["type"] == "run_started"]
    assert 0 <= reached - int(started["start_step"]) <= EVERY_STEPS + 2  # type: ignore[call-overload]
    summary = json.loads((again.run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("stopped", reached + 10)


def test_a_frozen_stage_is_named(launch: Launch) -> None:
    run = launch(*STRATEGIES["pipeline"])
    run.wait_for_step(5)
    os.kill(run.pids()[1], signal.SIGSTOP)
    code, stderr = run.finish(timeout_s=30)
    assert code == 1
    assert "worker 1 is frozen" in stderr
    assert not run.survivors()
