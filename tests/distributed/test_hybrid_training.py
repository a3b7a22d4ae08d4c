"""A mesh of data parallelism and one way to split a model computes what `single` computes."""

from __future__ import annotations

from pathlib import Path

import pytest
from crew import Crew
from driving import Table
from splitting import JOBS, References, check_equal

pytestmark = [pytest.mark.long, pytest.mark.timeout(150)]

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
}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("case", CASES)
def test_four_workers_equal_one(four: Crew, case: str, references: References, tmp_path: Path) -> None:
    name, settings = CASES[case]
    check_equal(four, JOBS[name], {"name": "hybrid", **settings}, references(JOBS[name]), tmp_path)
