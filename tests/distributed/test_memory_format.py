"""A memory format, or compiling, is the same computation: with any strategy, on any number of workers.

In the same format a difference is that of sums in another order, limit 1e-5 as in test_data_parallel.py. Between
formats kernels add in another order as well; over 20 steps of LeNet the same limit holds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from driving import Outcome, Table, job, largest_difference, train_alone, train_together
from process_pool import ProcessPool

import cordee
from cordee.cluster import Team
from cordee.core import Job
from cordee.planner.kernels import Kernels, Measured, Trial, kernels_key
from cordee.planner.measurements import keep
from cordee.training.components import assemble

pytestmark = pytest.mark.timeout(150)

LARGEST_DIFFERENCE = 1e-5
SIZES = {"size": 66, "test_size": 10}


def lenet(memory_format: str = "channels_last", **training: Any) -> Table:
    return job(
        model={"use": "lenet"},
        data={"use": "synthetic", "shape": [1, 28, 28], "num_classes": 10, **SIZES},
        optimizer={"use": "sgd", "lr": 0.02},
        training={"steps": 20, "memory_format": memory_format, **training},
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return train_alone(lenet(), tmp_path_factory.mktemp("alone"))


def test_the_format_changes_rounding_only(alone: Outcome, tmp_path: Path) -> None:
    plain = train_alone(lenet("contiguous"), tmp_path)
    assert plain.summary.weights_sha256 != alone.summary.weights_sha256  # it does something
    assert largest_difference(plain, alone) <= LARGEST_DIFFERENCE


@pytest.mark.parametrize(
    "strategy",
    [
        {"name": "data_parallel", "reducer": "flat"},
        {"name": "data_parallel", "reducer": "ddp"},
        {"name": "sharded", "unit_bytes": 10_000},
        {"name": "pipeline"},
        {"name": "pipeline", "schedule": "zero-bubble"},
        {"name": "tensor", "plan": {"linear1.0": "gather"}},
        {"name": "local_sgd", "sync_every": 1},
    ],
    ids=lambda strategy: "-".join(str(value) for value in strategy.values() if not isinstance(value, dict)),
)
def test_two_workers_equal_one(strategy: Table, alone: Outcome, two: ProcessPool, tmp_path: Path) -> None:
    together = train_together(two, {**lenet(), "strategy": strategy}, tmp_path)[0]
    assert largest_difference(alone, together) <= LARGEST_DIFFERENCE


def test_reproducible_runs_have_the_same_bits(two: ProcessPool, tmp_path: Path) -> None:
    table = lenet(reproducible=True, steps=4)
    one, together = train_alone(table, tmp_path / "a"), train_together(two, table, tmp_path / "b")[0]
    assert one.summary.weights_sha256 == together.summary.weights_sha256


def test_a_resumed_run_equals_the_uninterrupted_one(two: ProcessPool, tmp_path: Path) -> None:
    table = lenet(steps=6)
    whole = train_together(two, table, tmp_path / "whole")[0]
    train_together(two, {**table, "stop": {"steps": 3}}, tmp_path / "run")
    resumed = train_together(two, table, tmp_path / "run", resume=True)[0]
    assert resumed.summary.weights_sha256 == whole.summary.weights_sha256


def test_all_members_compute_as_the_launcher_chose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache says that channels-last is faster: two workers give the bits of a run that sets it."""
    monkeypatch.setenv("CORDEE_CACHE", str(tmp_path / "cache"))
    table = {**lenet("auto", steps=4), "strategy": {"name": "data_parallel", "workers": 2}}
    parts = assemble(Job.from_dict({**table, "strategy": {"name": "single", "workers": 1}}), Team())
    trials = (Trial(kernels=Kernels(), gain=1.0), Trial(kernels=Kernels(memory_format="channels_last"), gain=1.5))
    keep("kernels", kernels_key(parts), Measured(trials=trials))
    chosen = cordee.train(table, run_dir=tmp_path / "chosen", quiet=True)
    as_set = cordee.train({**table, **lenet(steps=4)}, run_dir=tmp_path / "set", quiet=True)
    plain = cordee.train({**table, **lenet("contiguous", steps=4)}, run_dir=tmp_path / "plain", quiet=True)
    assert chosen.summary.weights_sha256 == as_set.summary.weights_sha256 != plain.summary.weights_sha256
    assert Job.load(tmp_path / "chosen" / "job.toml").training.memory_format == "channels_last"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_workers_compile(tmp_path: Path) -> None:
    """With torch's own compiler: the weights of the plain run but for rounding, and no process is left."""
    table = {
        **job(training={"batch_size": 32, "steps": 12, "compile": True}),
        "strategy": {"name": "data_parallel", "workers": 2},
    }
    compiled = cordee.train(table, run_dir=tmp_path / "compiled", quiet=True)
    table["training"] = {**table["training"], "compile": False}
    plain = cordee.train(table, run_dir=tmp_path / "plain", quiet=True)
    assert Job.load(tmp_path / "compiled" / "job.toml").training.compile is True  # it did not fall back
    assert "cannot be compiled" not in "".join(path.read_text() for path in (tmp_path / "compiled/logs").iterdir())
    found, expected = compiled.model.state_dict(), plain.model.state_dict()
    for name, other in expected.items():
        assert float((found[name] - other).abs().max()) <= LARGEST_DIFFERENCE * float(other.abs().max()), name
