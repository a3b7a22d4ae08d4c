"""Real signals into real workers: losses are trained around, failing workers named, nothing hangs or is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from wires import Wires, two_networks

import warm_launch
from cordee.bench.harness import describe_machine
from cordee.checkpoint import load, weights_sha256
from cordee.cluster.control import scale_run
from cordee.core.errors import JobError, RunDirectoryError
from cordee.tools.audit import audit_run
from warm_launch import WarmProcess

pytestmark = pytest.mark.timeout(240)

JOB = """
[model]
use = "unhurried:Net"
[data]
use = "synthetic"
shape = [64]
num_classes = 10
size = 4096
test_size = 256
[training]
batch_size = 64
steps = {steps}
reproducible = true
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
# Each of the 8 shards takes a few milliseconds at least, so that a run is not over before anything can happen to it,
# and more while a file "slowly" is there.
UNHURRIED = """
import os, time, torch
class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(256, 10))
    def forward(self, inputs):
        time.sleep((0.05 if os.path.exists(os.path.dirname(__file__) + "/slowly") else 0.003) * self.training)
        return super().forward(inputs)
"""
NUM_TRIALS = int(os.environ.get("CORDEE_FAULT_TRIALS", "1"))
KILLS_IN_A_RUN = 5


class Launched:
    """A `cordee train` in a process of its own, and what its events say."""

    def __init__(
        self, folder: Path, *args: str, steps: int = 1_000_000, before: str = "", wires: Wires | None = None
    ) -> None:
        self.run_dir = folder / "run"
        (folder / "unhurried.py").write_text(before + UNHURRIED)
        job = folder / "job.toml"
        job.write_text(JOB.replace("{steps}", str(steps)))
        command = ["train", str(job), "--run-dir", str(self.run_dir), *args]
        self.process: subprocess.Popen[str] | WarmProcess
        if wires is None:
            self.process = warm_launch.start(*command, folder=folder)
        else:
            inside = wires.inside(0, sys.executable, "-m", "cordee", *command)
            self.process = subprocess.Popen(inside, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.family: set[int] = set()

    def events(self) -> list[dict[str, object]]:
        path = self.run_dir / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def pids(self) -> dict[int, int]:
        return {e["worker"]: e["pid"] for e in self.events() if e["type"] == "worker_started"}  # type: ignore[misc]

    def fork_servers(self) -> list[int]:
        """Return the living ones: one, except while it is replaced. Each leads a session; what it forks does not."""
        return [
            child.pid
            for child in psutil.Process(self.process.pid).children()
            if child.status() != psutil.STATUS_ZOMBIE and os.getsid(child.pid) == child.pid
        ]

    def fork_server(self) -> int:
        """Wait for the fork server, and return its pid."""
        wait_until(self.fork_servers)
        return self.fork_servers()[0]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events() if event["type"] == kind]

    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())

    def wait_for_step(self, step: int, timeout_s: float = 120.0) -> None:
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


STEPS = 250


@contextlib.contextmanager
def launch(
    folder: Path, *args: str, steps: int = STEPS, before: str = "", wires: Wires | None = None
) -> Iterator[Launched]:
    run = Launched(folder, *args, steps=steps, before=before, wires=wires)
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.process.kill()
            run.process.communicate()


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    with launch(tmp_path, steps=1_000_000) as run:
        yield run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of a run on one worker that nothing happens to."""
    with launch(
        tmp_path_factory.mktemp("undisturbed"), "--strategy", "single", "--workers", "1", "--set", "stop.time=300"
    ) as run:
        assert run.finish(timeout_s=220)[0] == 0
        return str(run.summary()["weights_sha256"])


def check_held(run: Launched, undisturbed: str, *, recoveries: int) -> None:
    """The run went through, lost at most a step for each loss, and ended with the weights of the undisturbed one."""
    code, stderr = run.finish(timeout_s=150)
    assert code == 0, stderr
    assert not run.survivors()
    summary = run.summary()
    assert summary["status"] == "completed" and summary["steps"] == STEPS
    assert summary["weights_sha256"] == undisturbed
    assert summary["recoveries"] == recoveries == len(run.of("recovery"))
    assert all(event["steps_redone"] <= 1 for event in run.of("recovery"))
    assert summary["samples"] == STEPS * 64
    assert [finding.detail for finding in audit_run(run.run_dir) if finding.state != "ok"] == []


@pytest.mark.parametrize("seed", range(-(-NUM_TRIALS // KILLS_IN_A_RUN)))
def test_killed_workers_are_trained_around(tmp_path: Path, undisturbed: str, seed: int) -> None:
    """Killed at a random moment, the next one as soon as the replacement of the last is a member."""
    chance = random.Random(seed)
    num_workers = chance.randint(2, 3)
    kills: list[dict[str, Any]] = []
    with launch(tmp_path, "--workers", str(num_workers), "--set", "cluster.max_restarts=100") as run:
        run.wait_for_step(chance.randint(1, 20))
        for number in range(min(NUM_TRIALS, KILLS_IN_A_RUN)):
            (tmp_path / "slowly").touch()  # so that the run does not end while a replacement is on its way
            wait_for_members(run, num_workers)
            run.wait_for_step((run.of("generation")[-1]["step"] or 0) + 1)  # so that all have what they need
            (tmp_path / "slowly").unlink()
            time.sleep(chance.uniform(0.0, 0.1))
            victim = chance.randrange(num_workers)
            killed_s = time.time()
            os.kill(run.pids()[victim], signal.SIGKILL)
            while len(run.of("recovery")) <= number:
                assert time.time() - killed_s < 60 and run.process.poll() is None, run.process.communicate()
                time.sleep(0.01)
            run.wait_for_step(run.of("recovery")[number]["step"])
            kills.append({"seed": seed, "workers": num_workers, "victim": victim, **cost_of(run, number, killed_s)})
        check_held(run, undisturbed, recoveries=len(kills))
        assert [event["worker"] for event in run.of("worker_lost")] == [kill["victim"] for kill in kills]
        assert {event["reason"] for event in run.of("worker_lost")} == {"was killed by SIGKILL"}
        note_kills([{**kill, "weights_equal": run.summary()["weights_sha256"] == undisturbed} for kill in kills])


def cost_of(run: Launched, number: int, killed_s: float) -> dict[str, Any]:
    """Return where a kill happened, and how long it was until the survivors had taken their next step."""
    recovery, events = run.of("recovery")[number], run.events()
    formed = events.index(next(e for e in run.of("generation") if e["generation"] == recovery["generation"]))
    next_step = next(event for event in run.of("step") if event["step"] >= recovery["step"])
    assert events.index(next_step) > formed, (recovery, next_step)
    return {
        "step": recovery["step"],
        "seconds_to_next_step": round(next_step["time"] - killed_s, 4),
        "steps_redone": recovery["steps_redone"],
    }


def note_kills(kills: list[dict[str, Any]]) -> None:
    """Add what kills cost to the file `CORDEE_FAULT_FIGURES`, if one is named."""
    if not (path := os.environ.get("CORDEE_FAULT_FIGURES")):
        return
    figures = Path(path)
    trials = [*(json.loads(figures.read_text())["trials"] if figures.exists() else []), *kills]
    seconds = [trial["seconds_to_next_step"] for trial in trials]
    of_all = {
        "num_trials": len(trials),
        "median_seconds": statistics.median(seconds),
        "worst_seconds": max(seconds),
        "most_steps_redone": max(trial["steps_redone"] for trial in trials),
        "all_weights_equal": all(trial["weights_equal"] for trial in trials),
    }
    figures.write_text(json.dumps({"machine": describe_machine(), **of_all, "trials": trials}, indent=1) + "\n")


def test_a_frozen_worker_is_ended_and_trained_around(tmp_path: Path, undisturbed: str) -> None:
    with launch(tmp_path) as run:
        run.wait_for_step(5)
        os.kill(run.pids()[1], signal.SIGSTOP)
        check_held(run, undisturbed, recoveries=1)
        assert "is frozen" in run.of("worker_lost")[0]["reason"]


FORMING = """
import os, signal, cordee.cluster.rendezvous
tell = cordee.cluster.rendezvous.RendezvousStore.set
def tell_and_go(self, key, value):
    tell(self, key, value)
    if "{key}" in key and os.path.exists(os.path.dirname(__file__) + "/now"):
        try:
            os.unlink(os.path.dirname(__file__) + "/now")  # one of them can
        except FileNotFoundError:
            return
        os.kill(os.getpid(), signal.{number})
cordee.cluster.rendezvous.RendezvousStore.set = tell_and_go
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("key", "number"),
    [("/segment/", "SIGSTOP"), ("/member/", "SIGKILL")],
)
def test_one_is_lost_while_the_next_group_is_formed(tmp_path: Path, undisturbed: str, key: str, number: str) -> None:
    """The others do not wait for it: they hear from the coordinator that the generation is over."""
    with launch(tmp_path, "--workers", "3", before=FORMING.format(key=key, number=number)) as run:
        run.wait_for_step(5)
        (tmp_path / "now").touch()
        os.kill(run.pids()[1], signal.SIGKILL)
        check_held(run, undisturbed, recoveries=1)
        (recovery,) = run.of("recovery")
        assert len(recovery["lost"]) == 2 and not (tmp_path / "now").exists()
        logs = [path.read_text() for path in (run.run_dir / "logs").glob("worker-*.log")]
        assert any("could not meet: worker" in text for text in logs), logs


@pytest.mark.long
def test_all_killed_at_once_go_on_from_the_checkpoint(tmp_path: Path, undisturbed: str) -> None:
    with launch(tmp_path) as run:
        run.wait_for_step(60)
        for pid in run.pids().values():
            os.kill(pid, signal.SIGKILL)
        code, stderr = run.finish(timeout_s=60)
        assert code == 0, stderr
        assert run.summary()["weights_sha256"] == undisturbed
        assert run.summary()["recoveries"] == 1
        assert 1 <= run.summary()["steps_redone"] <= 60


@pytest.mark.long
def test_sigterm_makes_a_worker_leave_in_order(tmp_path: Path, undisturbed: str) -> None:
    with launch(tmp_path, "--workers", "3") as run:
        run.wait_for_step(10)
        os.kill(run.pids()[1], signal.SIGTERM)
        check_held(run, undisturbed, recoveries=0)
        (left,) = run.of("worker_left")
        assert left["worker"] == 1 and not run.of("worker_lost")
        assert run.of("generation")[-1]["members"] == [0, 2]


@pytest.mark.long
def test_a_run_is_scaled_up_and_down(tmp_path: Path, undisturbed: str) -> None:
    with launch(tmp_path, "--strategy", "auto") as run:
        run.wait_for_step(10)
        assert (run.run_dir / "control.json").stat().st_mode & 0o777 == 0o600
        for num_workers in (4, 1):
            assert f"to {num_workers} workers" in scale_run(run.run_dir, num_workers)
            deadline = time.monotonic() + 30
            while len(run.of("generation")[-1]["members"]) != num_workers:
                assert time.monotonic() < deadline and run.process.poll() is None, "it was not scaled in time"
                time.sleep(0.02)
        with pytest.raises(JobError, match=r"training.shards = 8 has no shard for each of 9 workers"):
            scale_run(run.run_dir, 9)
        with pytest.raises(JobError, match=r"training.reproducible = true fixes the number of threads"):
            scale_run(run.run_dir, 1, threads=2)
        check_held(run, undisturbed, recoveries=0)
        plans = run.of("plan")
        assert [plan["workers"] for plan in plans][-1] == 1 and 4 in [plan["workers"] for plan in plans]
        assert all(plan["strategy"] == "data_parallel" and "cordee plan" in plan["reason"] for plan in plans)
    with pytest.raises(RunDirectoryError, match="it has ended"):
        scale_run(run.run_dir, 2)


@pytest.mark.long
def test_four_then_two_then_three_workers_end_with_the_weights_of_one(tmp_path: Path, undisturbed: str) -> None:
    with launch(tmp_path, "--workers", "4") as run:
        for step, num_workers in ((20, 2), (60, 3)):
            run.wait_for_step(step)
            scale_run(run.run_dir, num_workers)
        check_held(run, undisturbed, recoveries=0)
        sizes = [len(event["members"]) for event in run.of("generation")]
        assert (sizes[0], sizes[-1]) == (4, 3) and 2 in sizes


def wait_for_members(run: Launched, num_members: int) -> None:
    deadline = time.monotonic() + 60
    while len(run.of("generation")[-1]["members"]) != num_members:
        assert time.monotonic() < deadline and run.process.poll() is None, run.of("generation")
        time.sleep(0.02)


@pytest.mark.long
def test_a_woken_worker_joins_again_where_nobody_has_its_place(tmp_path: Path, undisturbed: str) -> None:
    (tmp_path / "slowly").touch()
    with launch(tmp_path, "--set", "cluster.max_restarts=0") as run:
        run.wait_for_step(2)
        os.kill(run.pids()[1], signal.SIGSTOP)
        wait_for_members(run, 1)
        os.kill(run.pids()[1], signal.SIGCONT)
        wait_for_members(run, 2)
        (tmp_path / "slowly").unlink()
        check_held(run, undisturbed, recoveries=1)
        assert any("if it is heard again it joins again" in event["message"] for event in run.of("warning"))
        pids = [event["pid"] for event in run.of("worker_started") if event["worker"] == 1]
        assert len(pids) == 2 and len(set(pids)) == 1, "the same process, as a new member"


def test_somebody_joins_freezes_wakes_and_leaves(tmp_path: Path, undisturbed: str) -> None:
    (tmp_path / "slowly").touch()
    with launch(tmp_path) as run:
        run.wait_for_step(2)
        command = [sys.executable, "-m", "cordee", "join", str(run.run_dir)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as external_worker:
            wait_for_members(run, 3)
            run.wait_for_step(run.of("step")[-1]["step"] + 3)
            external_worker.send_signal(signal.SIGSTOP)
            wait_for_members(run, 2)
            external_worker.send_signal(signal.SIGCONT)
            wait_for_members(run, 3)
            external_worker.send_signal(signal.SIGINT)
            stdout, stderr = external_worker.communicate(timeout=30)
        (tmp_path / "slowly").unlink()
        assert external_worker.returncode == 0, stderr
        assert "as worker 2" in stdout and "worker 2 is done" in stdout
        check_held(run, undisturbed, recoveries=1)
        assert [event["worker"] for event in run.of("worker_left")] == [2]


@contextlib.contextmanager
def joining(wires: Wires, ticket: Path, folder: Path, hidden: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """`cordee join` on the other host, which has a cache of its own, and an empty folder in the place of `hidden`."""
    join = [sys.executable, "-m", "cordee", "join", str(ticket)]
    if hidden is not None:  # `ip netns exec` gives each process mounts of its own
        join = ["sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(hidden), *join]
    command = wires.inside(1, *join)
    environment = {**os.environ, "CORDEE_CACHE": str(folder)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as external_worker:
        try:
            yield external_worker
        finally:
            external_worker.kill()


@pytest.mark.long
def test_a_worker_of_another_host_joins_is_cut_off_comes_back_and_is_killed(tmp_path: Path, undisturbed: str) -> None:
    (tmp_path / "slowly").touch()
    with two_networks() as wires, launch(tmp_path, "--set", "cluster.address=10.99.0.1", wires=wires) as run:
        run.wait_for_step(2)
        ticket = tmp_path / "ticket"
        shutil.copy(run.run_dir / "control.json", ticket)
        ticket.chmod(0o600)
        with joining(wires, ticket, tmp_path / "far") as external_worker:
            wait_for_members(run, 3)
            run.wait_for_step(run.of("step")[-1]["step"] + 3)
            wires.cut()
            cut_s = time.monotonic()
            wait_for_members(run, 2)
            run.wait_for_step(run.of("step")[-1]["step"] + 1)
            assert time.monotonic() - cut_s < 30, "it waited for what gloo waits for, and not for the failure timeout"
            wires.mend()
            wait_for_members(run, 3)
            run.wait_for_step(run.of("step")[-1]["step"] + 3)
            external_worker.kill()
            wait_for_members(run, 2)
            stdout, _ = external_worker.communicate()
        (tmp_path / "slowly").unlink()
        assert "as worker 2" in stdout and "without encryption" not in stdout
        check_held(run, undisturbed, recoveries=2)
        assert [event["worker"] for event in run.of("worker_lost")] == [2, 2]
        assert {event["pid"] for event in run.of("worker_started") if event["worker"] == 2} == {external_worker.pid}


@pytest.mark.long
def test_a_worker_of_another_host_without_the_run_directory_finishes_alone(tmp_path: Path, undisturbed: str) -> None:
    (tmp_path / "slowly").touch()
    options = ("cluster.address=10.99.0.1", "cluster.max_restarts=0", "checkpoint.every_steps=10")
    settings = [argument for option in options for argument in ("--set", option)]
    with two_networks() as wires, launch(tmp_path, *settings, wires=wires) as run:
        run.wait_for_step(2)
        ticket = tmp_path / "ticket"
        shutil.copy(run.run_dir / "control.json", ticket)
        ticket.chmod(0o600)
        with joining(wires, ticket, tmp_path / "far", hidden=run.run_dir) as external_worker:
            wait_for_members(run, 3)
            run.wait_for_step(run.of("step")[-1]["step"] + 3)
            for index in (0, 1):
                os.kill(run.pids()[index], signal.SIGKILL)
            wait_for_members(run, 1)
            (tmp_path / "slowly").unlink()
            alone_at = run.of("generation")[-1]["step"]
            check_held(run, undisturbed, recoveries=1)
            stdout, stderr = external_worker.communicate(timeout=30)
        assert external_worker.returncode == 0 and "worker 2 is done" in stdout, stderr
        assert sorted(event["worker"] for event in run.of("worker_lost")) == [0, 1]  # killed at the same time
        saved = [event for event in run.of("checkpoint") if event["step"] > alone_at]
        assert [event["step"] for event in saved] == list(range(-(-(alone_at + 1) // 10) * 10, STEPS + 1, 10))
        folder = run.run_dir / "checkpoints"
        assert {event["path"] for event in saved} == {str(folder / f"step-{event['step']}") for event in saved}
        assert sorted(path.name for path in folder.iterdir()) == ["step-230", "step-240", "step-250"]
        weights = load(folder / f"step-{STEPS}").part("model").tensors
        assert weights_sha256(weights) == undisturbed
        assert "out of reach" in next((tmp_path / "far").rglob("worker-2.log")).read_text()


@pytest.mark.long
def test_a_guest_ends_with_the_launcher(launched: Launched) -> None:
    launched.wait_for_step(5)
    command = [sys.executable, "-m", "cordee", "join", str(launched.run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as external_worker:
        wait_for_members(launched, 3)
        launched.wait_for_step(launched.of("step")[-1]["step"] + 3)
        launched.process.kill()
        _, stderr = external_worker.communicate(timeout=20)
        assert external_worker.returncode == 1, stderr
    launched.process.communicate()
    assert not launched.survivors()


def test_too_few_workers_save_and_end(tmp_path: Path) -> None:
    options = ("--set", "cluster.max_restarts=0", "--set", "cluster.min_workers=2")
    with launch(tmp_path, *options, "--set", "cluster.wait_for_workers=1", steps=1_000_000) as run:
        run.wait_for_step(10)
        os.kill(run.pids()[0], signal.SIGKILL)
        killed_s = time.monotonic()
        code, stderr = run.finish(timeout_s=15)
        assert time.monotonic() - killed_s < 8.0
        assert code == 1
        named = re.search(r"worker 0 was killed by SIGKILL \(in step \d+\); 1 of at least 2 workers are left", stderr)
        assert named, stderr
        saved = re.search(r"Step (\d+) is saved", stderr)
        assert saved and (run.run_dir / "checkpoints" / f"step-{saved[1]}").is_dir()
        assert "Traceback" not in stderr and not run.survivors()
        assert run.summary()["status"] == "failed"


@pytest.mark.long
def test_too_few_workers_wait_for_others(tmp_path: Path, undisturbed: str) -> None:
    with launch(tmp_path, "--set", "cluster.max_restarts=0", "--set", "cluster.min_workers=2") as run:
        run.wait_for_step(10)
        os.kill(run.pids()[0], signal.SIGKILL)
        deadline = time.monotonic() + 20
        while not any("waiting 30 s for others" in event["message"] for event in run.of("warning")):
            assert time.monotonic() < deadline and run.process.poll() is None
            time.sleep(0.05)
        steps = len(run.of("step"))
        time.sleep(0.5)
        assert len(run.of("step")) == steps
        assert scale_run(run.run_dir, 2) == "from 1 to 2 workers"
        check_held(run, undisturbed, recoveries=1)


@pytest.mark.long
def test_a_step_that_kills_every_time_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text(
        "import os, signal, torch\n"
        "class Net(torch.nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(64, 10)\n"
        "        self.register_buffer('calls', torch.tensor(0))\n"
        "    def forward(self, x):\n"
        "        self.calls += self.training\n"
        "        if self.calls == 8 and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:\n"
        "            os.kill(os.getpid(), signal.SIGSEGV)\n"
        "        return super().forward(x)\n"
    )
    options = ("--set", "model={use='deadly:Net'}", "--set", "cluster.max_restarts=100")
    with launch(tmp_path, *options) as run:
        code, stderr = run.finish(timeout_s=60)
    assert code == 1
    assert "a worker was lost in each of 3 attempts at step 8; last worker" in stderr, stderr


def test_ctrl_c_saves_and_leaves_nothing(launched: Launched) -> None:
    launched.wait_for_step(5)
    launched.process.send_signal(signal.SIGINT)
    code, stderr = launched.finish(timeout_s=15)
    assert code == 130, stderr
    assert not launched.survivors()
    summary = launched.summary()
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
    summary = launched.summary()
    assert (summary["status"], summary["device"]) == ("interrupted", "cpu")
    assert summary["steps"] >= 5 and summary["samples"] >= 5


@pytest.mark.long
def test_a_killed_launcher_leaves_nothing_and_can_be_resumed(tmp_path: Path, undisturbed: str) -> None:
    with launch(tmp_path) as run:
        run.wait_for_step(60)
        run.process.kill()
        run.process.communicate()
        assert not run.survivors()
        command = ["train", str(run.run_dir / "job.toml"), "--resume", "--run-dir", str(run.run_dir), "-q"]
        ended = subprocess.run([sys.executable, "-m", "cordee", *command], timeout=120, check=False)
        assert ended.returncode == 0
        assert run.summary()["weights_sha256"] == undisturbed


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
    run = Launched(tmp_path, "--set", "model={use='faulty:Net'}", "--set", "training.reproducible=false")
    code, stderr = run.finish(timeout_s=60)
    assert code == 1
    assert "worker 1 raised" in stderr
    assert "this worker has had enough" in stderr
    assert "step 8" in stderr
    assert stderr.count("\n") <= 2
    assert "Traceback" not in stderr
    assert "this worker has had enough" in (run.run_dir / "logs" / "worker-1.log").read_text()


@pytest.mark.long
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


def test_a_killed_coordinator_comes_back(tmp_path: Path, undisturbed: str) -> None:
    """Killed while all train, with a worker at the same moment, and frozen: each time another takes up."""
    with launch(tmp_path) as run:
        for step, number in ((10, signal.SIGKILL), (60, signal.SIGKILL), (110, signal.SIGSTOP)):
            run.wait_for_step(step)
            if step == 60:
                os.kill(run.pids()[1], signal.SIGKILL)
            os.kill(run.of("coordinator_started")[-1]["pid"], number)
        check_held(run, undisturbed, recoveries=1)
        assert len(run.of("coordinator_lost")) == 3
        steps = [event["step"] for event in run.of("step")]
        assert steps == list(range(1, STEPS + 1)), "each step is reported once"
        assert not (run.run_dir / "coordinator.sqlite").exists()


def test_a_killed_fork_server_is_replaced(tmp_path: Path, undisturbed: str) -> None:
    """Killed at start-up, in mid-run, stopped and then killed, and just before a worker must be replaced."""
    with launch(tmp_path) as run:
        os.kill(run.fork_server(), signal.SIGKILL)  # while it imports torch
        for step, is_worker_killed in ((10, False), (60, True)):
            run.wait_for_step(step)
            before = run.pids()
            fork_server = run.fork_server()
            if is_worker_killed:
                os.kill(fork_server, signal.SIGSTOP)
                os.kill(before[1], signal.SIGKILL)
            os.kill(fork_server, signal.SIGKILL)
        check_held(run, undisturbed, recoveries=1)
        assert len(run.of("fork_server_lost")) == 3
        assert run.pids()[0] == before[0], "a worker that was not killed continues"
        assert not run.survivors()


def test_nothing_outlives_a_launcher_whose_fork_server_was_killed(launched: Launched) -> None:
    launched.wait_for_step(5)
    os.kill(launched.fork_server(), signal.SIGKILL)
    wait_until(lambda: launched.of("fork_server_lost"))
    launched.wait_for_step(launched.of("step")[-1]["step"] + 5)
    launched.process.kill()
    launched.process.communicate()
    assert not launched.survivors()


def wait_until(condition: Callable[[], object], timeout_s: float = 150.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
