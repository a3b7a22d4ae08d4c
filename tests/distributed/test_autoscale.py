"""A team that scales itself, and threads that are changed while it trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launching import started, wait_until

from cordee.cluster.control import scale_run
from cordee.core import Job
from cordee.core.errors import JobError
from cordee.launch import train
from cordee.tools.audit import audit_run

pytestmark = pytest.mark.timeout(240)

JOB = """
[model]
use = "uneven:Net"
[data]
use = "synthetic"
shape = [16]
num_classes = 4
size = 480
test_size = 0
[training]
batch_size = 24
steps = 100000
threads = 1
[strategy]
name = "data_parallel"
workers = 3
[cluster]
autoscale = true
autoscale_every = "2s"
max_workers = 3
[monitoring]
every_steps = 1
"""
# The first process to get there works, the others only wait for it. Each tells how many threads it has.
UNEVEN = """
import os, time, torch
class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(16, 4)
        self.pause_s = None
    def forward(self, inputs):
        if self.training and torch.is_grad_enabled():
            if self.pause_s is None:
                try:
                    os.close(os.open("busy", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
                    self.pause_s = 0.1
                except FileExistsError:
                    self.pause_s = 0.0
            time.sleep(self.pause_s)
            open(f"threads-{torch.get_num_threads()}", "w").close()
        return super().forward(inputs)
"""


# Every sample takes its time, so that more workers are faster and more threads are not.
STEADY = """
import time, torch
class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(16, 4)
    def forward(self, inputs):
        if self.training and torch.is_grad_enabled():
            time.sleep(0.02 * len(inputs))
            open(f"threads-{torch.get_num_threads()}", "w").close()
        return super().forward(inputs)
"""
# Python imports this in every process: what the coordinator measures of the host is that of one with four times as many
# cores, all of them idle. This machine may have none, and two are too few for it to propose threads.
IDLE_HOST = """
import psutil
psutil.cpu_percent = lambda: -300.0
"""


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    path = folder / "run" / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [event for event in found if event["type"] == kind]


@pytest.mark.long
def test_a_team_that_waits_gets_smaller_and_its_threads_can_be_changed(tmp_path: Path) -> None:
    (tmp_path / "uneven.py").write_text(UNEVEN)
    (tmp_path / "job.toml").write_text(JOB)
    with started("train", "job.toml", "--run-dir", "run", "-q", folder=tmp_path) as command:
        wait_until(lambda: events(tmp_path, "scale") or command.process.poll() is not None, timeout_s=90)
        scaled = events(tmp_path, "scale")[0]
        assert (scaled["before"], scaled["workers"]) == (3, 2)
        assert "of the time and wait for the rest" in scaled["reason"]
        wait_until(lambda: len(events(tmp_path, "generation")[-1]["members"]) == 2)
        assert not (tmp_path / "threads-2").exists()
        assert scale_run(tmp_path / "run", 2, threads=2).endswith("2 workers, 2 threads each")
        wait_until(lambda: (tmp_path / "threads-2").exists())
        command.process.terminate()
        assert command.finish().code == 130
    assert [finding.detail for finding in audit_run(tmp_path / "run") if finding.state != "ok"] == []


@pytest.mark.long
def test_a_team_with_idle_cores_gets_larger_then_more_threads_and_takes_back_what_does_not_pay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "uneven.py").write_text(STEADY)
    (tmp_path / "sitecustomize.py").write_text(IDLE_HOST)
    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    options = ("--workers", "2", "--set", "cluster.autoscale_every=4s", "--run-dir", "run", "-q")
    with started("train", "job.toml", *options, folder=tmp_path) as command:
        wait_until(lambda: len(events(tmp_path, "scale")) >= 3 or command.process.poll() is not None, timeout_s=150)
        out, up, back = events(tmp_path, "scale")[:3]
        assert (out["before"], out["workers"], out["threads"]) == (2, 3, None)
        assert out["reason"].startswith("cores are free: ")
        assert (up["workers"], up["threads"]) == (3, 2)
        assert up["reason"].startswith("cores are free, workers are enough: ")
        assert (tmp_path / "threads-2").exists()
        assert (back["workers"], back["threads"]) == (3, 1) and "steps a second" in back["reason"]
        command.process.terminate()
        assert command.finish().code == 130
    assert [finding.detail for finding in audit_run(tmp_path / "run") if finding.state != "ok"] == []


@pytest.mark.parametrize(
    ("strategy", "cluster", "message"),
    [
        ({"name": "single"}, {}, "which strategy 'single' with 1 cannot: use 'data_parallel'"),
        ({"name": "sharded", "workers": 2}, {}, "which strategy 'sharded' with 2 cannot"),
        ({"name": "data_parallel", "workers": 4}, {"max_workers": 3}, "is more than cluster.max_workers = 3"),
        ({"name": "single"}, {"autoscale": False, "max_workers": 3}, "only with cluster.autoscale = true"),
        ({"name": "single"}, {"max_workers": 3, "min_workers": 4}, "max_workers = 3 is below min_workers = 4"),
        ({"name": "single"}, {"autoscale_every": "10ms"}, "autoscale_every = '10ms' must be at least 1 s"),
    ],
)
def test_what_cannot_be_scaled(tmp_path: Path, strategy: Any, cluster: Any, message: str) -> None:
    table = {"model": "mlp", "data": "iris", "strategy": strategy, "cluster": {"autoscale": True, **cluster}}
    with pytest.raises(JobError) as raised:
        train(Job.from_dict(table), run_dir=tmp_path / "run", quiet=True)
    assert message in str(raised.value)
