"""`cordee plan` as a whole: real profile, real processes, the table, JSON, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from workspace import Workspace, assert_ended_well, assert_refused, summary

pytestmark = pytest.mark.timeout(300)

JOB = """
[model]
use = "mlp"
[data]
use = "digits"
[training]
batch_size = 64
threads = 1
"""
CLUSTER = """
[devices.gpu]
speed = 40.0
memory = "16 GB"
[[hosts]]
name = "node"
count = 2
device = "gpu"
devices = 2
[links]
inside = { bandwidth = "100 GB/s" }
between = { latency = "20us", bandwidth = "25 Gbit/s" }
"""


@pytest.fixture
def job(workspace: Workspace) -> Path:
    path = workspace.path / "job.toml"
    path.write_text(JOB)
    return path


@pytest.mark.timeout(600)
def test_a_plan_of_two_workers_and_of_a_cluster(workspace: Workspace, job: Path) -> None:
    workspace.timeout_s = 280.0  # a first plan makes a dozen short runs: half a minute, several on a busy machine
    first = workspace.run("plan", str(job), "--workers", "2", "--json")
    assert first.returncode == 0, first.stderr  # what is being measured stands there
    doing = ["measuring how kernels compute the model ...", "measuring the model layer by layer ..."]
    assert first.stderr.splitlines()[:2] == doing
    assert "measuring this machine with 2 processes, once for all jobs ..." in first.stderr
    plan = json.loads(first.stdout)
    known = {(found["strategy"], found["workers"]): found for found in plan["predictions"]}
    assert {("single", 1), ("data_parallel", 2), ("pipeline", 2)} <= known.keys()
    assert plan["choice"]["strategy"] in plan["available"] and not plan["is_cached"]
    assert plan["reasons"][0].startswith(f"choice: {plan['choice']['strategy']}")
    assert known["data_parallel", 2]["communication_s"] > 0

    table = workspace.run("plan", str(job), "--workers", "2")
    assert table.returncode == 0, table.stderr
    assert "→" in table.stdout and "runner-up: " in table.stdout

    options = ("--workers", "2", "--set", "training.steps=60", "--run-dir", "run")
    trained = workspace.run("train", str(job), *options)
    assert_ended_well(trained)
    result = summary(workspace.path / "run")
    assert result["predicted_step_seconds"] > 0 and result["step_seconds"] > 0
    # Which of the two depends on what else the machine did while it was profiled.
    assert "ms a step, measured " in trained.stdout or "not usable: the machine was busy" in trained.stdout
    assert "strategy auto is " in (workspace.path / "run" / "logs" / "launcher.log").read_text()

    played = workspace.run("simulate", "--job", str(job), "--here", "--json")  # with what the plan has measured
    assert played.returncode == 0, played.stderr
    ways = {(way["strategy"].split()[0], way["workers"]): way for way in json.loads(played.stdout)["outcomes"]}
    others = {(name, 2) for name in ("data_parallel", "parameter_server", "pipeline", "sharded", "tensor")}
    assert {("single", 1)} | others <= ways.keys()
    assert all(way["simulated_s"] > 0 and way["predicted_s"] > 0 for way in ways.values())
    here_and_there = ("simulate", "--job", str(job), "--here", "--html", "page.html")
    assert_refused(workspace.run(*here_and_there), 2, "--here goes with --job alone")

    (workspace.path / "cluster.toml").write_text(CLUSTER)
    cluster = workspace.run("plan", str(job), "--cluster", "cluster.toml", "--json")
    assert cluster.returncode == 0, cluster.stderr
    elsewhere = json.loads(cluster.stdout)
    assert max(found["workers"] for found in elsewhere["predictions"]) == 4
    workers = [tenant for tenants in elsewhere["placement"].values() for tenant in tenants]
    assert len(workers) == elsewhere["choice"]["workers"]

    (workspace.path / "small.toml").write_text(CLUSTER.replace("16 GB", "1 kB"))
    small = workspace.run("plan", str(job), "--cluster", "small.toml")
    assert small.returncode == 2 and "Traceback" not in small.stderr
    assert "no strategy fits into memory: " in small.stderr and "Lower training.batch_size" in small.stderr


def test_a_mistake_in_the_cluster_file(workspace: Workspace, job: Path) -> None:
    (workspace.path / "cluster.toml").write_text(CLUSTER.replace("device = ", "devise = "))
    refused = workspace.run("plan", str(job), "--cluster", "cluster.toml")
    assert_refused(refused, 2, "cluster.toml: hosts[1] has no 'device'")


def test_a_simulation_as_table_page_and_json(workspace: Workspace) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'report' is not installed")
    done = workspace.run("simulate", "horovod-vgg16", "--set", "workers=[1, 512]", "--html", "vgg.html")
    assert_ended_well(done)
    assert "efficiency" in done.stdout and "  512 " in done.stdout
    assert (workspace.path / "vgg.html").read_text().count("<svg") == 2
    (workspace.path / "lab.toml").write_text('workers = [1000]\nstep = "1s"\ngradients = "1 MB"\nmtbf = "10d"\n')
    found = json.loads(workspace.run("simulate", "lab.toml", "--json").stdout)["outcomes"][0]
    assert found["workers"] == 1000 and 0 < found["effective_share"] < 1
    assert_refused(workspace.run("simulate", "horovod-vgg61"), 2, "did you mean 'horovod-vgg16'?")
    assert_refused(workspace.run("simulate"), 2, "say what to simulate")
