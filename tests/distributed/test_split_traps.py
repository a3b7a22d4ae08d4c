"""What is hard on strategies that split a model: frozen layers, bf16, streams of samples, being told to stop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from driving import StopAt, Table, job, largest_difference, train_alone, train_together
from process_pool import CaseError, ProcessPool
from splitting import JOBS, References, check_equal

pytestmark = pytest.mark.timeout(150)

STRATEGIES: dict[str, Table] = {
    "pipeline": {"name": "pipeline", "microbatches": 4},
    "sharded": {"name": "sharded", "unit_bytes": 1000},
    "tensor": {"name": "tensor"},
}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("name", STRATEGIES)
def test_frozen_layers(two: ProcessPool, name: str, references: References, tmp_path: Path) -> None:
    table = job(model={"use": "networks:partly_frozen"}, optimizer={"use": "sgd", "lr": 0.1, "momentum": 0.9})
    check_equal(two, table, STRATEGIES[name], references(table), tmp_path)


def test_a_stage_without_anything_to_train(two: ProcessPool, references: References, tmp_path: Path) -> None:
    table = job(model={"use": "networks:partly_frozen"}, training={"clip_norm": 0.5})
    strategy = {"name": "pipeline", "placement": [["0", "1"], ["2", "3", "4"]], "microbatches": 4}
    check_equal(two, table, strategy, references(table), tmp_path)


def test_a_micro_batch_too_small_for_a_batch_norm(two: ProcessPool, tmp_path: Path) -> None:
    """The last batch has two samples, a micro-batch each. torch's own message does not say what the layer raised."""
    table = job(model={"use": "networks:flat_with_norm"}, data={"size": 18}, training={"batch_size": 16, "steps": 2})
    expected = (
        r"step 2 raised ValueError: Expected more than 1 value per channel .*: a batch norm cannot train on a single"
    )
    with pytest.raises(CaseError, match=expected):
        train_together(two, {**table, "strategy": STRATEGIES["pipeline"]}, tmp_path)


@pytest.mark.parametrize("name", ["pipeline", "tensor"])
def test_bf16(two: ProcessPool, name: str, tmp_path: Path) -> None:
    table = {**JOBS["gpt"], "training": {**JOBS["gpt"]["training"], "precision": "bf16", "steps": 5}}
    alone = train_alone(table, tmp_path / "a")
    together = train_together(two, {**table, "strategy": STRATEGIES[name]}, tmp_path / "b")
    np.testing.assert_allclose(together[0].losses(), alone.losses(), rtol=5e-3)


@pytest.mark.parametrize("name", STRATEGIES)
def test_stopped_and_resumed(two: ProcessPool, name: str, tmp_path: Path) -> None:
    table = job(training={"steps": 12}, optimizer={"use": "sgd", "lr": 0.1, "momentum": 0.9})
    alone = train_alone(table, tmp_path / "a")
    split = {**table, "strategy": STRATEGIES[name]}
    stopped = train_together(two, split, tmp_path / "b", stop_at=StopAt(1, 5))
    assert {(one.summary.status, one.summary.steps) for one in stopped} == {("interrupted", 5)}
    resumed = train_together(two, split, tmp_path / "b", resume=True)
    assert largest_difference(alone, resumed[0]) <= 1e-5


def test_a_stream_of_samples(two: ProcessPool, references: References, tmp_path: Path) -> None:
    table = job(data={"use": "networks:Stream"}, training={"batch_size": 8, "steps": 50})
    table["evaluation"] = {"every_epochs": 0}
    alone = references(table)
    for name in ("pipeline", "sharded"):
        together = train_together(two, {**table, "strategy": STRATEGIES[name]}, tmp_path / name)
        assert largest_difference(alone, together[0]) <= 1e-5


@pytest.mark.parametrize("name", ["sharded", "tensor", "data_parallel"])
def test_a_sample_that_is_not_finite_is_named_with_its_worker(two: ProcessPool, name: str, tmp_path: Path) -> None:
    table = job(data={"use": "odd_data:Unsound"}, model={"use": "mlp", "hidden": [16]}, training={"steps": 10})
    with pytest.raises(CaseError, match=r"The input of sample 23 of the training set, which worker \d computed"):
        train_together(two, {**table, "strategy": {"name": name}}, tmp_path)


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_optimizer_of_ones_own_makes_groups_by_name(
    two: ProcessPool, name: str, references: References, tmp_path: Path
) -> None:
    optimizer = {"use": "odd_data:by_name", "lr": 0.01}
    table = job(optimizer=optimizer, training={"steps": 12}, model={"use": "mlp", "hidden": [32, 16]})
    together = train_together(two, {**table, "strategy": STRATEGIES[name]}, tmp_path)
    assert largest_difference(references(table), together[0]) <= 2e-5


@pytest.mark.parametrize("name", ["pipeline", "tensor"])
def test_the_rate_that_is_reported_is_that_of_the_first_group(
    two: ProcessPool, name: str, references: References, tmp_path: Path
) -> None:
    """Also by a worker that holds nothing of this group."""
    table = job(optimizer={"use": "networks:grouped_sgd", "lr": 0.1}, training={"steps": 2})
    alone = references(table)
    together = train_together(two, {**table, "strategy": STRATEGIES[name]}, tmp_path)
    rates = [[event["lr"] for event in outcome.of("step")] for outcome in (alone, together[0])]
    assert rates[0] == rates[1] and rates[0]


ZERO_BUBBLE = {"name": "pipeline", "schedule": "zero-bubble", "microbatches": 4}


def test_zero_bubble_trains_a_stage_whose_output_is_a_view(
    two: ProcessPool, references: References, tmp_path: Path
) -> None:
    table = job(model={"use": "networks:rows_of_rows"})
    check_equal(two, table, {**ZERO_BUBBLE, "placement": [["0", "1", "2"], ["3", "4"]]}, references(table), tmp_path)


def test_zero_bubble_refuses_a_stage_before_which_nothing_is_trained(two: ProcessPool, tmp_path: Path) -> None:
    """torch would not train its first layer, without a warning."""
    table = job(model={"use": "networks:partly_frozen"})
    strategy = {**ZERO_BUBBLE, "placement": [["0", "1"], ["2", "3", "4"]]}
    with pytest.raises(
        CaseError, match=r"cannot train stage 1, before which nothing is trained: set strategy.schedule"
    ):
        train_together(two, {**table, "strategy": strategy}, tmp_path)
