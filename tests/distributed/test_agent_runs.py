"""Runs whose processes are started by agents: the same weights as alone, whatever becomes of agents."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from launching import run

from agent_runs import TIMEOUT_S, AgentRun, agent_run

JOB = """
name = "agents"
[model]
use = "mlp"
hidden = [32]
dropout = 0.2
[data]
use = "digits"
[optimizer]
use = "adam"
lr = 0.003
[training]
batch_size = 64
steps = {steps}
reproducible = true
[monitoring]
every_steps = 5
[cluster]
failure_timeout = "2s"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("agents")


@pytest.fixture(scope="module")
def job(folder: Path) -> Path:
    path = folder / "job.toml"
    path.write_text(JOB.format(steps=200))
    return path


@pytest.fixture(scope="module")
def weights(job: Path, folder: Path) -> str:
    """Of the run of one worker on this host."""
    ended = run("train", str(job), "--run-dir", str(folder / "alone"))
    assert ended.code == 0, ended.stderr
    return str(json.loads((folder / "alone" / "summary.json").read_text())["weights_sha256"])


@pytest.mark.parametrize(
    "settings",
    [
        ("strategy.name=data_parallel",),
        pytest.param(("strategy.name=parameter_server", "strategy.staleness=0"), marks=pytest.mark.long),
    ],
)
def test_agents_give_the_weights_of_one_worker(
    job: Path, weights: str, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    with agent_run(job, tmp_path / "run", *settings) as agents:
        summary = agents.finish()
        assert (summary["weights_sha256"], summary["workers"]) == (weights, 2), agents.describe()
        assert "engine: agents that are started by hand" in agents.printed[0]
        for agent in agents.agents.values():
            assert agent.wait(10) == 0, agents.describe()


def test_a_killed_agent_costs_a_step(job: Path, weights: str, tmp_path: Path) -> None:
    """The others continue; another agent, when it comes, has a worker."""
    with agent_run(job, tmp_path / "run", "strategy.name=data_parallel") as agents:
        agents.await_step(30)
        lost = psutil.Process(agents.agents[1].pid)
        family = lost.children(recursive=True)
        lost.kill()
        summary = agents.finish()
        assert summary["weights_sha256"] == weights and summary["steps_redone"] <= 1, agents.describe()
        assert summary["recoveries"] == 1
        assert not psutil.wait_procs(family, timeout=5)[1], "processes outlive their agent"


@pytest.mark.long
def test_a_frozen_agent_is_given_up_and_ends_when_it_wakes_up(job: Path, weights: str, tmp_path: Path) -> None:
    with agent_run(job, tmp_path / "run", "strategy.name=data_parallel", "training.steps=600") as agents:
        agents.await_step(30)
        frozen = psutil.Process(agents.agents[1].pid)
        family = [frozen, *frozen.children(recursive=True)]
        for process in family:
            process.suspend()
        deadline_s = time.monotonic() + 30
        while not agents.events("worker_lost"):
            assert time.monotonic() < deadline_s, agents.describe()
            time.sleep(0.05)
        for process in family:
            process.resume()
        summary = agents.finish()
        assert summary["recoveries"] == 1, agents.describe()
        assert agents.agents[1].wait(10) == 1
        assert not psutil.wait_procs(family[1:], timeout=10)[1]
        assert "given this agent up" in (tmp_path / "agent-1.txt").read_text()


def test_agents_end_when_the_launcher_is_killed(job: Path, tmp_path: Path) -> None:
    settings = ("strategy.name=data_parallel", "training.steps=100000")
    with agent_run(job, tmp_path / "run", *settings) as agents:
        agents.await_step(5)
        processes = [psutil.Process(agent.pid) for agent in agents.agents.values()]
        family = [*processes, *(child for process in processes for child in process.children(recursive=True))]
        os.kill(agents.process.pid, signal.SIGKILL)
        assert not psutil.wait_procs(family, timeout=60)[1], agents.describe()


def test_a_ticket_is_good_for_one_agent(job: Path, weights: str, tmp_path: Path) -> None:
    with agent_run(job, tmp_path / "run", "strategy.name=data_parallel") as agents:
        agents.await_step(5)
        second = run("agent", *agents.tickets[0])
        assert second.code == 2 and "the ticket was used by another agent" in second.stderr
        place, option, text = agents.tickets[1]
        damaged = run("agent", place, option, text[:40])
        assert damaged.code == 2 and "the ticket is damaged" in damaged.stderr
        assert agents.finish()["weights_sha256"] == weights


def test_an_agent_of_another_version_is_refused_and_the_run_says_why(job: Path, weights: str, tmp_path: Path) -> None:
    """Who reads what the run prints may not see what agents print; and another agent is asked for."""
    program = (
        "from cordee.cluster.engines import agent_messages\n"
        "agent_messages.version = lambda name: '1.0'\n"
        "from cordee.cli import main\n"
        "main()"
    )
    with agent_run(job, tmp_path / "run", "strategy.name=data_parallel", starts=lambda number: number == 0) as agents:
        _await(lambda: 1 in agents.tickets, agents)
        command = [sys.executable, "-c", program, "agent", *agents.tickets[1]]
        other = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
        assert other.returncode == 2 and "torch 1.0" in other.stderr, other.stderr
        _await(lambda: 2 in agents.tickets, agents)
        assert "torch 1.0" in agents.describe() and "install the same versions everywhere" in agents.describe()
        agents.start(2)
        assert agents.finish()["weights_sha256"] == weights


def _await(condition: Callable[[], bool], agents: AgentRun) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, agents.describe()
        time.sleep(0.05)


@pytest.mark.long
def test_an_agent_that_is_told_to_leave_loses_nothing(job: Path, weights: str, tmp_path: Path) -> None:
    with agent_run(job, tmp_path / "run", "strategy.name=data_parallel") as agents:
        agents.await_step(30)
        agents.agents[1].terminate()
        summary = agents.finish()
        assert (summary["weights_sha256"], summary["steps_redone"]) == (weights, 0), agents.describe()
        assert agents.agents[1].wait(5) == 0


def test_the_engine_needs_an_address(job: Path, tmp_path: Path) -> None:
    ended = run("train", str(job), "--engine", "agents", "--workers", "2", "--run-dir", str(tmp_path / "run"))
    assert ended.code == 2 and "needs cluster.address" in ended.stderr
    ended = run("train", str(job), "--engine", "agent", "--run-dir", str(tmp_path / "run"))
    assert ended.code == 2 and "there is no engine 'agent'" in ended.stderr and "'agents'" in ended.stderr
