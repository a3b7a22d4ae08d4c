"""A run from outside: detached, shown, its logs, stopped, resumed."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from urllib.parse import parse_qs, urlsplit

import psutil
import pytest
from workspace import Workspace, assert_ended_well, assert_refused, summary

pytestmark = pytest.mark.timeout(300)


def test_a_run_outlives_its_command_and_is_shown_stopped_and_resumed(workspace: Workspace) -> None:
    done = workspace.run("train", "job.toml", "--detach", "--set", "name=apart", "--set", "training.epochs=100000")
    assert_ended_well(done)
    found = re.match(r"(apart-\S+) trains as process (\d+)\n", done.stdout)
    assert found is not None, done.stdout
    run = workspace.path / "runs" / found[1]
    process = psutil.Process(int(found[2]))
    shown = json.loads(workspace.run("show", "apart", "--json").stdout)
    assert shown["run"]["state"] == "running"
    stopped = workspace.run("stop", "latest")
    assert_ended_well(stopped)
    assert f"{run.name} is interrupted" in stopped.stdout
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    assert "worker-0 | " in workspace.run("logs", "apart").stdout
    steps = summary(run)["steps"]
    resumed = workspace.run("resume", "apart", "--set", f"stop.steps={steps + 3}")
    assert_ended_well(resumed)
    assert summary(run)["steps"] == steps + 3
    assert_refused(workspace.run("stop", "apart"), 2, "is not under way: it is stopped")


def test_a_mistake_is_said_before_a_detached_run_begins(workspace: Workspace) -> None:
    done = workspace.run("train", "job.toml", "--detach", "--set", "model.use=parts:TooNarrow", "--run-dir", "run")
    assert_refused(done, 2, "TooNarrow")
    assert not (workspace.path / "run").exists()


def test_a_dry_run_checks_all_and_writes_nothing(workspace: Workspace) -> None:
    done = workspace.run("train", "job.toml", "--dry-run", "--workers", "2")
    assert_ended_well(done)
    assert "2 workers" in done.stdout
    assert "the job is sound" in done.stdout
    assert not (workspace.path / "runs").exists()
    assert_refused(
        workspace.run("train", "job.toml", "--dry-run", "--set", "model.use=parts:TooNarrow"), 2, "TooNarrow"
    )


def test_the_dashboard_listens_on_this_host_only_and_begins_with_a_run_of_its_folder(workspace: Workspace) -> None:
    run = workspace.path / "elsewhere" / "first-run"
    run.mkdir(parents=True)
    (run / "job.toml").write_text('name = "x"\n')
    command = [sys.executable, "-m", "cordee", "dashboard", "first", "--runs", "elsewhere", "--until-closed"]
    with subprocess.Popen(
        command, cwd=workspace.path, env=dict(os.environ), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        address = urlsplit(process.stdout.readline().strip())
        assert (address.hostname, address.path) == ("127.0.0.1", "/run/first-run")
        assert address.port is not None
        (token,) = parse_qs(address.query)["token"]
        assert len(token) >= 43  # 256 bits in 6 bits a character
        socket.create_connection(("127.0.0.1", address.port), timeout=20).close()
        with pytest.raises(ConnectionRefusedError):  # what listens at all addresses answers at this one too
            socket.create_connection(("127.0.0.2", address.port), timeout=20)
        process.stdin.close()
        assert process.wait(60) == 0
