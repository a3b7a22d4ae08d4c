"""`sharded` computes what `single` computes, whatever is gathered together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from driving import Table, job, train, train_alone, train_together
from process_pool import CaseError, ProcessPool
from splitting import JOBS, SMALL_IMAGES, References, check_equal
from torch import Tensor

from cordee.checkpoint import load_newest, weights_sha256
from cordee.strategies.slices import SlicedParameter

pytestmark = pytest.mark.timeout(150)

SETTINGS: dict[str, Table] = {
    "mlp": {"unit_bytes": 1},
    "mlp, momentum and clipping": {"unit_bytes": 1000, "keep_gathered": True},
    "lenet": {"unit_bytes": 10_000},
    "resnet20": {"unit_bytes": 50_000, "batch_norm": "sync"},
    "gpt": {"unit_bytes": 10_000},
}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("name", JOBS)
def test_two_workers_equal_one(two: ProcessPool, name: str, references: References, tmp_path: Path) -> None:
    strategy = {"name": "sharded", **SETTINGS[name]}
    check_equal(two, JOBS[name], strategy, references(JOBS[name]), tmp_path)


@pytest.mark.parametrize("name", ["mlp", "lenet", "gpt"])
def test_three_workers_equal_one(three: ProcessPool, name: str, references: References, tmp_path: Path) -> None:
    check_equal(three, JOBS[name], {"name": "sharded"}, references(JOBS[name]), tmp_path)


def test_bf16_gathers_in_16_bits_and_keeps_32(two: ProcessPool, tmp_path: Path) -> None:
    table = {**JOBS["gpt"], "training": {**JOBS["gpt"]["training"], "precision": "bf16", "steps": 10}}
    alone = train_alone(table, tmp_path / "a")
    together = train_together(two, {**table, "strategy": {"name": "sharded", "unit_bytes": 10_000}}, tmp_path / "b")
    # 8 bits of precision: the losses follow each other, but are not the same.
    np.testing.assert_allclose(together[0].losses(), alone.losses(), rtol=5e-3)
    table["training"]["precision"] = "fp32"
    full = train_alone(table, tmp_path / "c")
    assert not np.allclose(together[0].losses(), full.losses(), rtol=1e-6, atol=0), "it computed in 32 bits"
    loaded = load_newest(tmp_path / "b" / "checkpoints")
    assert loaded is not None
    assert {tensor.dtype for tensor in loaded.state.tensors.values()} == {torch.float32}


def test_batch_norms_in_bf16(two: ProcessPool, tmp_path: Path) -> None:
    training = {"batch_size": 16, "steps": 5, "precision": "bf16"}
    table = job(model={"use": "resnet", "depth": 20}, data=SMALL_IMAGES, training=training)
    alone = train_alone(table, tmp_path / "a")
    for batch_norm in ("sync", "average"):
        strategy = {"name": "sharded", "unit_bytes": 50_000, "batch_norm": batch_norm}
        together = train_together(two, {**table, "strategy": strategy}, tmp_path / batch_norm)
        np.testing.assert_allclose(together[0].losses(), alone.losses(), rtol=0.2)


REPEATED = {"use": "networks:Repeated", "reentrant": True}


def test_a_unit_used_twice_under_reentrant_checkpointing_is_refused(two: ProcessPool, tmp_path: Path) -> None:
    """FSDP2 would sum the gradient of one use only: weights were 50 % off after 18 steps of Adam."""
    table = job(model=REPEATED, training={"steps": 2})
    with pytest.raises(CaseError, match=r"'shared' is used 2 times .* strategy.unit_bytes above the 1,088 bytes"):
        train_together(two, {**table, "strategy": {"name": "sharded", "unit_bytes": 1}}, tmp_path)


@pytest.mark.parametrize(("reentrant", "unit_bytes"), [(True, 1 << 20), (False, 1)])
def test_what_the_refusal_advises(
    two: ProcessPool, reentrant: bool, unit_bytes: int, references: References, tmp_path: Path
) -> None:
    table = job(model={**REPEATED, "reentrant": reentrant}, data={"size": 97})
    check_equal(two, table, {"name": "sharded", "unit_bytes": unit_bytes}, references(table), tmp_path)


def test_bf16_with_a_unit_that_no_pass_uses(two: ProcessPool, tmp_path: Path) -> None:
    """torch looks at the whole parameters of all units after a micro-batch, of this one as well."""
    table = job(model={"use": "networks:Spare"}, training={"steps": 2, "accumulate": 2, "precision": "bf16"})
    outcomes = train_together(two, {**table, "strategy": {"name": "sharded", "unit_bytes": 1}}, tmp_path)
    assert len(outcomes[0].losses()) == 2


def test_a_checkpoint_has_the_slices_of_all(three: ProcessPool, tmp_path: Path) -> None:
    """Layers of 32, 16 and 5 rows on three workers, and an optimizer with state: nothing is divided evenly."""
    table = job(
        model={"use": "mlp", "hidden": [32, 16]},
        optimizer={"use": "adam", "lr": 0.003},
        training={"steps": 6},
        checkpoint={"every_steps": 4},
    )
    together = train_together(three, {**table, "strategy": {"name": "sharded", "unit_bytes": 1}}, tmp_path)
    loaded = load_newest(tmp_path / "checkpoints")
    assert loaded is not None and loaded.step == 6 and not loaded.damaged
    saved = loaded.state.part("model").tensors
    assert weights_sha256(saved) == together[0].summary.weights_sha256
    assert {outcome.summary.weights_sha256 for outcome in together} == {together[0].summary.weights_sha256}
    for name, value in together[0].weights.items():
        assert np.array_equal(saved[name].double().numpy(), value), name
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-4", "step-6"]


def test_nobody_puts_anything_together_to_save(two: ProcessPool, tmp_path: Path) -> None:
    table = job(training={"steps": 4}, checkpoint={"every_steps": 2}, data={"test_size": 0}, optimizer={"use": "adam"})
    table["strategy"] = {"name": "sharded", "unit_bytes": 1}
    counts = two.run(count_put_together, table, str(tmp_path))
    # Each of the four parameters, at the end: for the hash of the weights, and because this test looks at them.
    assert counts == [8, 8]


def count_put_together(index: int, num_workers: int, table: Table, run_dir: str) -> int:
    """Return how many tensors this worker put together in a run."""
    gather, count = SlicedParameter.gather, 0

    def counted(self: SlicedParameter, local: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return gather(self, local)

    SlicedParameter.gather = counted  # type: ignore[method-assign]
    try:
        train(index, num_workers, table, run_dir)
    finally:
        SlicedParameter.gather = gather  # type: ignore[method-assign]
    return count
