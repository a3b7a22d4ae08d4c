"""Batches, shares and micro-batches of which the loss counts nothing: the same rule in every strategy."""

from __future__ import annotations

from pathlib import Path

import pytest
from driving import Outcome, Table, job, largest_difference, train_alone, train_together
from process_pool import ProcessPool

from cordee import checkpoint
from cordee.core import Job
from cordee.launch import train

pytestmark = pytest.mark.timeout(150)

STEPS = 20
STRATEGIES: dict[str, Table] = {
    "flat": {"name": "data_parallel", "reducer": "flat"},
    "overlapped": {"name": "data_parallel", "reducer": "overlapped", "segment_bytes": 100},
    "ddp": {"name": "data_parallel", "reducer": "ddp"},
    "sharded": {"name": "sharded", "unit_bytes": 100},
    "pipeline": {"name": "pipeline", "microbatches": 2},
    "tensor": {"name": "tensor"},
}


def sparse_job(**training: object) -> Table:
    """Return a job of 20 steps, in some of which every label is ignored."""
    return job(
        data={"use": "odd_data:mostly_ignored"},
        model={"use": "mlp", "hidden": [16]},
        loss={"use": "cross_entropy", "ignore_index": 3},
        optimizer={"use": "adamw", "lr": 0.05, "weight_decay": 0.1},
        training={"batch_size": 6, "steps": STEPS, **training},
    )


def optimizer_steps(run_dir: Path) -> set[float]:
    """Return what Adam counted for each parameter, out of the last checkpoint."""
    newest = max((run_dir / "checkpoints").iterdir(), key=lambda path: int(path.name.removeprefix("step-")))
    state = checkpoint.load(newest)
    return {float(tensor) for name, tensor in state.part("optimizer").tensors.items() if name.endswith("step")}


def num_skipped(outcome: Outcome) -> int:
    """Return in how many steps nothing was counted: they have no loss."""
    return sum(fields["loss"] is None and fields["accuracy"] is None for fields in outcome.of("step"))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", STRATEGIES)
def test_nothing_counted_is_no_step(two: ProcessPool, name: str, accumulate: int, tmp_path: Path) -> None:
    table = sparse_job(accumulate=accumulate)
    alone = train_alone(table, tmp_path / "alone")
    together = train_together(two, {**table, "strategy": STRATEGIES[name]}, tmp_path / "together")
    assert num_skipped(alone) == num_skipped(together[0]) >= 4
    assert optimizer_steps(tmp_path / "alone") == optimizer_steps(tmp_path / "together") == {STEPS - num_skipped(alone)}
    assert largest_difference(alone, together[0]) <= 2e-5
    assert [fields["lr"] for fields in together[0].of("step")] == [fields["lr"] for fields in alone.of("step")]
    assert together[0].summary.steps == STEPS and together[0].summary.samples == alone.summary.samples


def test_reproducible(two: ProcessPool, tmp_path: Path) -> None:
    table = sparse_job(reproducible=True)
    alone = train_alone(table, tmp_path / "alone")
    together = train_together(two, table, tmp_path / "together")
    assert num_skipped(alone) >= 4
    assert optimizer_steps(tmp_path / "alone") == optimizer_steps(tmp_path / "together") == {STEPS - num_skipped(alone)}
    assert together[0].summary.weights_sha256 == alone.summary.weights_sha256


@pytest.mark.parametrize("mesh", [{"data": 2, "pipeline": 2}, {"sharded": 2, "pipeline": 2}, {"data": 2, "tensor": 2}])
def test_meshes(four: ProcessPool, mesh: dict[str, int], tmp_path: Path) -> None:
    table = sparse_job()
    strategy: Table = {"name": "hybrid", "mesh": mesh}
    alone = train_alone(table, tmp_path / "alone")
    together = train_together(four, {**table, "strategy": strategy}, tmp_path / "together")
    assert optimizer_steps(tmp_path / "alone") == optimizer_steps(tmp_path / "together") == {STEPS - num_skipped(alone)}
    assert largest_difference(alone, together[0]) <= 2e-5


@pytest.mark.parametrize(
    ("workers", "settings", "training"),
    [
        (2, {"servers": 2}, {}),
        pytest.param(1, {"staleness": 1}, {"accumulate": 2}, marks=pytest.mark.long),
        pytest.param(3, {}, {"reproducible": True}, marks=pytest.mark.long),
    ],
)
def test_parameter_server(tmp_path: Path, workers: int, settings: Table, training: Table) -> None:
    table = sparse_job(**training)
    alone = train_alone(table, tmp_path / "alone")
    strategy = {"name": "parameter_server", "workers": workers, **settings}
    run = train(Job.from_dict({**table, "strategy": strategy}), run_dir=tmp_path / "dispatched", quiet=True)
    assert optimizer_steps(tmp_path / "alone") == optimizer_steps(run.directory) == {STEPS - num_skipped(alone)}
    assert (run.summary.steps, run.summary.samples) == (alone.summary.steps, alone.summary.samples)
    loaded = checkpoint.load_newest(run.directory / "checkpoints")
    assert loaded is not None
    for name, weight in loaded.state.part("model").tensors.items():
        assert weight.numpy() == pytest.approx(alone.weights[name], rel=2e-5, abs=1e-6)
