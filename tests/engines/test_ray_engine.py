"""The engine `ray` on a real Ray of two nodes. Run by `make test-ray`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import engine_runs as runs
import psutil
import pytest

ray = pytest.importorskip("ray")

from cordee.bench.clusters import RayCluster  # noqa: E402
from cordee.core.errors import JobError  # noqa: E402

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    cluster = RayCluster(num_nodes=2)
    yield cluster
    cluster.close()


@pytest.fixture
def own_cluster() -> Iterator[RayCluster]:
    """A Ray that a test may damage."""
    cluster = RayCluster(num_nodes=2)
    yield cluster
    cluster.close()


@pytest.fixture(scope="class")
def driver(cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[runs.Driver]:
    driver = runs.Driver("ray", cluster, tmp_path_factory.mktemp("driver"))
    yield driver
    driver.close()


class TestStrategies:
    """One program trains all of them: it holds the cluster until the last is done."""

    @pytest.mark.parametrize("run", runs.EVERY_RUN)
    def test_every_strategy_gives_the_weights_that_it_gives_elsewhere(
        self, run: str, cluster: RayCluster, driver: runs.Driver
    ) -> None:
        runs.assert_same_as_elsewhere(run, driver)
        runs.wait_until(lambda: not runs.agents(cluster), 5.0)


def test_what_was_recognised_is_printed(cluster: RayCluster, tmp_path: Path) -> None:
    outcome = runs.train(tmp_path, *runs.settings_of("data_parallel"), *runs.on("ray", cluster))
    port = cluster.connect.rpartition(":")[2]  # Ray replaces loopback by the host's own address
    assert re.search(rf"engine: Ray {ray.__version__} at \S+:{port}, 2 nodes, 2 CPUs", outcome.output)


def test_the_doctor_looks_at_every_node(cluster: RayCluster, tmp_path: Path) -> None:
    done = runs.doctor("ray", tmp_path, RAY_ADDRESS=cluster.connect)
    assert done.code == 0, done.output
    assert re.search(r"Ray \S+ at \S+, 2 nodes, 2 CPUs; 2 CPUs free", done.output), done.output
    assert "reaches this host" in done.output
    assert not done.folder.exists()


def test_the_doctor_says_that_no_ray_answers(tmp_path: Path) -> None:
    done = runs.doctor("ray", tmp_path, RAY_ADDRESS="127.0.0.1:1")
    assert done.code == 1 and "no Ray answers at 127.0.0.1:1" in done.output


def test_a_killed_node_costs_a_step_and_changes_no_bit(own_cluster: RayCluster, tmp_path: Path) -> None:
    reference = runs.train(tmp_path / "alone", "training.reproducible=true", "training.epochs=1000", "stop.steps=400")
    outcome, pause_s = runs.kill_in_midrun("ray", own_cluster, tmp_path / "ray", lambda: own_cluster.kill_node(1))
    assert outcome.code == 0, outcome.output
    assert outcome.summary["weights_sha256"] == reference.summary["weights_sha256"]
    assert outcome.summary["recoveries"] >= 1 and outcome.summary["steps_redone"] <= 1
    assert pause_s < 8.0, pause_s
    assert len(outcome.events("worker_lost")) >= 1


def test_a_node_that_comes_is_used(own_cluster: RayCluster, tmp_path: Path) -> None:
    """A lost worker comes back on a node that is added later."""

    def replace_node() -> None:
        own_cluster.kill_node(1)
        own_cluster.add_node()

    runs.assert_replaced("ray", own_cluster, tmp_path, replace_node)


def test_a_spare_takes_the_place_of_a_lost_worker(tmp_path: Path) -> None:
    """The agent that starts it was there before the node was lost."""
    cluster = RayCluster(num_nodes=3)

    def count_ready() -> int:
        found = runs.agents(cluster)
        agents = {process.pid for process in found if "cordee.cluster.engines.agent" in process.cmdline()}
        return len(agents & {process.ppid() for process in found})

    try:
        settings = (*runs.settings_of("data_parallel"), "training.epochs=1000000", "cluster.spares=1")
        with runs.training(tmp_path, *settings, *runs.on("ray", cluster)) as (process, run):
            runs.wait_until(lambda: len(runs.read_events(run, "step")) >= 20 or process.poll() is not None)
            assert process.poll() is None, process.communicate()[0]
            runs.wait_until(lambda: count_ready() == 3)
            killed_s = cluster.kill_node(
                cluster.busy_node([one["pid"] for one in runs.read_events(run, "worker_started")])
            )
            runs.wait_until(lambda: len(runs.read_events(run, "worker_started")) >= 3 or process.poll() is not None)
            parent = psutil.Process(runs.read_events(run, "worker_started")[-1]["pid"]).parent()
            assert parent is not None and parent.create_time() < killed_s
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=runs.TIMEOUT_S)
            assert process.returncode == 130, output
    finally:
        cluster.close()


def test_nothing_is_left_when_the_launcher_is_killed(cluster: RayCluster, tmp_path: Path) -> None:
    settings = (*runs.settings_of("data_parallel"), "training.epochs=100000", *runs.on("ray", cluster))
    with runs.training(tmp_path, *settings) as (process, run):
        runs.wait_until(lambda: len(runs.read_events(run, "step")) >= 5)
        assert runs.agents(cluster)
        process.kill()
        process.wait()
        runs.wait_until(lambda: not runs.agents(cluster), 10.0)


def test_a_cluster_that_is_too_small_is_refused(cluster: RayCluster, tmp_path: Path) -> None:
    outcome = runs.train(tmp_path, *runs.settings_of("data_parallel"), "strategy.workers=3", *runs.on("ray", cluster))
    assert outcome.code == 2
    assert "3 workers" in outcome.output and "2 free slots" in outcome.output
    assert not (tmp_path / "run").exists()


def test_no_ray_at_the_address_is_refused(tmp_path: Path) -> None:
    settings = (*runs.settings_of("data_parallel"), "cluster.engine=ray", "cluster.connect=127.0.0.1:1")
    outcome = runs.train(tmp_path, *settings)
    assert outcome.code == 2
    assert "no Ray answers at 127.0.0.1:1" in outcome.output and "ray start --head" in outcome.output


@pytest.mark.parametrize("where", ["setting", "environment"])
def test_an_address_of_ray_client_is_refused(where: str, tmp_path: Path) -> None:
    settings = (*runs.settings_of("data_parallel"), "cluster.engine=ray")
    if where == "setting":
        outcome = runs.train(tmp_path, *settings, "cluster.connect=ray://127.0.0.1:10001")
    else:
        outcome = runs.train(tmp_path, *settings, RAY_ADDRESS="ray://127.0.0.1:10001")
    assert outcome.code == 2
    assert "Ray Client" in outcome.output and "ray job submit" in outcome.output


def test_a_cluster_that_asks_for_a_token_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._raylet import Config

    (tmp_path / "token").write_text("b" * 64)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    Config.initialize("")  # this process looks at the nodes of the cluster
    settings = (*runs.settings_of("data_parallel"), "training.epochs=1")
    try:
        cluster = RayCluster(num_nodes=2)
        try:
            refused = runs.train(tmp_path / "without", *settings, *runs.on("ray", cluster), RAY_AUTH_MODE="disabled")
            outcome = runs.train(tmp_path / "with", *settings, *runs.on("ray", cluster))
        finally:
            cluster.close()
    finally:
        monkeypatch.undo()
        Config.initialize("")
    assert refused.code == 2, refused.output
    assert "takes no driver without its token: set RAY_AUTH_MODE=token" in refused.output
    assert outcome.code == 0, outcome.output


def test_a_program_that_is_connected_stays_connected(cluster: RayCluster, tmp_path: Path) -> None:
    """As in a notebook: the user's own connection and signal handlers are left alone."""
    program = f"""
import signal, ray, cordee
ray.init("{cluster.connect}", log_to_driver=False)
handler = signal.getsignal(signal.SIGTERM)
run = cordee.train({{"model": {{"use": "mlp", "hidden": [8]}},
    "data": {{"use": "synthetic", "shape": [6], "num_classes": 3, "size": 64, "test_size": 16}},
    "training": {{"batch_size": 8, "threads": 1}}, "strategy": {{"name": "data_parallel", "workers": 2}}}},
    engine="ray", run_dir="run", quiet=True)
assert run.status == "completed"
assert ray.is_initialized() and signal.getsignal(signal.SIGTERM) is handler
print("connected", ray.cluster_resources()["CPU"])
try:
    cordee.train("run/job.toml", overrides=["cluster.connect=10.0.0.1:6379"], engine="ray", run_dir="other")
except cordee.CordeeError as error:
    print(error)
"""
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=runs.TIMEOUT_S,
        env=dict(os.environ),
    )  # fmt: skip
    assert "connected 2.0" in done.stdout, done.stdout + done.stderr
    assert "this process is connected to the Ray at" in done.stdout


def test_a_submitted_job_trains(tmp_path: Path) -> None:
    """The driver is on a node, in a copy of the working folder; so are the workers, which find the user's module."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "job.toml").write_text(runs.JOB.replace('use = "mlp"\nhidden = [16, 16]', 'use = "mine:build"'))
    (work / "mine.py").write_text("import torch\n\ndef build():\n    return torch.nn.Linear(6, 3)\n")
    binaries = Path(sys.executable).parent
    overrides = [word for setting in runs.settings_of("data_parallel") for word in ("--set", setting)]
    train = [str(binaries / "cordee"), "train", "job.toml", "--engine", "ray", *overrides]
    cluster = RayCluster(num_nodes=2, has_dashboard=True)
    try:
        submit = [str(binaries / "ray"), "job", "submit", "--address", cluster.jobs_address, "--working-dir", str(work)]
        command = [*submit, "--", *train, "--run-dir", str(tmp_path / "run")]
        deadline_s = time.monotonic() + runs.TIMEOUT_S
        while True:  # a Ray that has just started says: "No available agent to submit job, please try again later"
            done = subprocess.run(command, capture_output=True, text=True, timeout=runs.TIMEOUT_S)
            if "No available agent" not in done.stderr or time.monotonic() > deadline_s:
                break
            time.sleep(1.0)
    finally:
        cluster.close()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 nodes, 2 CPUs" in done.stdout
    assert runs.Outcome(0, "", tmp_path / "run").summary["status"] == "completed"


def test_a_trial_trains_on_the_cpus_of_its_placement_group(tmp_path: Path) -> None:
    """As Ray Tune runs a trial: in a group with a CPU for itself, and one for each worker."""
    program = """
import sys, ray, cordee
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

@ray.remote(num_cpus=1)
def trial(workers, folder):
    try:
        return cordee.train({"model": {"use": "mlp", "hidden": [8]},
            "data": {"use": "synthetic", "shape": [6], "num_classes": 3, "size": 64, "test_size": 16},
            "training": {"batch_size": 8, "threads": 1}, "strategy": {"name": "data_parallel", "workers": workers}},
            engine="ray", run_dir=folder, quiet=True).status
    except cordee.CordeeError as error:
        return str(error)

ray.init(sys.argv[1], log_to_driver=False)
group = placement_group([{"CPU": 1}] * 3)
inside = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
for workers in (2, 3):
    print(ray.get(trial.options(scheduling_strategy=inside).remote(workers, f"{sys.argv[2]}/{workers}")))
"""
    (tmp_path / "program.py").write_text(program)
    cluster = RayCluster(num_nodes=3)
    try:
        command = [sys.executable, "program.py", cluster.connect, str(tmp_path)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=runs.TIMEOUT_S)
    finally:
        cluster.close()
    assert done.stdout.splitlines()[0] == "completed", done.stdout + done.stderr
    assert "2 free slots (placement group: 2)" in done.stdout


def test_errors_are_those_of_users() -> None:
    from cordee.cluster.engines.ray import _reach

    with pytest.raises(JobError, match="HOST:PORT"):
        _reach("somewhere")
