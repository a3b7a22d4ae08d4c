"""Evaluation counts each test sample once, and measures what one process measures with the same weights.

For every strategy and mode, on test sets that divide neither into batches nor among workers, and on one with fewer
samples than there are workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from driving import Table, job, train_alone, train_together
from process_pool import ProcessPool

from cordee.checkpoint import load_model_state, load_newest
from cordee.cluster import Team
from cordee.compute import Metrics, evaluate
from cordee.core import Job
from cordee.launch import train
from cordee.monitoring import read_events
from cordee.training.components import assemble

pytestmark = pytest.mark.timeout(150)

SIZES = (47, pytest.param(2, marks=pytest.mark.long))
IN_PROCESS: dict[str, Table] = {
    "data_parallel": {"name": "data_parallel"},
    "ddp": {"name": "data_parallel", "reducer": "ddp"},
    "sharded": {"name": "sharded"},
    "pipeline": {"name": "pipeline"},
    "tensor": {"name": "tensor"},
}
MESHES: list[Table] = [
    {"data": 2, "pipeline": 2},
    {"data": 2, "tensor": 2},
    {"data": 2, "sharded": 2},
    {"pipeline": 2, "tensor": 2},
]
REPRODUCIBLE = {"reproducible": True}


def job_of(test_size: int, strategy: Table, **training: Any) -> Table:
    return job(
        model={"use": "mlp", "hidden": [32, 16]},
        data={"test_size": test_size},
        training={"steps": 3, **training},
        evaluation={"every_steps": 2},
        metrics={
            "f1": "f1",
            "top_2": "top_2",
            "kappa": "torchmetrics.classification.MulticlassCohenKappa",  # sums of counts
            "margin": {"use": "odd_data:median_margin", "better": "higher"},  # of all samples at once
            "twice": "composed_metrics:Sum",
            "once": "composed_metrics:Wrapped",
        },
        stop={"patience": 9, "patience_metric": "margin"},
        strategy=strategy,
    )


def measure_alone(table: Table, run_dir: Path, step: int) -> Metrics:
    """Evaluate the checkpoint of a run in this process, as `single` does."""
    strategy = {"name": "single", "workers": 1}
    parts = assemble(Job.from_dict({**table, "strategy": strategy, "training": {"threads": 1}}), Team())
    loaded = load_newest(run_dir / "checkpoints")
    assert loaded is not None and loaded.state.values["progress"]["step"] == step
    load_model_state(parts.model, loaded.state.part("model").tensors)
    assert parts.test is not None
    measured = evaluate(
        parts.model,
        parts.test.batches(0),
        parts.computation,
        num_classes=parts.splits.num_classes,
        metrics=parts.metrics,
    )
    assert measured is not None
    return measured


def check(table: Table, run_dir: Path, evaluations: Sequence[dict[str, Any]]) -> None:
    """Each evaluation counts every test sample once; the last one is what one process measures."""
    size = table["data"]["test_size"]
    assert [event["step"] for event in evaluations] == [2, 3]
    assert [event["samples"] for event in evaluations] == [size, size]
    expected = measure_alone(table, run_dir, 3)
    last = evaluations[-1]
    assert expected.num_samples == size
    assert last["test_accuracy"] == expected.accuracy
    assert last["test_loss"] == pytest.approx(expected.loss, rel=1e-6)
    assert list(last["metrics"]) == ["f1", "top_2", "kappa", "margin", "twice", "once"]
    assert (last["metrics"]["twice"], last["metrics"]["once"]) == (2 * size, size)
    assert last["metrics"] == pytest.approx(expected.named, rel=1e-5, nan_ok=True)


@pytest.mark.parametrize("training", [{}, REPRODUCIBLE], ids=["plain", "reproducible"])
@pytest.mark.parametrize("size", SIZES)
def test_single(tmp_path: Path, size: int, training: Table) -> None:
    table = job_of(size, {"name": "single"}, **training)
    check(table, tmp_path, train_alone(table, tmp_path).of("evaluation"))


@pytest.mark.parametrize("name", [*IN_PROCESS, "reproducible"])
@pytest.mark.parametrize("size", SIZES)
def test_two_workers(two: ProcessPool, tmp_path: Path, name: str, size: int) -> None:
    check_together(two, tmp_path, name, size)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in [*IN_PROCESS, "reproducible"] if name != "tensor"])
@pytest.mark.parametrize("size", SIZES)
def test_three_workers(three: ProcessPool, tmp_path: Path, name: str, size: int) -> None:
    check_together(three, tmp_path, name, size)


def check_together(pool: ProcessPool, tmp_path: Path, name: str, size: int) -> None:
    is_reproducible = name == "reproducible"
    strategy = IN_PROCESS["data_parallel" if is_reproducible else name]
    table = job_of(size, strategy, **(REPRODUCIBLE if is_reproducible else {}))
    check(table, tmp_path, train_together(pool, table, tmp_path)[0].of("evaluation"))


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "-".join(mesh))
@pytest.mark.parametrize("size", SIZES)
def test_hybrid(four: ProcessPool, tmp_path: Path, mesh: Table, size: int) -> None:
    table = job_of(size, {"name": "hybrid", "mesh": mesh})
    check(table, tmp_path, train_together(four, table, tmp_path)[0].of("evaluation"))


@pytest.mark.parametrize(
    ("workers", "staleness", "size", "training"),
    [
        (2, 0, 47, REPRODUCIBLE),
        pytest.param(1, 0, 47, REPRODUCIBLE, marks=pytest.mark.long),
        pytest.param(4, 0, 2, REPRODUCIBLE, marks=pytest.mark.long),
        pytest.param(2, 0, 2, {}, marks=pytest.mark.long),
        pytest.param(3, 0, 47, {}, marks=pytest.mark.long),
        (2, 1, 47, {}),
        pytest.param(3, "unbounded", 47, {}, marks=pytest.mark.long),
    ],
)
def test_parameter_server(tmp_path: Path, workers: int, staleness: int | str, size: int, training: Table) -> None:
    strategy = {"name": "parameter_server", "workers": workers, "servers": 2, "staleness": staleness}
    table = job_of(size, strategy, **training)
    run = train(Job.from_dict(table), run_dir=tmp_path / "run", quiet=True)
    events = read_events(run.directory / "events.jsonl")
    check(table, run.directory, [event for event in events if event["type"] == "evaluation"])


def test_the_evaluator_measures_the_bits_of_single(tmp_path: Path) -> None:
    """In reproducible mode weights are the same to the bit, and so is what is measured with them."""
    table = job_of(47, {"name": "single"}, **REPRODUCIBLE)
    alone = train_alone(table, tmp_path / "alone").of("evaluation")
    table = job_of(47, {"name": "parameter_server", "workers": 2}, **REPRODUCIBLE)
    run = train(Job.from_dict(table), run_dir=tmp_path / "dispatched", quiet=True)
    events = [event for event in read_events(run.directory / "events.jsonl") if event["type"] == "evaluation"]
    keys = ("step", "samples", "test_loss", "test_accuracy")
    assert [[event[key] for key in keys] for event in events] == [[event[key] for key in keys] for event in alone]
    assert torch.isfinite(torch.tensor([event["test_loss"] for event in events])).all()
