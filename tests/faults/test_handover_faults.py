"""A member is lost while another generation is entered: nobody's optimizer, weights or place in the data are lost."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

import warm_launch
from cordee import checkpoint
from cordee.core.fault_points import Fault, ask_for, happened
from cordee.tools.audit import audit_run

pytestmark = pytest.mark.timeout(240)

STEPS = 12
JOB = f"""
[model]
use = "mlp"
hidden = [64]
[data]
use = "synthetic"
shape = [32]
num_classes = 10
size = 256
test_size = 64
[optimizer]
use = "adam"
lr = 0.01
[training]
batch_size = 32
steps = {STEPS}
reproducible = true
[strategy]
name = "data_parallel"
workers = 2
[cluster]
failure_timeout = "10s"
min_workers = {{workers}}
[evaluation]
every_steps = 4
[checkpoint]
every_steps = 8
"""
LOST = Fault("step.begun", "worker-1", "kill", visit=6)  # its replacement is what the others hand over to


def train(folder: Path, *faults: Fault, workers: int = 2) -> Path:
    """Train with faults; return the run directory. Nobody trains alone while a replacement is on its way."""
    (folder / "job.toml").write_text(JOB.replace("{workers}", str(workers)))
    environment = os.environ | (ask_for(folder / "faults", faults) if faults else {})
    strategy = ["--strategy", "single"] if workers == 1 else []
    arguments = ["train", "job.toml", "--run-dir", "run", "--workers", workers, *strategy]
    done = warm_launch.run(*arguments, folder=folder, environment=environment)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def outcome(run_dir: Path) -> tuple[str, set[float]]:
    """Return the hash of the weights, and the steps that the optimizer counted for each parameter."""
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "completed" and summary["steps"] == STEPS
    loaded = checkpoint.load_newest(run_dir / "checkpoints")
    assert loaded is not None
    counters = {float(t) for name, t in loaded.state.part("optimizer").tensors.items() if name.endswith(".step")}
    return summary["weights_sha256"], counters


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, set[float]]:
    found = outcome(train(tmp_path_factory.mktemp("undisturbed"), workers=1))
    assert found[1] == {STEPS}
    return found


@pytest.mark.parametrize(
    ("point", "process", "action", "visit"),
    [
        ("setup.begun", "worker-1", "kill", 2),  # the replacement dies while the survivor's optimizer is new
        ("enter.agreed", "worker-0", "error", 2),  # one has set up, the other has not
        ("enter.agreed", "worker-1", "error", 2),
        ("share.described", "worker-0", "error", 1),
        ("share.done", "worker-0", "kill", 1),  # the replacement has what it needs, or not
        ("setup.shared", "worker-0", "kill", 2),  # the replacement is the only one that has it
        ("enter.resumed", "worker-1", "error", 2),
        ("enter.resumed", "worker-0", "kill", 2),
    ],
)
def test_a_loss_during_hand_over_costs_nothing(
    tmp_path: Path,
    undisturbed: tuple[str, set[float]],
    point: str,
    process: str,
    action: str,
    visit: int,
) -> None:
    fault = Fault(point, process, action, visit=visit)  # type: ignore[arg-type]
    run_dir = train(tmp_path, LOST, fault)
    assert happened(tmp_path / "faults") == [LOST, fault]
    assert outcome(run_dir) == undisturbed
    assert [finding.detail for finding in audit_run(run_dir) if finding.state != "ok"] == []


DRIFTS = """
import torch, torch.distributed as dist
from torch import nn
class Net(nn.Sequential):
    num_passes = 0
    def __init__(self):
        super().__init__(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10))
    def forward(self, inputs):
        self.num_passes += self.training
        if self.num_passes == 30 and self.training and dist.get_rank() == 1:
            with torch.no_grad():
                self[0].weight[3, 4] += 1e-6
        return super().forward(inputs)
"""


def test_members_that_differ_stop_the_run_before_they_save(tmp_path: Path) -> None:
    """One bit of one weight of one worker is another, long before the end of the run and between two checkpoints."""
    (tmp_path / "drifts.py").write_text(DRIFTS)
    job = JOB.replace("{workers}", "2").replace('use = "mlp"\nhidden = [64]', 'use = "drifts:Net"')
    job = job.replace("reproducible = true", "").replace(f"steps = {STEPS}", "steps = 100000")
    (tmp_path / "job.toml").write_text(job)
    done = warm_launch.run("train", "job.toml", "--run-dir", "run", folder=tmp_path)
    assert done.returncode == 1
    found = re.search(r"the members differ at step (\d+): worker 1 has other weights", done.stderr)
    assert found is not None, done.stderr
    step = int(found[1])
    assert 30 <= step <= 32  # the next checkpoint would be of step 32
    assert {path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")} == {"step-8", "step-16", "step-24"}
