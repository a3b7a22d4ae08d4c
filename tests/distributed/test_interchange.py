"""Checkpoints of one strategy are those of any other: another continues what one began, optimizer state included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from driving import Outcome, Table, job, largest_difference, train_alone, train_together
from process_pool import ProcessPool
from splitting import TOKENS

pytestmark = pytest.mark.timeout(150)

LARGEST_DIFFERENCE = 1e-5
JOB = job(
    # Deep enough for four stages; the output layer's weight is the embedding's.
    model={"use": "gpt", "num_layers": 2, "embedding_width": 32},
    data={**TOKENS, "size": 90},
    # Adam without a large eps takes full steps along gradients that are nothing but rounding.
    optimizer={"use": "adam", "lr": 0.003, "eps": 1e-3},
    schedule={"use": "cosine", "warmup_steps": 3},
    # Training continues after the whole model was put together.
    checkpoint={"every_steps": 2},
    evaluation={"every_steps": 3},
)
STRATEGIES: dict[str, Table] = {
    "single": {"name": "single"},
    "data_parallel": {"name": "data_parallel"},
    "sharded": {"name": "sharded", "unit_bytes": 10_000},
    "pipeline": {"name": "pipeline", "microbatches": 4},
    "tensor": {"name": "tensor"},
}
SPLIT = [name for name in STRATEGIES if name not in ("single", "data_parallel")]
MESHES: dict[str, Table] = {
    "pipeline": {"data": 2, "pipeline": 2},
    "sharded": {"data": 2, "sharded": 2},
    "tensor": {"data": 2, "tensor": 2},
    "pipeline of slices": {"pipeline": 2, "tensor": 2},
    "sharded slices": {"sharded": 2, "tensor": 2},
    "sharded pipeline": {"pipeline": 2, "sharded": 2},
}
NEXT_MESH = dict(zip(MESHES, [*list(MESHES)[1:], "pipeline"]))
PAIRS = [pair for name in SPLIT for pair in ((name, "single"), (name, "data_parallel"), ("data_parallel", name))]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return train_alone({**JOB, "training": {**JOB["training"], "steps": 10}}, tmp_path_factory.mktemp("whole"))


def go(pool: ProcessPool, strategy: str | Table, steps: int, run_dir: Path, **options: Any) -> Outcome:
    # The rates of a cosine follow the number of steps, which resuming must not change: so the first half is stopped.
    training = {**JOB["training"], "steps": 10}
    table = {**JOB, "training": training, "stop": {"steps": steps}, "strategy": strategy}
    if isinstance(strategy, str):
        table["strategy"] = STRATEGIES[strategy]
    if strategy == "single":
        return train_alone(table, run_dir, **options)
    return train_together(pool, table, run_dir, **options)[0]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_another_strategy_goes_on(
    two: ProcessPool, first: str, second: str, uninterrupted: Outcome, tmp_path: Path
) -> None:
    go(two, first, 5, tmp_path)
    after = go(two, second, 10, tmp_path, resume=True)
    assert (after.summary.steps, after.of("run_started")[0]["start_step"]) == (10, 5)
    assert largest_difference(uninterrupted, after) <= LARGEST_DIFFERENCE


@pytest.mark.parametrize("name", SPLIT)
def test_a_run_that_had_ended_is_still_there(two: ProcessPool, name: str, tmp_path: Path) -> None:
    ended = go(two, name, 5, tmp_path)
    again = go(two, name, 5, tmp_path, resume=True)
    assert again.summary.weights_sha256 == ended.summary.weights_sha256


@pytest.mark.parametrize("first", MESHES)
def test_a_mesh_goes_on_from_another(four: ProcessPool, first: str, uninterrupted: Outcome, tmp_path: Path) -> None:
    go(four, {"name": "hybrid", "mesh": MESHES[first]}, 3, tmp_path)
    go(four, {"name": "hybrid", "mesh": MESHES[NEXT_MESH[first]]}, 7, tmp_path, resume=True)
    after = go(four, "single", 10, tmp_path, resume=True)
    assert largest_difference(uninterrupted, after) <= LARGEST_DIFFERENCE
