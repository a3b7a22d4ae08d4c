"""Every model with every optimizer on 2, 3, 4 and 8 workers: the bits of one. test_reproducible has a part of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from driving import Table, job, train_alone, train_together
from process_pool import ProcessPool

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

TRAINING = {"reproducible": True, "steps": 6, "batch_size": 24}
IMAGES = {"use": "synthetic", "num_classes": 10, "size": 58, "test_size": 21}
PARTS: dict[str, Table] = {
    "mlp": {"model": {"use": "mlp", "hidden": [33], "dropout": 0.2}, "data": {"size": 97}},
    "lenet": {"model": {"use": "lenet"}, "data": {**IMAGES, "shape": [1, 28, 28]}},
    "resnet20": {"model": {"use": "resnet", "depth": 20}, "data": {**IMAGES, "shape": [3, 8, 8]}},
    "gpt": {
        "model": {"use": "gpt", "num_layers": 2, "embedding_width": 32, "dropout": 0.2},
        "data": {"use": "synthetic", "kind": "tokens", "shape": [16], "num_classes": 30, "size": 97, "test_size": 21},
    },
}
OPTIMIZERS = {"sgd": {"use": "sgd", "lr": 0.05, "momentum": 0.9}, "adam": {"use": "adam", "lr": 0.003}}


@pytest.fixture(scope="module")
def eight() -> Iterator[ProcessPool]:
    pool = ProcessPool(8)
    pool.start()
    yield pool
    pool.close()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", PARTS)
def test_any_number_of_workers_gives_the_bits_of_one(
    two: ProcessPool,
    three: ProcessPool,
    four: ProcessPool,
    eight: ProcessPool,
    model: str,
    optimizer: str,
    tmp_path: Path,
) -> None:
    table: dict[str, Any] = job(**PARTS[model], optimizer=OPTIMIZERS[optimizer], training=TRAINING)
    alone = train_alone(table, tmp_path / "alone")
    for pool in (two, three, four, eight):
        together = train_together(pool, table, tmp_path / str(pool.size))[0]
        assert together.summary.weights_sha256 == alone.summary.weights_sha256, pool.size
        assert together.losses().tolist() == alone.losses().tolist(), pool.size
