"""Real signals into real workers: the culprit is named, nothing hangs, nothing is left behind."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

JOB = """
[model]
use = "mlp"
hidden = [256, 256]
[data]
use = "synthetic"
shape = [64]
num_classes = 10
size = 4096
test_size = 256
[training]
batch_size = 64
epochs = 100000
[strategy]
name = "data_parallel"
workers = 2
[cluster]
failure_timeout = "2s"
[monitoring]
every_steps = 1
[checkpoint]
every_steps = 50
"""
NUM_SEEDS = int(os.environ.get("CORDEE_FAULT_TRIALS", "4"))


class Launched:
    """A `cordee train` in a process of its own, and what its events say."""

    def __init__(self, folder: Path, *args: str) -> None:
        self.run_dir = folder / "run"
        job = folder / "job.toml"
        job.write_text(JOB)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cordee", "train", str(job), "--run-dir", str(self.run_dir), *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.family: set[int] = set()

    def events(self) -> list[dict[str, object]]:
        path = self.run_dir / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def pids(self) -> dict[int, int]:
        return {e["worker"]: e["pid"] for e in self.events() if e["type"] == "worker_started"}  # type: ignore[misc]

    def wait_for_step(self, step: int, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.process.communicate()
            if any(e["type"] == "step" and e["step"] >= step for e in self.events()):  # type: ignore[operator]
                children = psutil.Process(self.process.pid).children(recursive=True)
                self.family = {child.pid for child in children}
                return
            time.sleep(0.05)
        raise AssertionError(f"step {step} was not reached in {timeout_s} s")

    def finish(self, timeout_s: float) -> tuple[int, str]:
        _, stderr = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, stderr

    def survivors(self, timeout_s: float = 5.0) -> set[int]:
        """Return which of the processes are still there after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            alive = {pid for pid in self.family if psutil.pid_exists(pid)}
            if not alive:
                return set()
            time.sleep(0.05)
        return alive


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    run = Launched(tmp_path)
    yield run
    if run.process.poll() is None:
        run.process.kill()
        run.process.communicate()


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_a_killed_worker_is_named(launched: Launched, seed: int) -> None:
    chance = random.Random(seed)
    launched.wait_for_step(chance.randint(1, 60))
    victim = chance.randrange(2)
    os.kill(launched.pids()[victim], signal.SIGKILL)
    killed_s = time.monotonic()
    code, stderr = launched.finish(timeout_s=15)
    assert time.monotonic() - killed_s < 5.0
    assert code == 1
    named = re.search(rf"worker {victim} was killed by SIGKILL \(in step (\d+)\)", stderr)
    assert named, stderr
    last_step = max(int(e["step"]) for e in launched.events() if e["type"] == "step")  # type: ignore[call-overload]
    # A step may have been under way; and worker 0, which tells of steps, takes to its grave what it had not sent yet.
    assert 0 <= int(named[1]) - last_step <= (2 if victim else 20)
    assert "Traceback" not in stderr
    assert not launched.survivors()
    summary = json.loads((launched.run_dir / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert f"worker {victim}" in summary["error"]


def test_a_frozen_worker_is_named_after_the_failure_timeout(launched: Launched) -> None:
    launched.wait_for_step(5)
    os.kill(launched.pids()[1], signal.SIGSTOP)
    frozen_s = time.monotonic()
    code, stderr = launched.finish(timeout_s=20)
    assert time.monotonic() - frozen_s < 10.0
    assert code == 1
    assert "worker 1 is frozen" in stderr
    assert not launched.survivors()


def test_ctrl_c_saves_and_leaves_nothing(launched: Launched) -> None:
    launched.wait_for_step(5)
    launched.process.send_signal(signal.SIGINT)
    code, stderr = launched.finish(timeout_s=15)
    assert code == 130, stderr
    assert not launched.survivors()
    summary = json.loads((launched.run_dir / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert (launched.run_dir / "checkpoints" / f"step-{summary['steps']}").is_dir()


def test_ctrl_c_twice_ends_at_once(launched: Launched) -> None:
    launched.wait_for_step(5)
    os.kill(launched.pids()[1], signal.SIGSTOP)  # so that the first one cannot be obeyed
    launched.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    launched.process.send_signal(signal.SIGINT)
    code, _ = launched.finish(timeout_s=5)
    assert code == 130
    assert not launched.survivors()


def test_no_orphans_when_the_launcher_is_killed(launched: Launched) -> None:
    launched.wait_for_step(5)
    launched.process.kill()
    launched.process.communicate()
    assert not launched.survivors()


def test_a_worker_that_raises_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(
        "import os, torch\n"
        "class Net(torch.nn.Linear):\n"
        "    calls = 0\n"
        "    def __init__(self): super().__init__(64, 10)\n"
        "    def forward(self, x):\n"
        "        self.calls += self.training\n"
        "        if self.calls == 8 and torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:\n"
        "            raise ValueError('this worker has had enough')\n"
        "        return super().forward(x)\n"
    )
    run = Launched(tmp_path, "--set", "model={use='faulty:Net'}")
    code, stderr = run.finish(timeout_s=60)
    assert code == 1
    assert "worker 1 raised" in stderr
    assert "this worker has had enough" in stderr
    assert "step 8" in stderr
    assert stderr.count("\n") <= 2
    assert "Traceback" not in stderr
    assert "this worker has had enough" in (run.run_dir / "logs" / "worker-1.log").read_text()


def test_a_worker_that_exits_early_is_named(tmp_path: Path) -> None:
    (tmp_path / "leaver.py").write_text(
        "import os, torch\n"
        "class Net(torch.nn.Linear):\n"
        "    calls = 0\n"
        "    def __init__(self): super().__init__(64, 10)\n"
        "    def forward(self, x):\n"
        "        self.calls += self.training\n"
        "        if self.calls == 8 and torch.distributed.is_initialized() and torch.distributed.get_rank() == 0:\n"
        "            os._exit(3)\n"
        "        return super().forward(x)\n"
    )
    run = Launched(tmp_path, "--set", "model={use='leaver:Net'}")
    code, stderr = run.finish(timeout_s=60)
    assert code == 1
    assert "worker 0 exited with code 3" in stderr
