"""`training.reproducible`: the same bits whoever computes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driving import Outcome, Table, job, train_alone, train_together
from process_pool import ProcessPool

pytestmark = pytest.mark.timeout(150)

REPRODUCIBLE = {"reproducible": True, "steps": 8, "batch_size": 24}
IMAGES = {"use": "synthetic", "shape": [3, 8, 8], "num_classes": 10, "size": 58, "test_size": 21}
JOBS: dict[str, Table] = {
    # 97 = 4 · 24 + 1: all shards but one are empty in the last step of an epoch.
    "mlp, sgd": job(data={"size": 97}, training=REPRODUCIBLE, optimizer={"use": "sgd", "lr": 0.1, "momentum": 0.9}),
    "lenet, adam, clipped": job(
        model={"use": "lenet"},
        data={"use": "synthetic", "shape": [1, 28, 28], "num_classes": 10, "size": 66, "test_size": 23},
        optimizer={"use": "adam", "lr": 0.002},
        training={**REPRODUCIBLE, "clip_norm": 0.5},
    ),
    "resnet, augmented": job(
        model={"use": "resnet", "depth": 20},
        data={**IMAGES, "augment": ["crop", "flip"]},
        optimizer={"use": "sgd", "lr": 0.1, "momentum": 0.9},
        training={**REPRODUCIBLE, "accumulate": 2},
    ),
    "gpt with dropout, adam": job(
        model={"use": "gpt", "num_layers": 2, "embedding_width": 32, "dropout": 0.2},
        data={"use": "synthetic", "kind": "tokens", "shape": [16], "num_classes": 30, "size": 97, "test_size": 21},
        optimizer={"use": "adam", "lr": 0.003},
        loss={"use": "cross_entropy", "ignore_index": 3},
        training={**REPRODUCIBLE, "shards": 6},
    ),
    # Rows and weights that begin at every alignment, at which kernels add in other orders.
    "odd widths": job(
        model={"use": "mlp", "hidden": [7, 9]},
        data={"use": "synthetic", "shape": [5], "num_classes": 3, "size": 97, "test_size": 21},
        optimizer={"use": "adam", "lr": 0.01},
        training={**REPRODUCIBLE, "accumulate": 2},
    ),
    "buffers of all kinds": job(
        model={"use": "networks:Normed"}, data=IMAGES, optimizer={"use": "adam", "lr": 0.01}, training=REPRODUCIBLE
    ),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    known: dict[str, Outcome] = {}

    def reference(name: str) -> Outcome:
        if name not in known:
            known[name] = train_alone(JOBS[name], tmp_path_factory.mktemp("alone"))
        return known[name]

    return reference


@pytest.fixture(scope="module")
def six() -> Iterator[ProcessPool]:
    pool = ProcessPool(6)
    pool.start()
    yield pool
    pool.close()


def check(pool: ProcessPool, name: str, reference: Outcome, run_dir: Path) -> None:
    together = train_together(pool, JOBS[name], run_dir)[0]
    assert together.losses().tolist() == reference.losses().tolist()
    assert together.summary.weights_sha256 == reference.summary.weights_sha256
    measured, expected = together.of("evaluation"), reference.of("evaluation")
    for key in ("test_loss", "test_accuracy", "train_loss"):
        assert [e[key] for e in measured] == [e[key] for e in expected], key


@pytest.mark.parametrize("name", JOBS)
def test_two_workers_give_the_bits_of_one(two: ProcessPool, name: str, alone: Any, tmp_path: Path) -> None:
    check(two, name, alone(name), tmp_path)


@pytest.mark.parametrize("name", JOBS)
def test_three_workers_give_the_bits_of_one(three: ProcessPool, name: str, alone: Any, tmp_path: Path) -> None:
    check(three, name, alone(name), tmp_path)


@pytest.mark.parametrize("name", ["resnet, augmented", "gpt with dropout, adam"])
def test_four_workers_give_the_bits_of_one(four: ProcessPool, name: str, alone: Any, tmp_path: Path) -> None:
    check(four, name, alone(name), tmp_path)


@pytest.mark.parametrize("name", ["lenet, adam, clipped", "gpt with dropout, adam"])
def test_six_workers_give_the_bits_of_one(six: ProcessPool, name: str, alone: Any, tmp_path: Path) -> None:
    check(six, name, alone(name), tmp_path)


def test_the_seed_and_the_shards_do_matter(alone: Any, tmp_path: Path) -> None:
    """Equal hashes above mean something: these differ."""
    name = "gpt with dropout, adam"
    table = JOBS[name]
    hashes = {alone(name).summary.weights_sha256}
    hashes.add(train_alone({**table, "seed": 1}, tmp_path / "a").summary.weights_sha256)
    cut = {**table, "training": {**table["training"], "shards": 7}}
    hashes.add(train_alone(cut, tmp_path / "b").summary.weights_sha256)
    assert len(hashes) == 3


def test_running_statistics_are_the_mean_over_the_shards(tmp_path: Path) -> None:
    """One step of batch norms: the mean over shards of what each alone would have kept; constants stay."""
    table = job(
        model={"use": "networks:Normed"}, data=IMAGES, training={**REPRODUCIBLE, "steps": 1}, optimizer={"use": "sgd"}
    )
    weights = train_alone(table, tmp_path).weights
    assert weights["num_calls"] == 1 and weights["norm.num_batches_tracked"] == 1
    assert weights["mask"].tolist() == [float(np.float32(0.1)), float("-inf")]
    assert 0.9 < weights["norm.running_var"].mean() < 1.0 and abs(weights["norm.running_mean"]).max() < 0.2


def test_resuming_on_another_number_of_workers(two: ProcessPool, three: ProcessPool, tmp_path: Path) -> None:
    table = JOBS["resnet, augmented"]
    whole = train_alone(table, tmp_path / "whole")
    half = {**table, "stop": {"steps": 4}}
    train_together(three, half, tmp_path / "run")
    resumed = train_together(two, table, tmp_path / "run", resume=True)[0]
    assert resumed.summary.weights_sha256 == whole.summary.weights_sha256


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ({"batch_norm": "sync"}, "strategy.batch_norm = 'sync' depends on the number of workers"),
        ({"reducer": "ddp"}, "strategy.reducer = 'ddp' depends"),
        ({"compression": "fp16"}, "strategy.compression = 'fp16' depends"),
        ({"workers": 9}, "training.shards = 8 has no shard for each of 9 workers: set shards to at least 9"),
    ],
)
def test_what_depends_on_the_number_of_workers_is_refused(strategy: Table, message: str) -> None:
    from cordee.cluster import Team
    from cordee.core import Job
    from cordee.core.errors import JobError
    from cordee.training.components import assemble

    table = job(training=REPRODUCIBLE, strategy={"name": "data_parallel", "workers": 2, **strategy})
    with pytest.raises(JobError, match=message):
        assemble(Job.from_dict(table), Team(num_workers=table["strategy"]["workers"]))
