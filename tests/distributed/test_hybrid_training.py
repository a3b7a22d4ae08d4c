"""A mesh of data parallelism and of ways to split a model computes what `single` computes."""

from __future__ import annotations

from pathlib import Path

import pytest
from driving import Table, job, largest_difference, train_together
from process_pool import ProcessPool
from splitting import JOBS, TOKENS, References, check_equal

pytestmark = pytest.mark.timeout(150)

# Batches of 97 = 3 · 32 + 1 samples: a whole copy of the model has nothing to do in the last step of an epoch.
CASES: dict[str, tuple[str, Table]] = {
    "mlp, pipeline": ("mlp", {"mesh": {"data": 2, "pipeline": 2}, "microbatches": 3}),
    "mlp, tensor": ("mlp", {"mesh": {"data": 2, "tensor": 2}}),
    "mlp, sharded": ("mlp", {"mesh": {"data": 2, "sharded": 2}, "unit_bytes": 1000}),
    "clipping, pipeline": ("mlp, momentum and clipping", {"mesh": {"data": 2, "pipeline": 2}}),
    "clipping, tensor": ("mlp, momentum and clipping", {"mesh": {"data": 2, "tensor": 2}}),
    "clipping, sharded": ("mlp, momentum and clipping", {"mesh": {"data": 2, "sharded": 2}, "unit_bytes": 1}),
    "gpt, pipeline": ("gpt", {"mesh": {"data": 2, "pipeline": 2}, "schedule": "interleaved", "microbatches": 2}),
    "gpt, tensor": ("gpt", {"mesh": {"data": 2, "tensor": 2}}),
    "lenet, sharded": ("lenet", {"mesh": {"data": 2, "sharded": 2}}),
    "mlp, pipeline of slices": ("mlp", {"mesh": {"data": 1, "pipeline": 2, "tensor": 2}, "microbatches": 3}),
    "clipping, pipeline of slices": ("mlp, momentum and clipping", {"mesh": {"pipeline": 2, "tensor": 2}}),
    "gpt, pipeline of slices": ("gpt", {"mesh": {"pipeline": 2, "tensor": 2}, "recompute": True}),
    "mlp, sharded slices": ("mlp", {"mesh": {"sharded": 2, "tensor": 2}, "unit_bytes": 1000}),
    "clipping, sharded slices": ("mlp, momentum and clipping", {"mesh": {"sharded": 2, "tensor": 2}}),
    "gpt, sharded slices": ("gpt", {"mesh": {"sharded": 2, "tensor": 2}, "unit_bytes": 1000}),
    "mlp, sharded pipeline": ("mlp", {"mesh": {"pipeline": 2, "sharded": 2}, "schedule": "interleaved"}),
    "clipping, sharded pipeline": ("mlp, momentum and clipping", {"mesh": {"pipeline": 2, "sharded": 2}}),
    "gpt, sharded pipeline": ("gpt", {"mesh": {"pipeline": 2, "sharded": 2}, "schedule": "zero-bubble"}),
}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("alone"))


IN_SHORT = "mlp, pipeline of slices"


@pytest.mark.parametrize(
    "case", [case if case == IN_SHORT else pytest.param(case, marks=pytest.mark.long) for case in CASES]
)
def test_four_workers_equal_one(four: ProcessPool, case: str, references: References, tmp_path: Path) -> None:
    name, settings = CASES[case]
    check_equal(four, JOBS[name], {"name": "hybrid", **settings}, references(JOBS[name]), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("model", ["Skipping", "partly_frozen"])
def test_a_sharded_pipeline_of_ones_own_model(
    four: ProcessPool, model: str, references: References, tmp_path: Path
) -> None:
    """With weight decay: what has no gradient is left alone, and a copy without samples waits."""
    table = job(
        model={"use": f"networks:{model}"},
        data={"size": 70},
        optimizer={"use": "sgd", "lr": 0.05, "weight_decay": 0.01},
    )
    strategy = {"name": "hybrid", "mesh": {"pipeline": 2, "sharded": 2}}
    check_equal(four, table, strategy, references(table), tmp_path)


@pytest.mark.long
def test_slices_that_are_recomputed_draw_the_same_masks(four: ProcessPool, tmp_path: Path) -> None:
    table = job(
        model={"use": "gpt", "num_layers": 2, "embedding_width": 32, "dropout": 0.2},
        data=TOKENS,
        training={"steps": 6},
    )
    placement = [["embedding", "layer1"], ["layer2", "output"]]  # a measured cut may come out differently
    strategy = {"name": "hybrid", "mesh": {"pipeline": 2, "tensor": 2}, "microbatches": 2, "placement": placement}
    kept, again = (
        train_together(four, {**table, "strategy": {**strategy, "recompute": flag}}, tmp_path / str(flag))[0]
        for flag in (False, True)
    )
    assert largest_difference(kept, again) == 0.0


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "strategy",
    [
        {"mesh": {"data": 2, "pipeline": 2, "tensor": 2}, "microbatches": 2},
        {"mesh": {"data": 2, "sharded": 2, "tensor": 2}},
    ],
    ids=["pipeline", "sharded"],
)
def test_eight_workers_on_three_axes(
    eight: ProcessPool, strategy: Table, references: References, tmp_path: Path
) -> None:
    check_equal(eight, JOBS["gpt"], {"name": "hybrid", **strategy}, references(JOBS["gpt"]), tmp_path)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("other", ["data", "tensor"])
def test_eight_workers_with_a_sharded_pipeline(
    eight: ProcessPool, other: str, references: References, tmp_path: Path
) -> None:
    strategy = {"name": "hybrid", "mesh": {other: 2, "sharded": 2, "pipeline": 2}}
    name = "mlp, momentum and clipping"
    check_equal(eight, JOBS[name], strategy, references(JOBS[name]), tmp_path)
