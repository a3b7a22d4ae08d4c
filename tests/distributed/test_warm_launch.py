"""The warm launcher runs the same command with the same result as a fresh process, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from warm_launch import WarmServer

JOB = """
[model]
use = "mlp"
[data]
use = "iris"
[training]
batch_size = 16
steps = {steps}
reproducible = true
[strategy]
name = "data_parallel"
workers = 2
"""


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmServer]:
    with WarmServer() as server:
        yield server


def test_the_result_is_that_of_a_fresh_process(warm: WarmServer, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB.replace("{steps}", "5"))
    process = warm.cordee("train", "job.toml", "--run-dir", "warm", folder=tmp_path)
    assert process.communicate(60)[1] == "" and process.returncode == 0
    fresh = [sys.executable, "-m", "cordee", "train", "job.toml", "--run-dir", "fresh"]
    subprocess.run(fresh, cwd=tmp_path, check=True, capture_output=True)
    hashes = {
        json.loads((tmp_path / name / "summary.json").read_text())["weights_sha256"] for name in ("warm", "fresh")
    }
    assert len(hashes) == 1


def test_errors_and_exit_codes_are_the_command_s(warm: WarmServer, tmp_path: Path) -> None:
    process = warm.cordee("train", "nowhere.toml", folder=tmp_path)
    assert "nowhere.toml" in process.communicate(60)[1]
    assert process.returncode == 2


def test_what_is_killed_takes_its_processes_with_it(warm: WarmServer, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB.replace("{steps}", "1000000"))
    process = warm.cordee("train", "job.toml", "--run-dir", "run", folder=tmp_path, environment=dict(os.environ))
    events, deadline_s = tmp_path / "run" / "events.jsonl", time.monotonic() + 60
    while '"step"' not in (events.read_text() if events.exists() else ""):
        assert time.monotonic() < deadline_s and process.poll() is None
        time.sleep(0.05)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 4  # the forker, the fork server, the coordinator, two workers
    process.kill()
    assert process.wait(10) == -9
    assert not psutil.wait_procs(family, timeout=5)[1]
