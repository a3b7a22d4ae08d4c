"""Data that keeps arriving while workers and the whole run are killed: nothing is left out, nothing counts twice."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import warm_launch
from warm_launch import WarmProcess

pytestmark = pytest.mark.timeout(240)

JOB = """
[model]
use = "mlp"
hidden = [16]
dropout = 0.2
[data]
use = "folder"
root = "{root}"
num_classes = 4
holdout = 0.1
holdout_size = 50
[training]
batch_size = 32
reproducible = true
[cluster]
failure_timeout = "3s"
[evaluation]
every_steps = 10
[checkpoint]
every_steps = 10
[monitoring]
every_steps = 1
"""


def deliver(folder: Path, first: int, last: int) -> None:
    folder.mkdir(exist_ok=True)
    for index in range(first, last):
        dice = np.random.default_rng(index)
        with (folder / "part").open("wb") as file:
            np.savez(file, x=dice.normal(size=(90, 8)).astype(np.float32), y=dice.integers(0, 4, 90))
        (folder / "part").rename(folder / f"{index:04}.npz")


def start(folder: Path, *options: str) -> WarmProcess:
    (folder / "job.toml").write_text(JOB.replace("{root}", str(folder / "in")))
    return warm_launch.start("train", "job.toml", "--run-dir", "run", *options, folder=folder)


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    path = folder / "run" / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [event for event in found if event["type"] == kind]


def wait_for_step(process: WarmProcess, folder: Path, step: int) -> None:
    deadline = time.monotonic() + 90
    while not any(event["step"] >= step for event in events(folder, "step")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.02)


def finish(process: WarmProcess, folder: Path) -> dict[str, Any]:
    output = process.communicate(timeout=120)
    assert process.returncode == 0, output
    summary: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    return summary


def test_killed_while_data_arrives_it_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    alone, folder = tmp_path / "alone", tmp_path / "two"
    for place in (alone, folder):
        place.mkdir()
    deliver(alone / "in", 0, 30)
    (alone / "in" / "END").touch()
    whole = finish(start(alone, "--strategy", "single"), alone)
    assert whole["samples"] == 30 * 81

    deliver(folder / "in", 0, 6)
    process = start(folder, "--strategy", "data_parallel", "--workers", "2")
    try:
        wait_for_step(process, folder, 15)  # all that is there is used up: they wait
        os.kill(events(folder, "worker_started")[-1]["pid"], signal.SIGKILL)
        deliver(folder / "in", 6, 14)
        wait_for_step(process, folder, 34)
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    finally:
        process.kill()
        process.communicate()
    assert not psutil.wait_procs(family, timeout=5)[1]
    assert any(event["type"] == "worker_lost" for event in events(folder, "worker_lost"))
    for index in range(5):  # trained on before the last checkpoint
        (folder / "in" / f"{index:04}.npz").unlink()
    deliver(folder / "in", 14, 30)
    (folder / "in" / "END").touch()
    resumed = finish(start(folder, "--strategy", "single", "--resume"), folder)
    assert resumed["samples"] == whole["samples"] and resumed["steps"] == whole["steps"]
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert resumed["test_loss"] == whole["test_loss"]
