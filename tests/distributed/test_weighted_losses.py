"""Losses that are not plain means over samples: parts and shares are weighted so that they make the whole batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from driving import Outcome, Table, job, largest_difference, train_alone, train_together
from process_pool import CaseError, ProcessPool

from cordee.core import Job
from cordee.launch import train as launch

pytestmark = pytest.mark.timeout(150)

STRATEGIES: dict[str, Table] = {
    "flat": {"name": "data_parallel", "reducer": "flat"},
    "ddp": {"name": "data_parallel", "reducer": "ddp"},
    "sharded": {"name": "sharded", "unit_bytes": 100},
    "pipeline": {"name": "pipeline", "microbatches": 3},
    "tensor": {"name": "tensor"},
}
LOSSES: dict[str, Table] = {
    "built in": {"use": "cross_entropy", "weight": [4.0, 1.0, 0.3, 2.0], "ignore_index": 3},
    "torch's": {"use": "torch.nn:CrossEntropyLoss", "weight": [4.0, 1.0, 0.3, 2.0], "ignore_index": 3},
    "torch's, inherited": {"use": "odd_data:WeightedLoss"},
    "own": {"use": "odd_data:own_loss_that_counts"},
}


def weighted_job(loss: Table, **training: object) -> Table:
    return job(
        data={"use": "odd_data:uneven"},
        model={"use": "mlp", "hidden": [16], "num_classes": 4},  # the ignored label is no class by itself
        loss=loss,
        optimizer={"use": "sgd", "lr": 0.1},
        training={"batch_size": 9, "steps": 30, **training},
    )


def check_same(one: Outcome, other: Outcome) -> None:
    assert largest_difference(one, other) <= 1e-5
    assert other.losses() == pytest.approx(one.losses(), rel=1e-5)
    (measured,), (expected,) = other.of("evaluation"), one.of("evaluation")
    assert measured["test_loss"] == pytest.approx(expected["test_loss"], rel=1e-5)
    assert measured["test_accuracy"] == expected["test_accuracy"]
    assert [e["accuracy"] for e in other.of("step")] == [e["accuracy"] for e in one.of("step")]


@pytest.mark.parametrize("loss", LOSSES)
def test_accumulation(loss: str, tmp_path: Path) -> None:
    whole = train_alone(weighted_job(LOSSES[loss]), tmp_path / "whole")
    parts = train_alone(weighted_job(LOSSES[loss], accumulate=3), tmp_path / "parts")
    check_same(whole, parts)
    # Test batches of another size: the mean over the test set is the same.
    other = {**weighted_job(LOSSES[loss]), "evaluation": {"every_epochs": 0, "batch_size": 7}}
    check_same(whole, train_alone(other, tmp_path / "other"))


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("loss", ["built in", "own"])
def test_strategies(two: ProcessPool, name: str, loss: str, tmp_path: Path) -> None:
    table = weighted_job(LOSSES[loss], accumulate=2)
    whole = train_alone(weighted_job(LOSSES[loss]), tmp_path / "whole")
    together = train_together(two, {**table, "strategy": STRATEGIES[name]}, tmp_path / "together")
    check_same(whole, together[0])


def test_reproducible(two: ProcessPool, tmp_path: Path) -> None:
    table = weighted_job(LOSSES["torch's"], reproducible=True)
    alone = train_alone(table, tmp_path / "alone")
    together = train_together(two, table, tmp_path / "together")
    assert together[0].summary.weights_sha256 == alone.summary.weights_sha256


@pytest.mark.parametrize("name", ["flat", "pipeline", "sharded"])
def test_what_does_not_say_its_count_is_refused(two: ProcessPool, name: str, tmp_path: Path) -> None:
    table = weighted_job({"use": "odd_data:own_loss"})
    expected = r"the loss 'odd_data:own_loss' of a batch is not the mean of those of its parts: .* attribute count"
    with pytest.raises(CaseError, match=expected):
        train_together(two, {**table, "strategy": STRATEGIES[name]}, tmp_path)


@pytest.mark.parametrize("reproducible", [False, True])
def test_parameter_server(reproducible: bool, tmp_path: Path) -> None:
    table = weighted_job(LOSSES["built in"], reproducible=reproducible, steps=12, device="cpu")
    runs = [
        launch(Job.from_dict({**table, "strategy": strategy}), run_dir=tmp_path / str(number), quiet=True).summary
        for number, strategy in enumerate([{"name": "single"}, {"name": "parameter_server", "workers": 2}])
    ]
    assert runs[1].train_loss == pytest.approx(runs[0].train_loss, rel=1e-5)
    if reproducible:
        assert runs[1].weights_sha256 == runs[0].weights_sha256
    else:
        assert runs[1].test_loss == pytest.approx(runs[0].test_loss, rel=1e-5)
