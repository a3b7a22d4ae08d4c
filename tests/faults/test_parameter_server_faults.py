"""Real signals into the processes of a parameter-server run: it ends with the weights it would have had."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from wires import Wires, two_networks

import warm_launch
from cordee.cluster.control import scale_run
from cordee.core import fault_points
from warm_launch import WarmProcess

pytestmark = pytest.mark.timeout(240)

JOB = """
[model]
use = "unhurried:Net"
[data]
use = "synthetic"
shape = [32]
num_classes = 5
size = 960
test_size = 64
[optimizer]
use = "adam"
lr = 0.003
[training]
batch_size = 32
epochs = 12
threads = 1
[strategy]
name = "parameter_server"
workers = 2
servers = 2
[cluster]
failure_timeout = "3s"
max_restarts = 20
[monitoring]
every_steps = 1
[checkpoint]
every_steps = 50
"""
# Takes its time while a file "slowly" is there.
UNHURRIED = """
import os, time
from torch import nn
class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
    def forward(self, inputs):
        time.sleep(0.2 * (self.training and os.path.exists(os.path.dirname(__file__) + "/slowly")))
        return super().forward(inputs)
"""
NUM_STEPS = 360
TRAIN = [sys.executable, "-m", "cordee", "train"]
NUM_TRIALS = int(os.environ.get("CORDEE_FAULT_TRIALS", "1"))


class Launched:
    """A `cordee train` in a process of its own, and what its events say."""

    def __init__(self, folder: Path, *settings: str, wires: Wires | None = None, lose_messages: float = 0.0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.run_dir = folder / "run"
        (folder / "job.toml").write_text(JOB)
        (folder / "unhurried.py").write_text(UNHURRIED)
        options = [part for setting in settings for part in ("--set", setting)]
        command = ["train", str(folder / "job.toml"), "--run-dir", str(self.run_dir), *options]
        self.process: subprocess.Popen[str] | WarmProcess
        if wires is None:
            environment = {**os.environ, **fault_points.ask_to_lose(lose_messages)}
            self.process = warm_launch.start(*command, folder=folder, environment=environment)
        else:
            inside = wires.inside(0, sys.executable, "-m", "cordee", *command)
            self.process = subprocess.Popen(inside, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.run_dir / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in found if event["type"] == kind]

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 90
        while not any(event["step"] >= step for event in self.events("step")):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, f"step {step} was not reached"
            time.sleep(0.02)

    def wait_for(self, kind: str, is_it: Callable[[dict[str, Any]], bool], count: int = 1) -> None:
        deadline = time.monotonic() + 60
        while sum(is_it(event) for event in self.events(kind)) < count:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, f"{kind} did not happen"
            time.sleep(0.02)

    def pids(self, role: str) -> list[int]:
        return [event["pid"] for event in self.events("worker_started") if event["role"] == role]

    def fork_server(self) -> int:
        """Return the pid of the present one: it leads a session, and what it forks does not."""
        children = psutil.Process(self.process.pid).children()
        return next(child.pid for child in children if os.getsid(child.pid) == child.pid)

    def finish(self) -> dict[str, Any]:
        """Wait for the end; nothing of the run may be left 5 s later."""
        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended by now
            family = psutil.Process(self.process.pid).children(recursive=True)
        output = self.process.communicate(timeout=150)
        assert self.process.returncode == 0, output
        assert not psutil.wait_procs(family, timeout=5)[1]
        summary: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return summary


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    summary = Launched(tmp_path_factory.mktemp("undisturbed")).finish()
    assert summary["steps"] == NUM_STEPS
    return str(summary["weights_sha256"])


@pytest.mark.parametrize("seed", range(NUM_TRIALS))
def test_a_random_loss_changes_nothing(tmp_path: Path, undisturbed: str, seed: int) -> None:
    """Any process but the launcher, killed or frozen at any step, with messages lost on top in every second trial."""
    draw = random.Random(seed)
    launched = Launched(tmp_path, "strategy.replicas = 2", lose_messages=0.05 if seed % 2 else 0.0)
    launched.wait_for_step(draw.randint(1, NUM_STEPS // 2))
    role = ["server", "worker", "evaluator"][seed % 3]
    victim = draw.choice(launched.pids(role))
    os.kill(victim, draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]))
    summary = launched.finish()
    assert (summary["status"], summary["steps"]) == ("completed", NUM_STEPS)
    assert summary["recoveries"] >= 1
    assert [event["role"] for event in launched.events("worker_lost")] == [role]
    assert summary["weights_sha256"] == undisturbed
    samples = [event["samples"] for event in launched.events("step")]
    assert samples == sorted(samples) and samples[-1] == NUM_STEPS * 32


def test_a_killed_coordinator_comes_back(tmp_path: Path, undisturbed: str) -> None:
    """Killed while all train, with a worker at the same moment, and frozen: each time another takes up."""
    launched = Launched(tmp_path)
    for step, number in ((20, signal.SIGKILL), (100, signal.SIGKILL), (160, signal.SIGSTOP)):
        launched.wait_for_step(step)
        if step == 100:
            os.kill(launched.pids("worker")[0], signal.SIGKILL)
        os.kill(launched.events("coordinator_started")[-1]["pid"], number)
    summary = launched.finish()
    assert (summary["status"], summary["steps"], summary["recoveries"]) == ("completed", NUM_STEPS, 1)
    assert summary["weights_sha256"] == undisturbed
    assert len(launched.events("coordinator_lost")) == 3
    assert [event["step"] for event in launched.events("step")] == list(range(1, NUM_STEPS + 1))
    assert [event["samples"] for event in launched.events("step")] == [32 * n for n in range(1, NUM_STEPS + 1)]


def test_a_killed_fork_server_is_replaced(tmp_path: Path, undisturbed: str) -> None:
    """Killed in mid-run, then stopped and killed just before a worker and a server must be replaced."""
    run = Launched(tmp_path, "strategy.replicas = 2")
    run.wait_for_step(20)
    os.kill(run.fork_server(), signal.SIGKILL)
    run.wait_for("fork_server_lost", lambda event: True)
    run.wait_for_step(60)
    fork_server = run.fork_server()
    os.kill(fork_server, signal.SIGSTOP)
    os.kill(run.pids("worker")[-1], signal.SIGKILL)
    os.kill(run.pids("server")[-1], signal.SIGKILL)
    os.kill(fork_server, signal.SIGKILL)
    summary = run.finish()
    assert summary["weights_sha256"] == undisturbed
    assert len(run.events("fork_server_lost")) == 2


def test_workers_join_leave_freeze_and_wake(tmp_path: Path, undisturbed: str) -> None:
    """One is asked for, somebody else joins; one leaves; one freezes, where nobody is left to take its place."""
    (tmp_path / "slowly").touch()
    launched = Launched(tmp_path, "cluster.max_restarts = 0")
    launched.wait_for_step(2)
    first = {event["worker"]: event["pid"] for event in launched.events("worker_started") if event["role"] == "worker"}
    assert scale_run(launched.run_dir, 3) == "from 2 to 3 workers"
    command = [sys.executable, "-m", "cordee", "join", str(launched.run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as external_worker:
        launched.wait_for(
            "worker_started", lambda event: event["role"] == "worker" and event["pid"] == external_worker.pid
        )
        os.kill(first[0], signal.SIGTERM)
        launched.wait_for("worker_left", lambda event: event["worker"] == 0)
        external_worker.send_signal(signal.SIGINT)
        stdout, stderr = external_worker.communicate(timeout=60)
    assert external_worker.returncode == 0, stderr
    assert "as worker 3" in stdout and "worker 3 is done" in stdout
    os.kill(first[1], signal.SIGSTOP)
    launched.wait_for("worker_lost", lambda event: event["worker"] == 1)
    os.kill(first[1], signal.SIGCONT)
    launched.wait_for("worker_started", lambda event: event["pid"] == first[1], count=2)
    (tmp_path / "slowly").unlink()
    summary = launched.finish()
    assert (summary["status"], summary["steps"]) == ("completed", NUM_STEPS)
    assert summary["weights_sha256"] == undisturbed
    assert sorted(event["worker"] for event in launched.events("worker_left")) == [0, 3]


@pytest.mark.long
def test_too_few_workers_wait_for_others_and_then_save_and_end(tmp_path: Path, undisturbed: str) -> None:
    settings = ("cluster.max_restarts = 0", "cluster.min_workers = 2", "cluster.wait_for_workers = 20")
    launched = Launched(tmp_path, *settings)
    launched.wait_for_step(20)
    os.kill(launched.pids("worker")[0], signal.SIGKILL)
    launched.wait_for("warning", lambda event: "waiting 20 s for others" in event["message"])
    assert scale_run(launched.run_dir, 2) == "from 1 to 2 workers"
    launched.wait_for_step(100)
    os.kill(launched.pids("worker")[1], signal.SIGKILL)
    output = "".join(launched.process.communicate(timeout=60))
    assert launched.process.returncode == 1
    saved = re.search(r"1 of at least 2 workers are left.*Step (\d+) is saved", output, re.DOTALL)
    assert saved and (launched.run_dir / "checkpoints" / f"step-{saved[1]}").is_dir(), output
    options = ["--resume", "--run-dir", str(launched.run_dir), "-q"]
    assert (
        subprocess.run([*TRAIN, str(launched.run_dir / "job.toml"), *options], timeout=120, check=False).returncode == 0
    )
    assert json.loads((launched.run_dir / "summary.json").read_text())["weights_sha256"] == undisturbed


@pytest.mark.long
def test_a_worker_of_another_host_is_cut_off_comes_back_and_is_killed(tmp_path: Path, undisturbed: str) -> None:
    (tmp_path / "slowly").touch()
    with two_networks() as wires:
        launched = Launched(tmp_path, "cluster.address = '10.99.0.1'", wires=wires)
        launched.wait_for_step(2)
        ticket = tmp_path / "ticket"
        shutil.copy(launched.run_dir / "control.json", ticket)
        ticket.chmod(0o600)
        command = wires.inside(1, sys.executable, "-m", "cordee", "join", str(ticket))
        environment = {**os.environ, "CORDEE_CACHE": str(tmp_path / "far")}
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as external_worker:
            launched.wait_for("worker_started", lambda event: event["pid"] == external_worker.pid)
            launched.wait_for_step(launched.events("step")[-1]["step"] + 3)
            wires.cut()
            launched.wait_for("worker_lost", lambda event: "is out of reach" in event["reason"])
            launched.wait_for_step(launched.events("step")[-1]["step"] + 1)
            wires.mend()
            launched.wait_for("worker_started", lambda event: event["pid"] == external_worker.pid, count=2)
            external_worker.kill()
            launched.wait_for("worker_lost", lambda event: event["worker"] == 2, count=2)
        (tmp_path / "slowly").unlink()
        summary = launched.finish()
    assert (summary["status"], summary["steps"], summary["recoveries"]) == ("completed", NUM_STEPS, 2)
    assert summary["weights_sha256"] == undisturbed


@pytest.mark.parametrize("replicas", [1, 2])
def test_servers_told_to_leave_hand_over_and_nothing_is_lost(tmp_path: Path, undisturbed: str, replicas: int) -> None:
    """Those that serve, and with two replicas a follower. None counts as a restart: there are none to be had."""
    launched = Launched(tmp_path, f"strategy.replicas = {replicas}", "cluster.max_restarts = 0")
    launched.wait_for_step(30)
    first = {event["pid"]: event["worker"] for event in launched.events("worker_started") if event["role"] == "server"}
    (tmp_path / "slowly").touch()
    for pid in first:
        before = len(launched.events("worker_left"))
        os.kill(pid, signal.SIGTERM)
        launched.wait_for("worker_left", lambda event: event["role"] == "server", before + 1)
    (tmp_path / "slowly").unlink()
    summary = launched.finish()
    assert (summary["status"], summary["steps"], summary["updates_lost"]) == ("completed", NUM_STEPS, 0)
    assert summary["weights_sha256"] == undisturbed
    assert sorted(event["worker"] for event in launched.events("worker_left")) == sorted(first.values())
    assert not launched.events("worker_lost") and not launched.events("updates_lost")
    assert not any(psutil.pid_exists(pid) for pid in first)


def test_a_lone_server_comes_back_from_the_last_checkpoint_and_says_what_is_lost(tmp_path: Path) -> None:
    launched = Launched(tmp_path)
    launched.wait_for_step(60)
    (tmp_path / "slowly").touch()
    while launched.events("step")[-1]["step"] % 50 > 40:  # the next checkpoint is not near
        time.sleep(0.1)
    launched.wait_for_step(launched.events("step")[-1]["step"] + 2)
    os.kill(launched.pids("server")[1], signal.SIGKILL)
    (tmp_path / "slowly").unlink()
    summary = launched.finish()
    assert (summary["status"], summary["steps"]) == ("completed", NUM_STEPS)
    messages = [event["message"] for event in launched.events("warning")]
    (lost,) = launched.events("updates_lost")
    said = f"server 1 continues from step {lost['from_step']}: its slice lacks the updates of {lost['updates']} steps"
    assert any(said in message for message in messages)
    assert summary["updates_lost"] == lost["updates"] == lost["step"] - lost["from_step"] > 0
    command = [sys.executable, "-m", "cordee", "doctor", "--run", str(launched.run_dir)]
    doctor = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert doctor.returncode != 0 and f"{lost['updates']} lost" in doctor.stdout and "is sound" not in doctor.stdout


@pytest.mark.long
def test_free_running_workers_do_not_stop_for_one_that_is_lost(tmp_path: Path) -> None:
    # Snapshots wait for everybody: there are none here.
    no_snapshots = ("checkpoint.every_steps = 0", "evaluation.every_epochs = 0")
    launched = Launched(tmp_path, "strategy.staleness = 'unbounded'", *no_snapshots)
    launched.wait_for_step(30)
    os.kill(launched.pids("worker")[0], signal.SIGSTOP)
    summary = launched.finish()
    assert summary["samples"] == NUM_STEPS * 32
    (lost,) = launched.events("worker_lost")
    assert lost["role"] == "worker"
    # Steps are counted in order: those that the other took meanwhile are counted with the one that was missing.
    times = [event["time"] for event in launched.events("step") if event["time"] > lost["time"]]
    assert sum(moment < times[0] + 0.05 for moment in times) >= 20


@pytest.mark.long
def test_ctrl_c_saves_and_resume_ends_with_the_same_weights(tmp_path: Path, undisturbed: str) -> None:
    launched = Launched(tmp_path)
    launched.wait_for_step(100)
    launched.process.send_signal(signal.SIGINT)
    output, _ = launched.process.communicate(timeout=60)
    assert launched.process.returncode == 130, output
    summary = json.loads((launched.run_dir / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert 100 <= summary["steps"] < NUM_STEPS
    again = subprocess.run(
        [*TRAIN, str(launched.run_dir / "job.toml"), "--resume", "--run-dir", str(launched.run_dir)],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert again.returncode == 0, again.stderr
    assert json.loads((launched.run_dir / "summary.json").read_text())["weights_sha256"] == undisturbed


@pytest.mark.long
def test_ctrl_c_twice_ends_at_once_and_tells_how_far_it_came(tmp_path: Path) -> None:
    launched = Launched(tmp_path)
    launched.wait_for_step(60)
    for pid in launched.pids("worker"):
        os.kill(pid, signal.SIGSTOP)  # so that the first one cannot be obeyed
    family = psutil.Process(launched.process.pid).children(recursive=True)
    for _ in range(2):
        launched.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    output, _ = launched.process.communicate(timeout=20)
    assert launched.process.returncode == 130, output
    assert not psutil.wait_procs(family, timeout=5)[1]
    summary = json.loads((launched.run_dir / "summary.json").read_text())
    assert (summary["status"], summary["device"]) == ("interrupted", "cpu")
    steps = summary["steps"]
    assert steps >= 60 and (summary["epochs"], summary["samples"]) == ((steps - 1) // 30, 32 * steps)
    saved = {path.name for path in (launched.run_dir / "checkpoints").glob("step-*")}
    found = re.search(r"stopped at once; this continues from (\S+)\n  cordee train \S+ --resume", output)
    assert found and found[1] in saved, output


@pytest.mark.long
def test_a_killed_launcher_leaves_nothing_and_can_be_resumed(tmp_path: Path, undisturbed: str) -> None:
    launched = Launched(tmp_path)
    launched.wait_for_step(60)
    family = psutil.Process(launched.process.pid).children(recursive=True)
    launched.process.kill()
    launched.process.communicate()
    assert not psutil.wait_procs(family, timeout=5)[1]
    command = [*TRAIN, str(launched.run_dir / "job.toml"), "--resume", "--run-dir", str(launched.run_dir), "-q"]
    assert subprocess.run(command, timeout=120, check=False).returncode == 0
    assert json.loads((launched.run_dir / "summary.json").read_text())["weights_sha256"] == undisturbed
