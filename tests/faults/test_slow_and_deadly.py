"""Workers that hold the others up, or die over the same samples, are named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import warm_launch

pytestmark = pytest.mark.timeout(240)

JOB = """
[model]
use = "lame:Net"
[data]
use = "synthetic"
shape = [16]
num_classes = 4
size = 256
test_size = 0
[training]
batch_size = 32
steps = 12
threads = 1
[strategy]
name = "{strategy}"
workers = 3
[cluster]
max_restarts = 100
"""
# The first process that gets to its first step is slow from step 4 on, and leaves its number.
LAME = """
import os, time, torch
class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(16, 4)
        self.calls, self.is_slow = 0, None
    def forward(self, inputs):
        if self.training and torch.is_grad_enabled():
            if self.is_slow is None:
                try:
                    os.close(os.open("slow", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
                    self.is_slow = True
                    open("pid", "w").write(str(os.getpid()))
                except FileExistsError:
                    self.is_slow = False
            self.calls += 1
            time.sleep(0.4 if self.is_slow and self.calls >= 4 else 0.02)
        return super().forward(inputs)
"""


def launch(folder: Path, strategy: str, *settings: str) -> tuple[int, str, list[dict[str, Any]]]:
    (folder / "lame.py").write_text(LAME)
    (folder / "job.toml").write_text(JOB.replace("{strategy}", strategy))
    ran = warm_launch.run("train", "job.toml", "--run-dir", "run", *settings, folder=folder)
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    return ran.returncode, ran.stdout + ran.stderr, [json.loads(line) for line in lines]


@pytest.mark.parametrize("strategy", ["data_parallel", pytest.param("parameter_server", marks=pytest.mark.long)])
def test_a_slow_worker_is_named_within_three_steps(tmp_path: Path, strategy: str) -> None:
    code, output, events = launch(tmp_path, strategy)
    assert code == 0, output
    slow_pid = int((tmp_path / "pid").read_text())
    (index,) = [e["worker"] for e in events if e["type"] == "worker_started" and e["pid"] == slow_pid]
    (straggler,) = [event for event in events if event["type"] == "straggler"]
    assert straggler["worker"] == index
    assert straggler["seconds"] >= 0.4 and straggler["seconds"] >= 5 * straggler["median_seconds"]
    # With servers each unit is a third of a step, and who is slow takes fewer of them.
    assert straggler["step"] <= (6 if strategy == "data_parallel" else 12)
    assert re.search(rf"warning: worker.{index} is slow: step \d+ took it", output), output


def test_samples_that_kill_every_worker_are_named(tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text(
        "import os, signal, torch\n"
        "class Data(torch.utils.data.Dataset):\n"
        "    num_classes = 4\n"
        "    def __len__(self):\n"
        "        return 256\n"
        "    def __getitem__(self, index):\n"
        "        if index == 100:\n"
        "            os.kill(os.getpid(), signal.SIGSEGV)\n"
        "        return torch.randn(16), index % 4\n"
    )
    settings = ["--set", "data={use='deadly:Data'}", "--set", "model={use='mlp'}"]
    code, output, events = launch(tmp_path, "parameter_server", *settings)
    assert code == 1
    found = re.search(
        r"a worker was lost in each of 3 attempts at samples (\d+) to (\d+) of epoch 1 \(step \d+\)", output
    )
    assert found, output
    assert int(found[2]) - int(found[1]) + 1 in (10, 11), "a third of a batch"
    assert sum(event["type"] == "worker_lost" for event in events) == 3
