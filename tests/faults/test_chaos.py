"""`cordee chaos`: real faults, in an order that follows from the seed, and a run that is sound afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cordee.chaos import FAULTS, plan_faults
from cordee.core.errors import JobError

pytestmark = pytest.mark.timeout(150)

JOB = """
[model]
use = "mlp"
[data]
use = "synthetic"
shape = [32]
num_classes = 4
size = 1000
test_size = 50
[training]
batch_size = 32
steps = 10000000
[strategy]
name = "data_parallel"
workers = 2
[cluster]
failure_timeout = "1s"
[checkpoint]
every_steps = 100
"""


def test_the_plan_follows_from_the_seed() -> None:
    plan = plan_faults(list(FAULTS), every_s=2.0, for_s=60.0, seed=1)
    assert plan == plan_faults(list(FAULTS), every_s=2.0, for_s=60.0, seed=1)
    assert plan != plan_faults(list(FAULTS), every_s=2.0, for_s=60.0, seed=2)
    assert [fault.at_s for fault in plan] == [2.0 * n for n in range(1, 30)]
    assert {fault.kind for fault in plan} == set(FAULTS)


@pytest.mark.parametrize(
    ("kinds", "every_s", "message"),
    [(["kil"], 1.0, "no fault 'kil'; did you mean 'kill'"), (["kill"], 0.0, "times longer than nothing")],
)
def test_what_cannot_be_planned(kinds: list[str], every_s: float, message: str) -> None:
    with pytest.raises(JobError, match=message):
        plan_faults(kinds, every_s=every_s, for_s=10.0, seed=0)


@pytest.mark.parametrize(
    ("strategy", "kinds"),
    [
        ("data_parallel", "kill,freeze,leave,coordinator"),
        pytest.param("parameter_server", "partition,leave,coordinator", marks=pytest.mark.long),
    ],
)
def test_a_run_is_sound_after_faults(tmp_path: Path, strategy: str, kinds: str) -> None:
    (tmp_path / "job.toml").write_text(JOB.replace("data_parallel", strategy))
    options = ["--faults", kinds, "--every", "3s", "--for", "10s", "--seed", "5", "--run-dir", "run"]
    command = [sys.executable, "-m", "cordee", "chaos", "job.toml", *options]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "the run is sound" in ended.stdout and "3 faults in" in ended.stdout
