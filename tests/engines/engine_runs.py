"""Runs on the clusters of other engines, as a user starts them, and what must hold on each of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from cordee.bench.clusters import Cluster
from cordee.strategies.table import STRATEGIES, Entry

TIMEOUT_S = 500.0  # on a busy machine a JVM takes minutes to start
JOB = """
name = "small"
[model]
use = "mlp"
hidden = [16, 16]
[data]
use = "synthetic"
shape = [6]
num_classes = 3
size = 400
test_size = 100
[optimizer]
use = "adam"
lr = 0.01
[training]
batch_size = 16
epochs = 2
threads = 1
[strategy]
name = "single"
[monitoring]
every_steps = 1
"""
TOKENS_JOB = """
name = "tokens"
[model]
use = "gpt"
num_layers = 2
num_heads = 2
embedding_width = 16
[data]
use = "synthetic"
kind = "tokens"
shape = [12]
num_classes = 16
size = 96
test_size = 16
[training]
batch_size = 16
epochs = 2
threads = 1
[strategy]
name = "single"
[monitoring]
every_steps = 1
"""
# What a strategy needs beside two workers. Those that are not here need nothing.
SETTINGS: dict[str, tuple[str, ...]] = {
    "single": ("strategy.workers=1",),
    "hybrid": ("strategy.mesh={tensor = 2}",),
    "federated": ("strategy.rounds=4", "strategy.partition.clients=10"),
    "parameter_server on slots": ("strategy.servers_on=slots", "strategy.servers=2"),
}


# What is trained on each engine: every strategy, and one whose processes can be elsewhere.
EVERY_RUN = [*STRATEGIES, "parameter_server on slots"]


def entry_of(run: str) -> Entry:
    return STRATEGIES[run.partition(" ")[0]]


def job_of(run: str) -> str:
    if run in ("tensor", "hybrid"):
        return TOKENS_JOB
    # A run of rounds is as long as these say.
    return JOB.replace("epochs = 2\n", "") if entry_of(run).run_kind == "rounds" else JOB


def settings_of(run: str) -> tuple[str, ...]:
    """Return the settings of a run of two workers, in the reproducible mode where the strategy knows it."""
    reproducible = ("training.reproducible=true",) if entry_of(run).can_reproduce else ()
    strategy = run.partition(" ")[0]
    return (f"strategy.name={strategy}", "strategy.workers=2", *SETTINGS.get(run, ()), *reproducible)


class Outcome(NamedTuple):
    code: int
    output: str
    folder: Path

    @property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return found

    def events(self, kind: str) -> list[dict[str, Any]]:
        return read_events(self.folder, kind)


def read_events(folder: Path, kind: str) -> list[dict[str, Any]]:
    path = folder / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("}")]
    return [event for event in events if event["type"] == kind]


@contextlib.contextmanager
def training(
    folder: Path, *settings: str, job: str = JOB, command: tuple[str, ...] = (), **environment: str
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Inside, `cordee train` runs; gives its process and the run directory."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.toml").write_text(job)
    run = folder / "run"
    overrides = [word for setting in settings for word in ("--set", setting)]
    arguments = ["train", str(folder / "job.toml"), "--run-dir", str(run), *overrides]
    process = subprocess.Popen(
        [*(command or (sys.executable, "-m", "cordee")), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        cwd=folder,
    )
    try:
        yield process, run
    finally:
        family = [process, *family_of(process.pid)]
        if process.poll() is None:
            for member in family:
                with contextlib.suppress(psutil.Error, ProcessLookupError):
                    member.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def family_of(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def train(folder: Path, *settings: str, job: str = JOB, **environment: str) -> Outcome:
    with training(folder, *settings, job=job, **environment) as (process, run):
        output, _ = process.communicate(timeout=TIMEOUT_S)
        return Outcome(process.returncode, output, run)


def doctor(engine: str, folder: Path, **environment: str) -> Outcome:
    """Check a cluster. The folder of the outcome is that of runs."""
    ended = subprocess.run(
        [sys.executable, "-m", "cordee", "doctor", "--engine", engine],
        cwd=folder,
        env={**os.environ, "COLUMNS": "300", "CORDEE_RUNS": str(folder / "runs"), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    return Outcome(ended.returncode, ended.stdout, folder / "runs")


def on(engine: str, cluster: Cluster) -> tuple[str, ...]:
    return (f"cluster.engine={engine}", f"cluster.connect={cluster.connect}")


def wait_until(condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.1)  # looking through all processes takes a core otherwise


def agents(cluster: Cluster) -> list[psutil.Process]:
    """Return the agents of a cluster that run, and what they have started."""
    found = []
    for process in cluster.processes():
        with contextlib.suppress(psutil.Error):
            if "cordee.cluster" in " ".join(process.cmdline()):
                found.append(process)
    return found


class Driver:
    """A program that is connected to a cluster, and trains jobs one after the other (`driver.py`)."""

    def __init__(self, engine: str, cluster: Cluster, folder: Path) -> None:
        self.engine = engine
        self._folder = folder
        self._errors = (folder / "driver.log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "driver.py"), engine, cluster.connect],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYSPARK_PYTHON": sys.executable},
            cwd=folder,
        )
        self._runs: dict[tuple[str, ...], Outcome] = {}

    def train(self, job: str, *settings: str, engine: str) -> Outcome:
        """Train, unless the same was trained before."""
        key = (engine, job, *settings)
        if key not in self._runs:
            self._runs[key] = self._train(job, settings, engine)
        return self._runs[key]

    def _train(self, job: str, settings: tuple[str, ...], engine: str) -> Outcome:
        run = self._folder / f"run-{len(self._runs)}"
        path = run.with_suffix(".toml")
        path.write_text(job)
        request = {"job": str(path), "overrides": settings, "engine": engine, "run_dir": str(run)}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("answer "):
                status = json.loads(line.partition(" ")[2])
                return Outcome(0 if status == "completed" else 1, status, run)
        raise AssertionError((self._folder / "driver.log").read_text())

    def close(self) -> None:
        family = family_of(self._process.pid)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30.0)
        except subprocess.TimeoutExpired:
            for member in family:
                with contextlib.suppress(psutil.Error):
                    member.kill()
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()


def assert_same_as_elsewhere(run: str, driver: Driver) -> None:
    """Train on the engine and without it: the same weights, every sample once."""
    job = job_of(run)
    if entry_of(run).can_reproduce:
        reference = driver.train(job, "training.reproducible=true", engine="local")
    else:
        reference = driver.train(job, *settings_of(run), engine="local")
    assert reference.code == 0, reference.output
    calm = "cluster.failure_timeout=30s"  # nobody is lost here because the machine is busy
    outcome = driver.train(job, *settings_of(run), calm, engine=driver.engine)
    assert outcome.code == 0, outcome.output
    assert outcome.summary["samples"] == reference.summary["samples"]
    assert outcome.summary["weights_sha256"] == reference.summary["weights_sha256"]


def assert_replaced(engine: str, cluster: Cluster, folder: Path, replace: Callable[[], object]) -> None:
    """Train without end, lose a worker by `replace`, and wait for the worker that takes its place; then Ctrl-C."""
    settings = (*settings_of("data_parallel"), "training.epochs=1000000", "cluster.wait_for_workers=60s")
    with training(folder, *settings, *on(engine, cluster)) as (process, run):
        wait_until(lambda: len(read_events(run, "step")) >= 20 or process.poll() is not None)
        assert process.poll() is None, process.communicate()[0]
        assert len(read_events(run, "worker_started")) == 2
        replace()
        wait_until(lambda: len(read_events(run, "worker_started")) >= 3 or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 130, output


def kill_in_midrun(
    engine: str, cluster: Cluster, folder: Path, kill: Callable[[], float], *settings: str, steps: int = 400
) -> tuple[Outcome, float]:
    """Train in the reproducible mode, kill something at step 20; return the outcome, and the seconds to the next step.

    The next step is the first after the longest pause that follows the kill.
    """
    common = (
        "training.reproducible=true",
        "training.epochs=1000",
        f"stop.steps={steps}",
        "cluster.wait_for_workers=60s",
    )
    run = (*settings_of("data_parallel"), *common, *settings, *on(engine, cluster))
    with training(folder, *run) as (process, path):
        wait_until(lambda: len(read_events(path, "step")) >= 20 or process.poll() is not None)
        assert process.poll() is None, process.communicate()[0]
        killed_s = kill()
        output, _ = process.communicate(timeout=TIMEOUT_S)
        outcome = Outcome(process.returncode, output, path)
    times_s = [event["time"] for event in outcome.events("step")]
    before_s = max((at for at in times_s if at <= killed_s), default=killed_s)
    after_s = sorted(at for at in times_s if at > killed_s)
    pauses = [(later - earlier, later) for earlier, later in zip([before_s, *after_s], after_s, strict=False)]
    return outcome, max(pauses)[1] - killed_s


# Functions as ranks: what `horovod_driver.py` says, line by line.

Said = dict[str, Any]


def drive_horovod(engine: str, cluster: Cluster, environment: dict[str, str]) -> list[Said]:
    """Run the driver on a cluster; return what it has said."""
    here = Path(__file__).parent
    ended = subprocess.run(
        [sys.executable, str(here / "horovod_driver.py"), engine, cluster.connect],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYSPARK_PYTHON": sys.executable, **environment},
        cwd=here,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]


def assert_horovod_holds(said: list[Said]) -> None:
    """Check the first eight answers, which are the same on Ray and Spark."""
    expected = said[0]["alone"]
    for one in said[1:3]:
        results = one["result"]
        assert [each["rank"] for each in results] == [0, 1] and {each["size"] for each in results} == {2}
        assert [each["local"] for each in results] == [[0, 2], [1, 2]]  # the nodes are processes of this host
        assert {each["told"] for each in results} == {"so"} and len({each["pid"] for each in results}) == 2
        for each in results:
            # Means of halves, added in another order.
            assert each["weights"] == pytest.approx(expected, rel=1e-12)
    for failed in said[3:5]:
        assert failed["kind"] == "TrainingError", failed
        assert "rank 1 failed: ValueError: no luck" in failed["error"] and "horovod_driver.py" in failed["error"]
    assert said[5]["result"] == ["2", "2"]  # variables of earlier calls are gone
    assert said[6]["kind"] == "TrainingError"
    (single,) = said[7]["result"]
    assert single["size"] == 1 and single["weights"] == pytest.approx(expected, rel=1e-12)
