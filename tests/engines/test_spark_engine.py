"""The engine `spark` on a real standalone Spark: a master and two workers. Run by `make test-spark`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import engine_runs as runs
import pytest

pyspark = pytest.importorskip("pyspark")

from cordee.bench.clusters import SparkCluster  # noqa: E402

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def cluster() -> Iterator[SparkCluster]:
    cluster = SparkCluster(num_nodes=2)
    yield cluster
    cluster.close()


@pytest.fixture
def own_cluster() -> Iterator[SparkCluster]:
    """A Spark that a test may damage."""
    cluster = SparkCluster(num_nodes=2)
    yield cluster
    cluster.close()


@pytest.fixture(scope="class")
def driver(cluster: SparkCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[runs.Driver]:
    driver = runs.Driver("spark", cluster, tmp_path_factory.mktemp("driver"))
    yield driver
    driver.close()


class TestStrategies:
    """One program trains all of them: it holds the cluster until the last is done."""

    @pytest.mark.parametrize("run", runs.EVERY_RUN)
    def test_every_strategy_gives_the_weights_that_it_gives_elsewhere(
        self, run: str, cluster: SparkCluster, driver: runs.Driver
    ) -> None:
        runs.assert_same_as_elsewhere(run, driver)
        runs.wait_until(lambda: not runs.agents(cluster), 5.0)


def test_what_was_recognised_is_printed(cluster: SparkCluster, tmp_path: Path) -> None:
    outcome = runs.train(tmp_path, *runs.settings_of("data_parallel"), *runs.on("spark", cluster))
    assert f"Spark {pyspark.__version__} at {cluster.connect}, 2 executors, 2 slots" in outcome.output


def test_the_doctor_looks_at_every_executor(cluster: SparkCluster, tmp_path: Path) -> None:
    submit = f"--master {cluster.connect} pyspark-shell"
    done = runs.doctor("spark", tmp_path, PYSPARK_SUBMIT_ARGS=submit)
    assert done.code == 0, done.output
    # The second executor may register later: the doctor waits for one.
    assert f"Spark {pyspark.__version__} at {cluster.connect}, " in done.output, done.output
    assert "reaches this host" in done.output, done.output
    assert not done.folder.exists()


def test_the_doctor_says_that_no_master_answers(tmp_path: Path) -> None:
    done = runs.doctor("spark", tmp_path, SPARK_REMOTE="sc://127.0.0.1:1")
    assert done.code == 1 and "Spark Connect" in done.output


@pytest.mark.parametrize("what", ["executor", "node"])
def test_a_killed_executor_costs_a_step_and_changes_no_bit(
    what: str, own_cluster: SparkCluster, tmp_path: Path
) -> None:
    reference = runs.train(tmp_path / "alone", "training.reproducible=true", "training.epochs=1000", "stop.steps=400")
    kill = {"executor": own_cluster.kill_executor, "node": own_cluster.kill_node}[what]
    outcome, pause_s = runs.kill_in_midrun("spark", own_cluster, tmp_path / "spark", lambda: kill(2))
    assert outcome.code == 0, outcome.output
    assert outcome.summary["weights_sha256"] == reference.summary["weights_sha256"]
    assert outcome.summary["recoveries"] >= 1 and outcome.summary["steps_redone"] <= 1
    assert pause_s < 8.0, pause_s


def test_the_worker_comes_back_on_the_next_executor(own_cluster: SparkCluster, tmp_path: Path) -> None:
    """Spark starts another executor by itself."""
    runs.assert_replaced("spark", own_cluster, tmp_path, lambda: own_cluster.kill_executor(2))


def test_nothing_is_left_when_the_launcher_is_killed(cluster: SparkCluster, tmp_path: Path) -> None:
    settings = (*runs.settings_of("data_parallel"), "training.epochs=100000", *runs.on("spark", cluster))
    with runs.training(tmp_path, *settings) as (process, run):
        runs.wait_until(lambda: len(runs.read_events(run, "step")) >= 5)
        assert runs.agents(cluster)
        process.kill()
        process.wait()
        runs.wait_until(lambda: not runs.agents(cluster), 10.0)


def test_a_cluster_that_is_too_small_is_refused(cluster: SparkCluster, tmp_path: Path) -> None:
    settings = (*runs.settings_of("data_parallel"), "strategy.workers=3", *runs.on("spark", cluster))
    outcome = runs.train(tmp_path, *settings)
    assert outcome.code == 2
    assert "3 workers" in outcome.output and "2 free slots" in outcome.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("where", ["setting", "environment"])
def test_spark_connect_is_refused(where: str, tmp_path: Path) -> None:
    settings = (*runs.settings_of("data_parallel"), "cluster.engine=spark")
    if where == "setting":
        outcome = runs.train(tmp_path, *settings, "cluster.connect=sc://127.0.0.1:15002")
    else:
        outcome = runs.train(tmp_path, *settings, SPARK_REMOTE="sc://127.0.0.1:15002")
    assert outcome.code == 2
    assert "Spark Connect" in outcome.output and "spark://HOST:7077" in outcome.output


def test_without_an_address_spark_runs_on_this_host(tmp_path: Path) -> None:
    outcome = runs.train(tmp_path, *runs.settings_of("data_parallel"), "cluster.engine=spark")
    assert outcome.code == 0, outcome.output
    assert "at local[*], 1 executor" in outcome.output


def test_speculation_of_long_tasks_is_refused(tmp_path: Path) -> None:
    program = """
import cordee
from pyspark.sql import SparkSession
spark = (SparkSession.builder.master("local[2]").config("spark.speculation", "true")
    .config("spark.speculation.task.duration.threshold", "1s").getOrCreate())
try:
    cordee.train({"model": {"use": "mlp", "hidden": [8]},
        "data": {"use": "synthetic", "shape": [6], "num_classes": 3, "size": 64, "test_size": 16},
        "strategy": {"name": "data_parallel", "workers": 2}}, engine="spark", run_dir="run", quiet=True)
except cordee.CordeeError as error:
    print("refused:", error)
"""
    assert "refused: spark.speculation.task.duration.threshold" in run_program(program, tmp_path)


def test_a_session_that_is_there_is_used_and_kept(cluster: SparkCluster, tmp_path: Path) -> None:
    program = f"""
import cordee
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("{cluster.connect}").getOrCreate()
run = cordee.train({{"model": {{"use": "mlp", "hidden": [8]}},
    "data": {{"use": "synthetic", "shape": [6], "num_classes": 3, "size": 64, "test_size": 16}},
    "training": {{"batch_size": 8, "threads": 1}}, "strategy": {{"name": "data_parallel", "workers": 2}}}},
    engine="spark", run_dir="run", quiet=True)
print(run.status, spark.range(10).count())
try:
    cordee.train("run/job.toml", overrides=["cluster.connect=spark://elsewhere:7077"], engine="spark", run_dir="other")
except cordee.CordeeError as error:
    print(error)
"""
    output = run_program(program, tmp_path)
    assert "completed 10" in output, output
    assert "this process has a Spark session at" in output


def test_executors_without_cordee_are_named(tmp_path: Path) -> None:
    """The Python of the executors is another one."""
    settings = (*runs.settings_of("data_parallel"), "cluster.engine=spark")
    bare = str(Path(sys.base_prefix) / "bin" / "python3")
    outcome = runs.train(tmp_path, *settings, PYSPARK_PYTHON=bare)
    assert outcome.code == 1
    assert "cordee is not installed for the Python of the Spark executors" in outcome.output


def run_program(program: str, folder: Path) -> str:
    (folder / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=runs.TIMEOUT_S,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
    )
    return done.stdout + done.stderr
