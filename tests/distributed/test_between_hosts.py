"""Every strategy computes on several hosts what it computes on one, whatever goes between them encrypted or not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from driving import Table
from launching import run
from process_pool import ProcessPool
from splitting import JOBS, References, check_equal
from test_team_launch import HERE, summary_of, write_job

pytestmark = pytest.mark.timeout(200)

# Neighbours in number are on different hosts, so that the axes of a mesh go inside a host and across.
MIXED = ("left", "right", "left", "right")
STRATEGIES: dict[str, tuple[str, Table]] = {
    "data_parallel": ("mlp, momentum and clipping", {"name": "data_parallel"}),
    "overlapped": ("gpt", {"name": "data_parallel", "segment_bytes": 1000}),  # by itself, between hosts
    "ddp": ("mlp", {"name": "data_parallel", "reducer": "ddp"}),
    "sharded": ("gpt", {"name": "sharded", "unit_bytes": 10_000}),
    "pipeline": ("lenet", {"name": "pipeline", "microbatches": 4}),
    "tensor": ("gpt", {"name": "tensor"}),
    "sharded slices": ("mlp", {"name": "hybrid", "mesh": {"sharded": 2, "tensor": 2}, "unit_bytes": 1000}),
    "pipeline of slices": ("mlp", {"name": "hybrid", "mesh": {"pipeline": 2, "tensor": 2}, "microbatches": 3}),
    "copies of a pipeline": ("mlp", {"name": "hybrid", "mesh": {"data": 2, "pipeline": 2}}),
}
IN_SHORT = ("overlapped", "sharded", "pipeline of slices")


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def two_by_two() -> Iterator[ProcessPool]:
    pool = ProcessPool(4, MIXED)
    pool.start()
    yield pool
    pool.close()


@pytest.mark.parametrize(
    "case", [case if case in IN_SHORT else pytest.param(case, marks=pytest.mark.long) for case in STRATEGIES]
)
def test_two_workers_on_each_of_two_hosts_equal_one(
    two_by_two: ProcessPool, case: str, references: References, tmp_path: Path
) -> None:
    name, strategy = STRATEGIES[case]
    check_equal(two_by_two, JOBS[name], strategy, references(JOBS[name]), tmp_path)


@pytest.mark.parametrize("strategy", ["sharded", pytest.param("pipeline", marks=pytest.mark.long)])
def test_a_run_whose_workers_meet_through_the_coordinator(strategy: str, tmp_path: Path) -> None:
    """Groups and their sub-groups are formed in the coordinator's store, and checkpoints are saved and found."""
    path = write_job(tmp_path, training={"steps": 30}, strategy={"name": strategy, "workers": 2})
    found = {}
    for place, python_path in (("one", ""), ("two", f"{HERE}/two_hosts")):
        # Not a warm launch: Python has to start to read `sitecustomize`.
        command = [sys.executable, "-m", "cordee", "train", str(path), "--run-dir", str(tmp_path / place), "-q"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path}
        subprocess.run(command, env=environment, check=True, timeout=90)
        found[place] = summary_of(tmp_path / place)
    assert found["two"]["steps"] == 30 and found["two"]["recoveries"] == 0
    assert found["two"]["weights_sha256"] == found["one"]["weights_sha256"]
    logs = [(tmp_path / place / "logs" / "worker-1.log").read_text() for place in ("one", "two")]
    assert ["another host" in log for log in logs] == [False, True], logs


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    ended = run("train", str(path), "--set", "cluster.encrypt=maybe", "--run-dir", str(tmp_path / "run"), "-q")
    assert ended.code == 2 and "cluster.encrypt" in ended.stderr, ended
