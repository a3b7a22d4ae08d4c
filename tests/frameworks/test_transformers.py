"""A model of transformers through `cordee train`: the same weights with every strategy, also when a worker is killed.

Run by `make test-frameworks`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(600)

JOB = Path(__file__).parents[2] / "examples" / "bert.toml"
SHORT = ("training.steps=10", "data.train_limit=200", "data.test_limit=50", "monitoring.every_steps=1")


def command(run: Path, strategy: str, workers: int, *settings: str) -> list[str]:
    options = [part for one in (*SHORT, *settings) for part in ("--set", one)]
    table = JOB.read_text().replace("epochs = 4\n", "").replace("lr = 0.002", "lr = 0.002\neps = 1e-4")
    job = run.with_suffix(".toml")
    job.write_text(f'python_path = ["{JOB.parent}"]\n{table}')
    return [
        sys.executable,
        "-m",
        "cordee",
        "train",
        str(job),
        "--strategy",
        strategy,
        "--workers",
        str(workers),
        "--run-dir",
        str(run),
        *options,
    ]


def train(run: Path, strategy: str, workers: int, *settings: str) -> dict[str, Any]:
    done = subprocess.run(command(run, strategy, workers, *settings), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads((run / "summary.json").read_text())  # type: ignore[no-any-return]


def weights(run: Path) -> dict[str, Any]:
    files = sorted((run / "checkpoints" / "step-10").glob("*.safetensors"))
    found = {name: value for file in files for name, value in load_file(file).items()}
    return {name: value.double() for name, value in found.items() if "optimizer" not in name}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("alone") / "run"
    assert train(run, "single", 1)["test_accuracy"] is not None
    return run


@pytest.mark.parametrize("strategy", ["data_parallel", "sharded", "parameter_server"])
def test_the_same_weights(strategy: str, alone: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", strategy, 2)
    one, two = weights(alone), weights(tmp_path / "run")
    assert one.keys() == two.keys() and len(one) > 30
    # Shares are padded to different lengths, and sums of single precision are made in another order.
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 2e-4


def test_the_same_bits_and_a_worker_killed(tmp_path: Path) -> None:
    reproducible = ("training.reproducible=true",)
    expected = train(tmp_path / "alone", "single", 1, *reproducible)["weights_sha256"]
    assert train(tmp_path / "servers", "parameter_server", 2, *reproducible)["weights_sha256"] == expected
    run = tmp_path / "killed"
    process = subprocess.Popen(
        command(run, "data_parallel", 2, *reproducible), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    events = run / "events.jsonl"
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        found = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
        if any(event["type"] == "step" and event["step"] >= 3 for event in found):
            break
        time.sleep(0.02)
    pid = next(event["pid"] for event in found if event["type"] == "worker_started" and event["worker"] == 1)
    os.kill(pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    summary = json.loads((run / "summary.json").read_text())
    assert summary["weights_sha256"] == expected and summary["recoveries"] >= 1
