"""Nested batches, ragged by a collate function, and models with a loss of their own: the same with every strategy."""

from __future__ import annotations

from pathlib import Path

import pytest
from driving import Table, job, largest_difference, train_alone, train_together
from process_pool import CaseError, ProcessPool

from cordee.core import Job
from cordee.launch import train as launch

pytestmark = pytest.mark.timeout(150)

STRATEGIES: dict[str, Table] = {
    "flat": {"name": "data_parallel", "reducer": "flat"},
    "overlapped": {"name": "data_parallel", "reducer": "overlapped"},
    "ddp": {"name": "data_parallel", "reducer": "ddp"},
    "sharded": {"name": "sharded", "unit_bytes": 100},
}


def tokens_job(*, returns: str = "dict", **training: object) -> Table:
    """8 steps an epoch, the last uneven. Samples have 1 to 8 tokens to predict, so that shares count differently."""
    return job(
        data={"use": "nested_parts:sentences", "collate": "nested_parts:pad"},
        model={"use": "nested_parts:Continues", "returns": returns},
        loss={"use": "model", **({"output": 1} if returns == "tuple" else {})},
        optimizer={"use": "sgd", "lr": 0.5},
        training={"batch_size": 6, "steps": 14, "device": "cpu", **training},
    )


def pairs_job(kind: str, **training: object) -> Table:
    return job(
        data={"use": "nested_parts:two_inputs", "kind": kind},
        model={"use": "nested_parts:TwoInputs"},
        loss={"use": "nested_parts:weighed"},
        optimizer={"use": "sgd", "lr": 0.1},
        training={"batch_size": 7, "steps": 12, "device": "cpu", **training},
    )


@pytest.mark.parametrize("name", STRATEGIES)
def test_tokens_of_a_ragged_batch_weigh_the_same_wherever_they_are_computed(
    two: ProcessPool, name: str, tmp_path: Path
) -> None:
    whole = train_alone(tokens_job(), tmp_path / "whole")
    table = tokens_job(accumulate=2, returns="tuple" if name == "ddp" else "dict")
    together = train_together(two, {**table, "strategy": STRATEGIES[name]}, tmp_path / "together")[0]
    assert largest_difference(whole, together) <= 1e-5
    assert together.losses() == pytest.approx(whole.losses(), rel=1e-5)
    (measured,), (expected,) = together.of("evaluation"), whole.of("evaluation")
    assert measured["test_loss"] == pytest.approx(expected["test_loss"], rel=1e-5)
    assert measured["test_accuracy"] == expected["test_accuracy"]  # of the tokens that are predicted, shifted by one


def test_reproducible_on_any_number_of_workers(two: ProcessPool, tmp_path: Path) -> None:
    table = tokens_job(reproducible=True, accumulate=2)
    table["model"]["dropout"] = 0.2
    alone = train_alone(table, tmp_path / "alone").summary
    together = train_together(two, table, tmp_path / "together")[0].summary
    assert together.weights_sha256 == alone.weights_sha256
    assert together.test_loss == alone.test_loss


@pytest.mark.parametrize("kind", ["tuple", "dict", "dataclass", "nested"])
def test_two_inputs_and_a_loss_of_all_outputs(two: ProcessPool, kind: str, tmp_path: Path) -> None:
    whole = train_alone(pairs_job(kind), tmp_path / "whole")
    strategy = STRATEGIES["sharded" if kind == "nested" else "flat"]
    together = train_together(two, {**pairs_job(kind, accumulate=2), "strategy": strategy}, tmp_path / "together")[0]
    assert largest_difference(whole, together) <= 1e-5
    assert together.summary.test_accuracy == whole.summary.test_accuracy
    assert whole.summary.test_accuracy is not None


@pytest.mark.parametrize("reproducible", [False, True])
def test_parameter_server(reproducible: bool, tmp_path: Path) -> None:
    table = tokens_job(reproducible=reproducible)
    table["data"]["processes"] = 0 if reproducible else 1
    runs = [
        launch(Job.from_dict({**table, "strategy": strategy}), run_dir=tmp_path / str(number), quiet=True).summary
        for number, strategy in enumerate([{"name": "single"}, {"name": "parameter_server", "workers": 2}])
    ]
    assert runs[1].train_loss == pytest.approx(runs[0].train_loss, rel=1e-5)
    assert runs[1].test_loss == pytest.approx(runs[0].test_loss, rel=1e-5)
    if reproducible:
        assert runs[1].weights_sha256 == runs[0].weights_sha256


@pytest.mark.parametrize("strategy", [{"name": "pipeline", "microbatches": 3}, {"name": "tensor"}])
def test_what_splits_a_model_says_what_it_needs(two: ProcessPool, strategy: Table, tmp_path: Path) -> None:
    expected = r"needs a batch of one tensor of inputs and one of targets; the inputs of this data are a dict of 'left'"
    with pytest.raises(CaseError, match=expected):
        train_together(two, {**pairs_job("dict"), "strategy": strategy}, tmp_path)
