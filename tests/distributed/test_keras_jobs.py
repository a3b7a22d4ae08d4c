"""Models of Keras 3, on its torch backend, in jobs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PARTS = """
import keras
import torch

layers = keras.layers


def plain():
    return keras.Sequential([layers.Input((1, 8, 8)), layers.Flatten(), layers.Dense(16, "relu"), layers.Dense(10)])


def dropping():
    return keras.Sequential([layers.Input((1, 8, 8)), layers.Flatten(), layers.Dropout(0.5), layers.Dense(10)])


class Told(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = dropping()

    def forward(self, x):
        return self.model(x, training=self.training)
"""

SCRIPT = """
import cordee, keras_parts

keras_parts.plain()  # of the program itself: names of layers are counted


def train(model, workers):
    table = {
        "model": {"use": f"keras_parts:{model}"},
        "data": {"use": "digits"},
        "training": {"steps": 6, "threads": 1, "reproducible": True},
        "strategy": {"workers": workers},
        "evaluation": {"every_epochs": 0},
    }
    try:
        run = cordee.train(cordee.Job.from_dict(table), quiet=True)
        print(model, workers, run.summary.weights_sha256, sum(p.numel() for p in run.model.parameters()))
    except cordee.CordeeError as error:
        print(model, workers, error)


if __name__ == "__main__":
    for model, workers in (("plain", 1), ("plain", 2), ("dropping", 1), ("Told", 1), ("Told", 2)):
        train(model, workers)
"""


@pytest.mark.timeout(300)
def test_the_same_weights_on_two_workers_and_what_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keras_parts.py").write_text(PARTS)
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "KERAS_BACKEND": "torch"}
    ended = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )
    assert ended.returncode == 0, ended.stderr
    alone, together, dropping, told, told_two = ended.stdout.splitlines()
    assert alone.split()[2:] == together.split()[2:], (alone, together)
    assert len(told.split()) == 4, told
    for line in (dropping, told_two):
        assert "a layer Dropout of Keras, which does nothing in training" in line, line
