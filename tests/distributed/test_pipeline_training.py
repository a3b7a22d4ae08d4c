"""`pipeline` computes what `single` computes, with any schedule and however the batch divides.

Batch norms see one micro-batch at a time: a pipeline of m micro-batches equals one worker with training.accumulate = m.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from driving import Table, job, train_together
from process_pool import ProcessPool
from splitting import JOBS, References, check_equal

pytestmark = pytest.mark.timeout(150)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("alone"))


CASES: dict[str, tuple[str, Table]] = {
    "mlp": ("mlp", {"schedule": "gpipe", "microbatches": 5}),
    "mlp, momentum and clipping": ("mlp, momentum and clipping", {}),
    "lenet": ("lenet", {"schedule": "1f1b", "recompute": True}),
    "lenet, interleaved": ("lenet", {"schedule": "interleaved", "microbatches": 4}),
    "lenet, zero-bubble": ("lenet", {"schedule": "zero-bubble", "microbatches": 4}),
    "gpt": ("gpt", {"schedule": "1f1b", "microbatches": 4}),
    "gpt, interleaved": ("gpt", {"schedule": "interleaved", "microbatches": 4}),
    "gpt, zero-bubble": ("gpt", {"schedule": "zero-bubble", "microbatches": 4}),
}


@pytest.mark.parametrize("case", CASES)
def test_two_workers_equal_one(two: ProcessPool, case: str, references: References, tmp_path: Path) -> None:
    name, settings = CASES[case]
    check_equal(two, JOBS[name], {"name": "pipeline", **settings}, references(JOBS[name]), tmp_path)


@pytest.mark.parametrize("recompute", [False, True])
def test_batch_norms_see_one_micro_batch_at_a_time(
    two: ProcessPool, recompute: bool, references: References, tmp_path: Path
) -> None:
    table = JOBS["resnet20"]
    accumulating = {**table, "training": {**table["training"], "accumulate": 4}}
    strategy = {"name": "pipeline", "microbatches": 4, "recompute": recompute}
    check_equal(two, table, strategy, references(accumulating), tmp_path)


@pytest.mark.parametrize("recompute", [False, True])
def test_buffers_that_modules_follow_means_with(
    two: ProcessPool, recompute: bool, references: References, tmp_path: Path
) -> None:
    """Micro-batches are followed one by one, as accumulated parts are, and once where they are computed twice."""
    table = job(model={"use": "networks:WithMeans"}, data={"size": 96})
    accumulating = {**table, "training": {**table["training"], "accumulate": 4}}
    strategy = {"name": "pipeline", "microbatches": 4, "recompute": recompute}
    check_equal(two, table, strategy, references(accumulating), tmp_path)


def test_three_workers_and_blocks_placed_by_hand(three: ProcessPool, references: References, tmp_path: Path) -> None:
    placement = [["conv1", "conv2.0"], ["conv2.[12]", "flatten"], ["linear*", "classifier"]]
    strategy = {"name": "pipeline", "placement": placement, "microbatches": 3}
    check_equal(three, JOBS["lenet"], strategy, references(JOBS["lenet"]), tmp_path)


def test_a_traced_model_with_a_shared_weight(two: ProcessPool, references: References, tmp_path: Path) -> None:
    table = job(model={"use": "networks:Skipping"}, data={"size": 97})
    check_equal(two, table, {"name": "pipeline", "microbatches": 3}, references(table), tmp_path)


def test_dropout_repeats(two: ProcessPool, tmp_path: Path) -> None:
    model = {"use": "mlp", "hidden": [32, 32], "dropout": 0.5}
    table = job(model=model, training={"steps": 20}, optimizer={"use": "sgd", "lr": 0.1})
    placement = [["flatten", "linear1", "activation1", "dropout1"], ["linear2", "*2", "classifier"]]
    hashes = []
    for recompute in (False, False, True):
        strategy = {"name": "pipeline", "placement": placement, "microbatches": 4, "recompute": recompute}
        run = train_together(two, {**table, "strategy": strategy}, tmp_path / str(len(hashes)))
        hashes.append(run[0].summary.weights_sha256)
    assert hashes[0] == hashes[1] == hashes[2], "the same draws each time, and when computed again"
