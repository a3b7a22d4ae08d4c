"""A training process killed at random moments, again and again, ends with the weights of one that never was.

`CORDEE_FAULT_TRIALS=50 pytest tests/faults/test_resume.py` kills more often than the default.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

import warm_launch
from warm_launch import WarmProcess

KILLS = int(os.environ.get("CORDEE_FAULT_TRIALS", "0")) or 2
TIMEOUT_S = 120.0
# Of the time an undisturbed process spends on training, how long it may train before it is killed. Together
# the attempts get less than the whole, so that all of them are killed in the middle.
LATEST_KILL = 0.9 / KILLS

# Dropout, running means, momentum, a schedule and augmentation: all of it must continue as if nothing had happened.
# A checkpoint every 3 steps of 40 an epoch is at another place of the epoch each time.
JOB = """
name = "killed"
model = { use = "parts:Net" }
data = { use = "synthetic", shape = [1, 12, 12], size = 640, test_size = 64, augment = ["crop", "flip"] }
optimizer = { use = "sgd", lr = 0.05, momentum = 0.9 }
schedule = { use = "cosine" }
training = { batch_size = 16, epochs = 6, threads = 1 }
evaluation = { every_steps = 25 }
checkpoint = { every_steps = 3, keep = 2 }
monitoring = { every_steps = 2 }
"""
PARTS = """
import time
from torch import nn

def Net(input_shape, num_classes):
    images = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3))
    return nn.Sequential(images, nn.Flatten(), Slow(), nn.Linear(800, num_classes))

class Slow(nn.Module):
    def forward(self, x):
        if self.training:
            time.sleep(0.005)
        return x
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "parts.py").write_text(PARTS)
    return tmp_path


def start(folder: Path, run: str, *arguments: str) -> WarmProcess:
    return warm_launch.start("train", "job.toml", "--run-dir", run, *arguments, folder=folder)


def finish(process: WarmProcess) -> str:
    out = "".join(process.communicate(timeout=TIMEOUT_S))
    assert process.returncode == 0, out
    return out


def events(run: Path) -> list[dict[str, object]]:
    path = run / "events.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def count(run: Path, kind: str) -> int:
    return sum(event["type"] == kind for event in events(run))


def summary(run: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((run / "summary.json").read_text())
    return content


def wait_for(condition: object, process: WarmProcess) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():  # type: ignore[operator]
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


@pytest.mark.timeout(600)
def test_killed_again_and_again_it_ends_with_the_same_weights(folder: Path) -> None:
    dice = random.Random(0)
    finish(start(folder, "undisturbed"))
    expected = summary(folder / "undisturbed")
    training_s = float(str(expected["wall_seconds"]))

    run, first_steps, leftovers = folder / "run", [], 0
    for attempt in range(KILLS):
        process = start(folder, "run", *(["--resume"] if attempt else []))
        try:
            # Counted from the first step: importing torch takes longer than training, and kills during the import
            # prove little. The first attempt may die before its first checkpoint, too.
            wait_for(lambda: count(run, "run_started") > attempt, process)  # noqa: B023 - called at once
            time.sleep(dice.uniform(0, LATEST_KILL * training_s))
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        assert process.returncode == -signal.SIGKILL, "it ended before it was killed: nothing was tested"
        assert not (run / "summary.json").exists()
        first_steps.append([event["start_step"] for event in events(run) if event["type"] == "run_started"][-1])
        leftovers += any(path.suffix == ".tmp" for path in (run / "checkpoints").iterdir())

    out = finish(start(folder, "run", "--resume"))
    found = summary(run)
    assert "damaged" not in out, "a kill must not leave a checkpoint that is not whole"
    for key in ("status", "steps", "epochs", "samples", "train_loss", "test_loss", "test_accuracy", "weights_sha256"):
        assert found[key] == expected[key], key
    assert first_steps == sorted(first_steps), "an attempt began before the one it followed"
    assert len(set(first_steps)) > KILLS // 2, f"hardly any attempt got on: {first_steps}"
    assert not list((run / "checkpoints").glob("*.tmp")), "the next save removes what a killed one left"
    print(f"attempts began at steps {first_steps}, {leftovers} of {KILLS} kills met a half-written checkpoint")


@pytest.mark.timeout(600)
def test_killed_before_anything_was_saved_it_starts_again(folder: Path) -> None:
    process = start(folder, "run", "--set", "checkpoint.every_steps=0")
    try:
        wait_for(lambda: count(folder / "run", "step") > 2, process)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    out = finish(start(folder, "run", "--resume", "--set", "stop.steps=10"))
    assert "no checkpoint yet" in out
    assert summary(folder / "run")["steps"] == 10
