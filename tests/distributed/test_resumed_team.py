"""Runs of several workers that are interrupted and resumed end with the weights of uninterrupted ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import warm_launch

pytestmark = pytest.mark.timeout(240)

JOB = """
model = { use = "parts:Net" }
data = { use = "synthetic", shape = [1, 8, 8], size = 90, test_size = 16 }
optimizer = { use = "adam", lr = 0.01 }
training = { batch_size = 24, steps = 12, threads = 1 }
evaluation = { every_steps = 5 }
"""
# Batches are cut unevenly. The second norm keeps a cumulative mean, and one buffer is used while training.
PARTS = """
import torch
from torch import nn

class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("mask", torch.full((4,), float("-inf")))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
            self.calls += 1
        return x - self.mean

def Net(input_shape, num_classes):
    images = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), Shift(), nn.Dropout(0.2))
    return nn.Sequential(images, nn.Flatten(), nn.Linear(288, 16), nn.BatchNorm1d(16, momentum=None), nn.ReLU(),
                         nn.Linear(16, num_classes))
"""


def train(folder: Path, run: str, *arguments: str) -> str:
    process = warm_launch.start("train", "job.toml", "--run-dir", run, *arguments, folder=folder)
    out = "".join(process.communicate(timeout=150))
    assert process.returncode == 0, out
    summary = json.loads((folder / run / "summary.json").read_text())
    return str(summary["weights_sha256"])


LONG = pytest.mark.long


@pytest.mark.parametrize(
    "settings",
    [
        ["strategy.name=data_parallel"],
        pytest.param(["strategy.name=data_parallel", "strategy.batch_norm=local"], marks=LONG),
        pytest.param(["strategy.name=data_parallel", "strategy.batch_norm=sync"], marks=LONG),
        pytest.param(["strategy.name=data_parallel", "strategy.reducer=ddp"], marks=LONG),
        pytest.param(["strategy.name=data_parallel", "strategy.workers=3"], marks=LONG),
        pytest.param(["strategy.name=data_parallel", "training.accumulate=2"], marks=LONG),
        pytest.param(["strategy.name=sharded"], marks=LONG),
        pytest.param(["strategy.name=sharded", "strategy.batch_norm=local"], marks=LONG),
    ],
    ids=",".join,
)
def test_resumed_is_uninterrupted(tmp_path: Path, settings: list[str]) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "parts.py").write_text(PARTS)
    chosen = [argument for one in ["strategy.workers=2", *settings] for argument in ("--set", one)]
    whole = train(tmp_path, "whole", *chosen)
    train(tmp_path, "halves", *chosen, "--set", "stop.steps=7")
    assert train(tmp_path, "halves", *chosen, "--resume") == whole
