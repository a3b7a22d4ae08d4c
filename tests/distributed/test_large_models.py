"""Models that no worker has as a whole: built in files, measured in parts, of the bits of one worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from driving import Outcome, Table, job, largest_difference, train, train_alone
from process_pool import ProcessPool
from splitting import JOBS, LARGEST_DIFFERENCE

from cordee.compute.devices import forget_peak, peak_bytes, release_unused
from cordee.core import file_memory
from cordee.core.file_memory import lies_in_file
from cordee.strategies.split import SplitModel, WholeModel
from cordee.training.session import Session

pytestmark = pytest.mark.timeout(300)

STRATEGIES: dict[str, Table] = {
    "sharded": {"name": "sharded", "unit_bytes": 1},
    "tensor": {"name": "tensor"},
    "pipeline": {"name": "pipeline"},
    "mesh": {"name": "hybrid", "mesh": {"data": 2}},
}


def in_files(index: int, num_workers: int, table: Table, run_dir: str, options: dict[str, Any]) -> Outcome:
    """Train with all tensors of the model in files while it is built."""
    kept = file_memory.SMALLEST_BYTES, file_memory.RECENT_BYTES
    file_memory.SMALLEST_BYTES = file_memory.RECENT_BYTES = 1
    try:
        return train(index, num_workers, table, run_dir, **options)
    finally:
        file_memory.SMALLEST_BYTES, file_memory.RECENT_BYTES = kept


def together(pool: ProcessPool, table: Table, run_dir: Path, **options: Any) -> list[Outcome]:
    run_dir.mkdir(parents=True, exist_ok=True)
    outcomes = pool.run(in_files, table, str(run_dir), options)
    assert len({outcome.summary.weights_sha256 for outcome in outcomes}) == 1
    return outcomes


@pytest.mark.parametrize("name", ["sharded", "tensor", "pipeline"])
@pytest.mark.parametrize("model", ["gpt", "odd"])
def test_all_begin_with_the_very_weights_of_one_worker(two: ProcessPool, tmp_path: Path, name: str, model: str) -> None:
    if model == "odd" and name != "sharded":
        pytest.skip("it is no chain, and its layers cannot be sliced")
    table = JOBS["gpt"] if model == "gpt" else job(model={"use": "networks:Odd"})
    table = {**table, "training": {**table["training"], "steps": 1}, "optimizer": {"use": "sgd", "lr": 0.0}}
    alone = train_alone(table, tmp_path / "alone")
    found = together(two, {**table, "strategy": STRATEGIES[name]}, tmp_path / "together")
    assert found[0].summary.weights_sha256 == alone.summary.weights_sha256
    assert found[0].of("evaluation")[0]["test_loss"] == pytest.approx(alone.of("evaluation")[0]["test_loss"], rel=1e-5)


@pytest.mark.parametrize("name", STRATEGIES)
def test_they_train_as_one_worker_does_and_continue(two: ProcessPool, tmp_path: Path, name: str) -> None:
    table = {**JOBS["gpt"], "checkpoint": {"every_steps": 5}}
    table["optimizer"] = {"use": "sgd", "lr": 0.01, "momentum": 0.9}
    table["training"] = {**table["training"], "steps": 12}
    strategy = STRATEGIES[name]
    if name == "mesh":
        strategy = {"name": "hybrid", "mesh": {"sharded": 2, "tensor": 1}}
    alone = train_alone(table, tmp_path / "alone")
    split = {**table, "strategy": strategy}
    whole = together(two, split, tmp_path / "whole")
    together(two, {**split, "stop": {"steps": 7}}, tmp_path / "parts")
    resumed = together(two, split, tmp_path / "parts", resume=True)
    assert resumed[0].summary.weights_sha256 == whole[0].summary.weights_sha256
    assert largest_difference(alone, resumed[0]) <= LARGEST_DIFFERENCE


@pytest.mark.parametrize("name", ["sharded", "tensor", "pipeline"])
def test_what_is_trained_does_not_lie_in_files(two: ProcessPool, tmp_path: Path, name: str) -> None:
    table = {**JOBS["gpt"], "strategy": STRATEGIES[name]}
    table["training"] = {**table["training"], "steps": 2}
    assert not any(two.run(find_in_files, table, str(tmp_path)))


def find_in_files(index: int, num_workers: int, table: Table, run_dir: str) -> list[str]:
    found: list[str] = []
    compute = SplitModel.forward_backward

    def watch(self: SplitModel, *arguments: Any, **options: Any) -> Any:
        result = compute(self, *arguments, **options)
        found.extend(one.name for one in self._held if lies_in_file(one.local))
        found.extend(name for name, buffer in self._working.named_buffers() if lies_in_file(buffer))
        assert len(list(self._held)), "it looks at nothing"
        return result

    SplitModel.forward_backward = watch  # type: ignore[method-assign]
    try:
        in_files(index, num_workers, table, run_dir, {})
    finally:
        SplitModel.forward_backward = compute  # type: ignore[method-assign]
    return found


def test_sharded_never_puts_the_whole_model_together(two: ProcessPool, tmp_path: Path) -> None:
    table = {**JOBS["gpt"], "strategy": STRATEGIES["sharded"], "checkpoint": {"every_steps": 4}}
    table["training"] = {**table["training"], "steps": 9, "ema": 0.9}
    table["evaluation"] = {"every_steps": 3, "batch_size": 10}
    alone = train_alone({**table, "strategy": {"name": "single"}}, tmp_path / "alone")
    (tmp_path / "run").mkdir()
    two.run(train_in_parts, {**table, "stop": {"steps": 6}}, str(tmp_path / "run"), False)
    measured = two.run(train_in_parts, table, str(tmp_path / "run"), True)[0]
    expected = [event["test_loss"] for event in alone.of("evaluation")]
    assert measured == pytest.approx(expected[-len(measured) :], rel=1e-4) and measured, (measured, expected)


def train_in_parts(index: int, num_workers: int, table: Table, run_dir: str, resume: bool) -> list[float]:
    restore, summarise = WholeModel.restore, Session.summarise
    has_ended = False

    def refuse(self: WholeModel) -> None:
        assert has_ended, "the whole model was put together"
        restore(self)

    def end(self: Session, error: BaseException | None) -> Any:
        nonlocal has_ended
        found = summarise(self, error)
        has_ended = True
        return found

    WholeModel.restore, Session.summarise = refuse, end  # type: ignore[method-assign]
    try:
        outcome = train(index, num_workers, table, run_dir, resume)
    finally:
        WholeModel.restore, Session.summarise = restore, summarise  # type: ignore[method-assign]
    return [event["test_loss"] for event in outcome.of("evaluation")]


LAYERS, WIDTH = 20, 1024
PARAMETER_BYTES = 4 * LAYERS * WIDTH * WIDTH  # 84 MB


def test_a_worker_takes_its_share_and_no_more(two: ProcessPool, tmp_path: Path) -> None:
    """At its peak, while the model is built, in steps, evaluations and while a checkpoint is saved."""
    table = job(
        model={"use": "mlp", "hidden": [WIDTH] * LAYERS},
        data={"use": "synthetic", "shape": [WIDTH], "num_classes": 5, "size": 16, "test_size": 8},
        optimizer={"use": "adam", "lr": 1e-4},
        training={"batch_size": 4, "steps": 4},
        checkpoint={"every_steps": 2},
        evaluation={"every_steps": 2, "batch_size": 4},
        strategy={"name": "sharded"},
    )
    two.run(
        take_memory, {**table, "model": {"use": "mlp"}}, "tiny", tmp_path
    )  # what torch imports when it is first used
    share = 4 * PARAMETER_BYTES / 2  # parameters, gradients and Adam's state, of two workers
    peaks = two.run(take_memory, table, "run", tmp_path)
    assert max(peaks) <= 1.25 * share, f"{max(peaks) / share:.2f} times the share"
    assert min(peaks) >= 0.9 * share, "it measures nothing"


def take_memory(index: int, num_workers: int, table: Table, name: str, folder: Path) -> int:
    """Return the most memory that training took, mapped files included."""
    run_dir = folder / name
    run_dir.mkdir(exist_ok=True)
    summarise = Session.summarise
    peak = 0

    def end(self: Session, error: BaseException | None) -> Any:
        nonlocal peak
        peak = peak_bytes()  # afterwards the test puts the weights together
        return summarise(self, error)

    Session.summarise = end  # type: ignore[method-assign]
    release_unused()
    forget_peak()
    before = peak_bytes()
    try:
        train(index, num_workers, table, str(run_dir))
    finally:
        Session.summarise = summarise  # type: ignore[method-assign]
    return peak - before
