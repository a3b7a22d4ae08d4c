"""`cordee chaos`: real faults, in an order that follows from the seed, and a run that is sound afterwards."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cordee.core.errors import JobError
from cordee.core.fault_points import Fault
from cordee.tools.chaos import FAULTS, _copy_descriptor, aim, cut_off, plan_faults

pytestmark = pytest.mark.timeout(150)

JOB = """
[model]
use = "mlp"
[data]
use = "synthetic"
shape = [32]
num_classes = 4
size = 1000
test_size = 50
[training]
batch_size = 32
steps = 10000000
[strategy]
name = "data_parallel"
workers = 2
[cluster]
failure_timeout = "1s"
[checkpoint]
every_steps = 100
"""


def test_the_plan_follows_from_the_seed() -> None:
    plan = plan_faults(list(FAULTS), every_s=2.0, for_s=60.0, seed=1)
    assert plan == plan_faults(list(FAULTS), every_s=2.0, for_s=60.0, seed=1)
    assert plan != plan_faults(list(FAULTS), every_s=2.0, for_s=60.0, seed=2)
    assert [fault.at_s for fault in plan] == [2.0 * n for n in range(1, 30)]
    assert {fault.kind for fault in plan} == set(FAULTS)


@pytest.mark.parametrize(
    ("kinds", "every_s", "message"),
    [(["kil"], 1.0, "no fault 'kil'; did you mean 'kill'"), (["kill"], 0.0, "times longer than nothing")],
)
def test_what_cannot_be_planned(kinds: list[str], every_s: float, message: str) -> None:
    with pytest.raises(JobError, match=message):
        plan_faults(kinds, every_s=every_s, for_s=10.0, seed=0)


def test_faults_are_aimed_at_points() -> None:
    assert aim(["link.ready", "step.begun:worker-1:5", "rendezvous.begin:worker-0"], "freeze") == [
        Fault("link.ready", "*", "freeze"),
        Fault("step.begun", "worker-1", "freeze", 5),
        Fault("rendezvous.begin", "worker-0", "freeze"),
    ]


@pytest.mark.parametrize(
    ("place", "action", "message"),
    [
        ("link.redy", "kill", "no fault point 'link.redy'; did you mean 'link.ready'"),
        ("link.ready", "hold", r"no action 'hold'.* \(known: kill, freeze, error\)"),
        ("link.ready:worker-1:0", "kill", "'0' is not the number of a visit"),
        ("launch.summary", "kill", "the launcher is the command itself"),
        ("link.ready:frog", "kill", r"--at link.ready:frog: no process 'frog' \(known: worker-N, server-N, "),
        ("link.ready:worker", "kill", "no process 'worker'; did you mean 'worker-N'"),
        ("link.ready:work-*:2", "kill", r"no process 'work-\*'"),
    ],
)
def test_what_cannot_be_aimed_at(place: str, action: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
        aim([place], action)


def test_nothing_gets_through_and_nothing_is_lost() -> None:
    """A process sends a number every few milliseconds; while it is cut off none arrives, and afterwards all do."""
    program = (
        "import itertools, select, socket, sys\n"
        "line = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
        "for number in itertools.count():\n"
        "    line.sendall(b'%d ' % number)\n"
        "    if select.select([sys.stdin], [], [], 0.02)[0]: break\n"
    )
    received, gaps, last_s = b"", [], time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as pool:
        command = [sys.executable, "-c", program, str(server.getsockname()[1])]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as sender, server.accept()[0] as line:
            assert sender.stdin is not None
            line.settimeout(30.0)
            received += line.recv(4096)
            outage = pool.submit(cut_off, sender.pid, 1.0)
            while chunk := line.recv(4096):
                gaps.append(time.monotonic() - last_s)
                last_s = time.monotonic()
                received += chunk
                if outage.done() and not sender.stdin.closed:
                    sender.stdin.close()
    assert outage.result() == 1 and max(gaps) >= 1.0
    numbers = received.split()
    assert numbers == [b"%d" % number for number in range(len(numbers))]


def refused_as_nobody(pid: int) -> None:
    if os.geteuid() == 0:
        os.setuid(65534)
    with pytest.raises(JobError, match=r"does not let us reach the sockets of process \d+ .* leave 'partition' out"):
        _copy_descriptor(pid, 0)


def test_where_it_is_not_permitted_it_says_so() -> None:
    pid = os.getpid() if os.geteuid() == 0 else 1
    child = multiprocessing.get_context("fork").Process(target=refused_as_nobody, args=(pid,))
    child.start()
    child.join(timeout=30)
    assert child.exitcode == 0


@pytest.mark.parametrize(
    ("strategy", "kinds"),
    [
        ("data_parallel", "kill,freeze,leave,coordinator,partition"),
        pytest.param("parameter_server", "partition,leave,coordinator", marks=pytest.mark.long),
    ],
)
def test_a_run_is_sound_after_faults(tmp_path: Path, strategy: str, kinds: str) -> None:
    (tmp_path / "job.toml").write_text(JOB.replace("data_parallel", strategy))
    options = ["--faults", kinds, "--every", "3s", "--for", "10s", "--seed", "6", "--run-dir", "run"]
    if strategy == "parameter_server":
        options += ["--lose-messages", "0.05"]
    command = [sys.executable, "-m", "cordee", "chaos", "job.toml", *options]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "the run is sound" in ended.stdout and "3 faults in" in ended.stdout


def chaos(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "job.toml").write_text(JOB)
    command = [sys.executable, "-m", "cordee", "chaos", "job.toml", "--run-dir", "run", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_a_run_is_sound_after_faults_at_points(tmp_path: Path) -> None:
    ended = chaos(tmp_path, "--at", "link.ready:worker-1", "--at", "checkpoint.rename::2")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "the run is sound" in ended.stdout and "2 faults in" in ended.stdout
    assert "kill at link.ready: worker: has said that it waits for a generation" in ended.stdout


def test_a_point_that_nobody_passes_is_named(tmp_path: Path) -> None:
    ended = chaos(tmp_path, "--at", "workers.scaled", "--for", "1s")
    assert ended.returncode == 1
    assert "nobody passed the fault point workers.scaled for the 1. time" in ended.stderr
