"""The warm launcher runs the same command with the same result as a fresh process, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from warm_launch import ForkingPopen, StartingPopen, WarmServer, shared_server

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
def warm_processes() -> None:
    """The processes of this file start from nothing."""


@pytest.fixture
def warm() -> WarmServer:
    return shared_server()


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


# Says all that a program may see of how it was started, and ends as it is told by its standard input.
SELF = """
import os, sys
print(__name__, sys.argv, os.getcwd(), sys.path[0], os.environ.get("TEST_MARK"))
print(os.getppid(), os.getsid(0) == os.getpid())
print("to the errors", file=sys.stderr)
sys.exit(int(sys.stdin.readline()))
"""


@pytest.mark.parametrize(
    "command", [("-c", SELF), ("-m", "itself"), ("sub/itself.py",), ("-P", "-u", "-m", "json.tool")]
)
@pytest.mark.parametrize("is_session", [False, True])
def test_a_forked_process_is_like_a_fresh_one(command: tuple[str, ...], is_session: bool, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for place in (tmp_path, tmp_path / "sub"):
        (place / "itself.py").write_text(SELF)
    arguments = ["--indent", "2"] if "json.tool" in command else ["one", "-c"]
    seen = []
    for popen in (StartingPopen, ForkingPopen):
        process = popen(
            [sys.executable, *command, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
            env={**os.environ, "TEST_MARK": "here"},
            text=True,
            start_new_session=is_session,
        )
        seen.append((*process.communicate("7\n", timeout=60), process.returncode))
    assert seen[0] == seen[1]
    assert seen[0][2] == (0 if "json.tool" in command else 7)


def test_a_forked_process_is_a_child_that_can_be_killed() -> None:
    process = ForkingPopen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert process.poll() is None and psutil.Process(process.pid).ppid() == os.getpid()
    process.kill()
    assert process.wait(10) == -9
    leaving = ForkingPopen([sys.executable, "-c", "raise SystemExit('why')"], stderr=subprocess.PIPE, text=True)
    assert leaving.communicate(timeout=60)[1] == "why\n" and leaving.returncode == 1
    done = ForkingPopen(["echo", "no Python"], stdout=subprocess.PIPE, text=True)
    assert done.communicate(timeout=60)[0] == "no Python\n"


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
