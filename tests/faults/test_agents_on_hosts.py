"""Agents that are started by hand on two hosts (network namespaces): slow and cut links, lost hosts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from wires import Wires, third_host, two_networks

from agent_runs import CORDEE, AgentRun, agent_run

pytestmark = pytest.mark.timeout(240)

STEPS = 300
JOB = f"""
name = "hosts"
[model]
use = "mlp"
hidden = [32]
[data]
use = "digits"
[optimizer]
use = "adam"
lr = 0.003
[training]
batch_size = 64
steps = {STEPS}
reproducible = true
[strategy]
name = "data_parallel"
[monitoring]
every_steps = 1
[cluster]
failure_timeout = "2s"
"""


@pytest.fixture(scope="module")
def wires() -> Iterator[Wires]:
    with two_networks() as made:
        yield made


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job") / "job.toml"
    path.write_text(JOB)
    return path


@pytest.fixture(scope="module")
def weights(job: Path) -> str:
    """Of one worker, on one host."""
    run_dir = job.parent / "alone"
    subprocess.run([*CORDEE, "train", str(job), "--workers", "1", "--run-dir", str(run_dir), "-q"], check=True)
    return str(json.loads((run_dir / "summary.json").read_text())["weights_sha256"])


@contextlib.contextmanager
def on_two_hosts(
    wires: Wires, job: Path, run_dir: Path, *settings: str, side: int = 0, **more: Any
) -> Iterator[AgentRun]:
    """A run that is led on one host. Agents with odd numbers are on the second host."""
    with agent_run(
        job,
        run_dir,
        *settings,
        address=wires.addresses[side],
        inside=lambda agent: wires.inside(agent % 2),
        launcher_inside=tuple(wires.inside(side)),
        **more,
    ) as run:
        yield run


def kill_host(wires: Wires, side: int) -> None:
    """End every process on a host at once."""
    for pid in wires.pids(side):
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()


def await_event(run: AgentRun, is_there: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_there():
        assert run.process.poll() is None and time.monotonic() < deadline_s, run.describe()
        time.sleep(0.02)


def members(run: AgentRun) -> list[int]:
    return list(run.events("generation")[-1]["members"])


def test_two_hosts_give_the_weights_of_one_worker(wires: Wires, job: Path, weights: str, tmp_path: Path) -> None:
    with on_two_hosts(wires, job, tmp_path / "run") as run:
        summary = run.finish()
        assert (summary["weights_sha256"], summary["workers"], summary["recoveries"]) == (weights, 2, 0), run.describe()
        assert "another host" in (run.run_dir / "logs" / "worker-1.log").read_text()
        assert [run.agents[number].wait(20) for number in (0, 1)] == [0, 0]


@pytest.mark.long
def test_a_slow_link_takes_time_and_changes_nothing(wires: Wires, job: Path, weights: str, tmp_path: Path) -> None:
    with wires.slowed("10mbit"), on_two_hosts(wires, job, tmp_path / "run") as run:
        summary = run.finish()
        assert (summary["weights_sha256"], summary["recoveries"]) == (weights, 0), run.describe()


@pytest.mark.long
def test_a_link_that_is_cut_for_a_while_is_trained_around(
    wires: Wires, job: Path, weights: str, tmp_path: Path
) -> None:
    """The worker behind it is given up. It, or another one, is there again once the link is back."""
    with on_two_hosts(wires, job, tmp_path / "run", "training.steps=4000") as run:
        run.await_step(20)
        try:
            wires.cut()
            await_event(run, lambda: members(run) == [0])
            run.await_step(run.events("step")[-1]["step"] + 20)
        finally:
            wires.mend()
        await_event(run, lambda: len(members(run)) == 2)
        summary = run.finish()
        assert summary["steps_redone"] <= 1 and summary["steps"] == 4000, run.describe()
    with agent_run(job, tmp_path / "beside", "training.steps=4000") as undisturbed:
        assert undisturbed.finish()["weights_sha256"] == summary["weights_sha256"]


def test_a_host_that_is_lost_costs_a_step(wires: Wires, job: Path, weights: str, tmp_path: Path) -> None:
    with on_two_hosts(wires, job, tmp_path / "run") as run:
        run.await_step(30)
        kill_host(wires, 1)
        summary = run.finish()
        assert summary["weights_sha256"] == weights and summary["steps_redone"] <= 1, run.describe()
        assert summary["recoveries"] == 1


@contextlib.contextmanager
def out_of_reach(
    wires: Wires, job: Path, tmp_path: Path, *settings: str, resume: bool = False, **more: Any
) -> Iterator[AgentRun]:
    """A run whose agents are all on the other host and do not see the run directory."""
    folder = tmp_path / "led"
    folder.mkdir(exist_ok=True)
    hidden = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {folder} && exec "$@"', "sh"]
    with agent_run(
        job,
        folder / "run",
        *settings,
        address=wires.addresses[0],
        inside=lambda agent: wires.inside(1, *hidden),
        launcher_inside=tuple(wires.inside(0)),
        resume=resume,
        **more,
    ) as run:
        yield run


def servers_on_slots(**more: object) -> list[str]:
    settings = {"name": '"parameter_server"', "servers_on": '"slots"', **more}
    return [f"strategy.{key}={value}" for key, value in settings.items()]


@pytest.mark.long
@pytest.mark.timeout(480)  # two runs, of six processes each, with two agents
def test_servers_and_evaluator_run_beside_workers_without_the_run_directory(
    wires: Wires, job: Path, weights: str, tmp_path: Path
) -> None:
    for steps, resume in ((100, False), (STEPS, True)):
        settings = (*servers_on_slots(servers=2), f"stop.steps={steps}")
        with out_of_reach(wires, job, tmp_path, *settings, resume=resume) as run:
            summary = run.finish(200)
            assert summary["steps"] == steps and summary["recoveries"] == 0, run.describe()
            assert "2 servers and 1 evaluator beside workers" in " ".join(" ".join(run.printed + run.errors).split())
    assert summary["weights_sha256"] == weights
    assert run.events("run_started")[-1]["start_step"] == 100
    for name in ("server-0", "server-1", "evaluator"):
        assert "the run directory is out of reach" in (run.run_dir / "logs" / f"{name}.log").read_text()
    timelines = {path.stem for path in (run.run_dir / "timeline").iterdir()}
    assert {"server-0", "server-1"} <= timelines, timelines


FEDERATED_JOB = """
name = "rounds"
[model]
use = "mlp"
hidden = [16]
[data]
use = "digits"
[optimizer]
use = "sgd"
lr = 0.05
[training]
batch_size = 16
[strategy]
name = "federated"
algorithm = "scaffold"
rounds = 30
partition = {clients = 20}
[cluster]
failure_timeout = "2s"
"""


@pytest.mark.long
@pytest.mark.timeout(480)  # three runs
def test_clients_are_simulated_without_the_run_directory(wires: Wires, tmp_path: Path) -> None:
    """The same bits as on the run's host, also continued from a checkpoint, and after a worker is lost."""
    job = tmp_path / "job.toml"
    job.write_text(FEDERATED_JOB)
    alone = tmp_path / "alone"
    subprocess.run([*CORDEE, "train", str(job), "--workers", "2", "--run-dir", str(alone), "-q"], check=True)
    expected = json.loads((alone / "summary.json").read_text())
    for rounds, resume in ((3, False), (30, True)):
        with out_of_reach(wires, job, tmp_path, f"stop.steps={rounds}", resume=resume) as run:
            if resume:
                await_event(run, lambda: bool(run.events("round")) and run.events("round")[-1]["round"] >= 6)
                kill_host(wires, 1)  # the engine asks for other agents: the same commands on the same host
            summary = run.finish(200)
            assert (summary["steps"], summary["status"]) == (rounds, "stopped")
            for worker in (0, 1):
                log = (run.run_dir / "logs" / f"worker-{worker}.log").read_text()
                assert "the files of the rounds are on the host of the run" in log, run.describe()
    assert summary["weights_sha256"] == expected["weights_sha256"], run.describe()
    assert summary["recoveries"] >= 1 and (run.run_dir / "partition.png").exists() == (alone / "partition.png").exists()


@pytest.mark.long
@pytest.mark.timeout(420)  # a run of eight processes, some of which are lost
def test_replicas_of_servers_are_on_different_hosts(wires: Wires, job: Path, weights: str, tmp_path: Path) -> None:
    """A host is lost with whatever it has of two servers: no update is lost."""
    with on_two_hosts(wires, job, tmp_path / "run", *servers_on_slots(servers=2, replicas=2)) as run:
        run.await_step(30)
        kill_host(wires, 1)
        summary = run.finish(200)
        assert summary["weights_sha256"] == weights, run.describe()
        assert {event["role"] for event in run.events("worker_lost")} >= {"server", "worker"}
        assert not run.events("updates_lost")


@pytest.mark.long
def test_the_host_of_the_run_is_lost_and_the_run_resumes_elsewhere(
    wires: Wires, job: Path, weights: str, tmp_path: Path
) -> None:
    """From the storage that both hosts share. The run directory is lost with its host."""
    (tmp_path / "shared").mkdir()
    settings = (f"checkpoint.storage={tmp_path / 'shared'}", "checkpoint.every_steps=20")
    with on_two_hosts(wires, job, tmp_path / "run", *settings) as run:
        await_event(run, lambda: bool(run.events("stored")))
        stored = run.events("stored")[-1]["step"]
        kill_host(wires, 0)
        assert run.agents[1].wait(90) == 1, run.describe()
        said = (tmp_path / "agent-1.txt").read_text()
        assert "out of reach" in said, said
    (tmp_path / "run").rename(tmp_path / "lost with its host")
    with on_two_hosts(wires, job, tmp_path / "run", *settings, side=1, resume=True) as run:
        summary = run.finish()
        assert summary["weights_sha256"] == weights and summary["steps"] == STEPS, run.describe()
        assert run.events("run_started")[0]["start_step"] >= stored


@pytest.mark.long
def test_hosts_that_cannot_reach_each_other_are_named(wires: Wires, job: Path, tmp_path: Path) -> None:
    """Both reach the host of the run; a firewall is between them."""
    with third_host(wires) as at_third:
        inside = [wires.inside(1), at_third]
        with agent_run(
            job,
            tmp_path / "run",
            address=wires.addresses[0],
            inside=lambda agent: inside[agent % 2],
            launcher_inside=tuple(wires.inside(0)),
        ) as run:
            assert run.process.wait(200) == 1, run.describe()
            said = " ".join(" ".join(run.errors).split())
            host = os.uname().nodename
            assert f"{host} (worker 0) and {host} (worker 1) could not connect to each other" in said, run.describe()
            assert re.search(r"\((10\.98\.0\.2|10\.99\.0\.2) port \d+ does not answer\)", said), run.describe()
            assert not run.events("step")


def test_a_module_that_a_member_does_not_have_is_named(wires: Wires, tmp_path: Path) -> None:
    """The folder of the job is empty where the second agent runs, as on a host to which it was not copied."""
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "mine.py").write_text(
        "import torch\n\ndef build():\n    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))\n"
    )
    (folder / "job.toml").write_text(JOB.replace('use = "mlp"\nhidden = [32]', 'use = "mine:build"'))
    hidden = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {folder} && exec "$@"', "sh"]
    inside = [wires.inside(0), wires.inside(1, *hidden)]
    with agent_run(
        folder / "job.toml",
        tmp_path / "run",
        address=wires.addresses[0],
        inside=lambda agent: inside[agent % 2],
        launcher_inside=tuple(wires.inside(0)),
    ) as run:
        assert run.process.wait(100) == 1, run.describe()
        said = " ".join(" ".join(run.errors).split())
        assert "worker 1" in said and f"model.use = 'mine:build': no module 'mine' (searched: {folder}" in said
        assert f" on host {os.uname().nodename}" in said, said
        assert not run.events("step")
