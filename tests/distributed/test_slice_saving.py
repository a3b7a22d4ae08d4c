"""Checkpoints that all members write together: what one of them cannot do, nobody takes for done."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driving import Outcome, Table, job, train
from process_pool import CaseError, ProcessPool

from cordee import checkpoint
from cordee.checkpoint import Folder, load_newest
from cordee.core.errors import CommunicationError, StorageError
from cordee.core.file_memory import is_large, lies_in_file
from cordee.strategies.sharded import Sharded
from cordee.trainer import Trainer
from cordee.training import checkpointer as checkpointer_module
from cordee.training import session as session_module
from cordee.training import slice_saving
from cordee.training.clock import TrainingClock
from cordee.training.session import Session

pytestmark = pytest.mark.timeout(150)

JOB = job(
    optimizer={"use": "adam", "lr": 0.003},
    training={"steps": 6},
    checkpoint={"every_steps": 2},
    strategy={"name": "sharded", "unit_bytes": 1},
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize("point", ["slices.begun", "slices.written"])
def test_a_member_that_dies_before_all_have_written_leaves_no_checkpoint(
    two: ProcessPool, tmp_path: Path, point: str
) -> None:
    with pytest.raises(CaseError, match="member 1: died"):
        two.run(train_and_die, JOB, str(tmp_path), point)
    assert (tmp_path / "lost").exists(), "the other member has not noticed"
    assert names(tmp_path) == ["step-2"]
    loaded = load_newest(tmp_path / "checkpoints")
    assert loaded is not None and loaded.step == 2


def train_and_die(index: int, num_workers: int, table: Table, run_dir: str, point: str) -> None:
    visits = 0

    def die(name: str) -> None:
        nonlocal visits
        visits += name == point
        if index == 1 and visits == 2:
            os._exit(1)

    slice_saving.reach = die  # type: ignore[attr-defined]  # this process dies, or is ended with it
    try:
        train(index, num_workers, table, run_dir)
    except CommunicationError:
        (Path(run_dir) / "lost").touch()
        raise


TOKENS: Table = {"use": "synthetic", "kind": "tokens", "shape": [8], "num_classes": 16, "size": 64, "test_size": 20}
GPT: Table = {"use": "gpt", "num_layers": 2, "embedding_width": 16, "num_heads": 4}
OF_TWO: dict[str, Table] = {
    "sharded": {"name": "sharded", "unit_bytes": 1},
    "pipeline": {"name": "pipeline", "microbatches": 2},
    "tensor": {"name": "tensor"},
}
OF_FOUR: dict[str, Table] = {
    "copies of tensor": {"name": "hybrid", "mesh": {"data": 2, "tensor": 2}},
    "sharded slices": {"name": "hybrid", "mesh": {"sharded": 2, "tensor": 2}, "unit_bytes": 1},
    "pipeline of slices": {"name": "hybrid", "mesh": {"pipeline": 2, "tensor": 2}, "microbatches": 2},
    "sharded pipeline": {"name": "hybrid", "mesh": {"pipeline": 2, "sharded": 2}, "microbatches": 2},
}
SHORT = {("sharded", "mlp"), ("tensor", "gpt")}


def cases(layouts: dict[str, Table]) -> list[Any]:
    return [
        pytest.param(layout, model, marks=() if (layout, model) in SHORT else pytest.mark.long)
        for layout in layouts
        for model in ("mlp", "gpt")
    ]


@pytest.mark.parametrize(("layout", "model"), cases(OF_TWO))
def test_what_is_written_beside_the_training_is_what_stood_still(
    two: ProcessPool, tmp_path: Path, layout: str, model: str
) -> None:
    compare_with_gathered(two, OF_TWO[layout], model, tmp_path)


@pytest.mark.parametrize(("layout", "model"), cases(OF_FOUR))
def test_what_a_mesh_writes_beside_the_training_is_what_stood_still(
    four: ProcessPool, tmp_path: Path, layout: str, model: str
) -> None:
    compare_with_gathered(four, OF_FOUR[layout], model, tmp_path)


@pytest.mark.long
def test_an_evaluation_waits_for_what_is_written(two: ProcessPool, tmp_path: Path) -> None:
    """It puts averages of the weights in their places, at the end of an epoch after whose last step a save began."""
    more: Table = {
        "training": {"batch_size": 50, "steps": 9, "threads": 1, "ema": 0.9},
        "checkpoint": {"every_steps": 3, "keep": 9},
        "evaluation": {"every_epochs": 1},
    }
    compare_with_gathered(two, OF_TWO["sharded"], "mlp", tmp_path, more, every=3)


def compare_with_gathered(
    pool: ProcessPool, strategy: Table, model: str, folder: Path, more: Table | None = None, every: int = 2
) -> None:
    """Each checkpoint has the bytes of one that the first member makes of the whole state before it trains on.

    Layers of 32, 16 and 5 rows, or weights that are tied; and members begin to write so late that a step which did not
    wait for them would be over.
    """
    table: Table = {**JOB, "strategy": strategy}
    table |= {"model": GPT, "data": TOKENS} if model == "gpt" else {"model": {"use": "mlp", "hidden": [32, 16]}}
    table |= more or {}
    written = pool.run(train_and_gather, table, str(folder))
    assert written[0] == [2 * every, 3 * every], "a checkpoint after the first was not written beside the training"
    assert names(folder) == [f"step-{number * every}" for number in (1, 2, 3)]
    for name in names(folder):
        together, alone = (
            {file.name: file.read_bytes() for file in (root / name).iterdir()}
            for root in (folder / "checkpoints", folder / "gathered")
        )
        assert together == alone, name
    resumed = pool.run(train, table, str(folder), True)
    state = load_newest(folder / "checkpoints")
    assert state is not None
    found = checkpoint.weights_sha256(state.state.part("model").tensors)
    assert {outcome.summary.weights_sha256 for outcome in resumed} == {found}, "members cut out something else"


def train_and_gather(index: int, num_workers: int, table: Table, run_dir: str) -> list[int]:
    """Return the steps that members wrote beside the training; before each, the first saves the whole state apart."""
    save, write, steps = Trainer._save, checkpoint.write_slices, []

    def save_both(trainer: Trainer, *, at_once: bool = False) -> None:
        trainer._settle_checkpoint()
        trainer.progress.elapsed_s = 1.0
        strategy = trainer._parts.strategy
        strategy.consolidate()
        state = strategy.state_dict()
        if index == 0:
            whole = trainer._with_progress(state)
            checkpoint.save(Path(run_dir) / "gathered", trainer.progress.step, whole, keep=9)
        elapsed_s = TrainingClock.elapsed_s
        TrainingClock.elapsed_s = property(lambda clock: 1.0)  # type: ignore[assignment,method-assign]
        try:
            save(trainer, at_once=at_once)
        finally:
            TrainingClock.elapsed_s = elapsed_s  # type: ignore[method-assign]
        steps.extend([trainer.progress.step] * trainer._saver.is_open)

    def write_late(*arguments: Any, **options: Any) -> checkpoint.Wrote:
        time.sleep(0.1)
        return write(*arguments, **options)

    Trainer._save = save_both  # type: ignore[method-assign]
    with_write(write_late)
    try:
        train(index, num_workers, table, run_dir)
    finally:
        Trainer._save = save  # type: ignore[method-assign]
        with_write(write)
    return steps


def test_a_state_that_changes_while_it_is_written_is_not_saved(two: ProcessPool, tmp_path: Path) -> None:
    outcomes = two.run(train_and_change, JOB, str(tmp_path))
    assert names(tmp_path) == ["step-2", "step-6"]
    (warning,) = outcomes[0].of("warning")
    assert "checkpoint at step 4 was not saved" in warning["message"]
    said = [warning["message"] for warning in outcomes[1].of("warning")]
    assert any("has changed while it was written" in message for message in said), said


def train_and_change(index: int, num_workers: int, table: Table, run_dir: str) -> Outcome:
    start, num_starts = slice_saving.SharedWriting.start, 0

    def start_and_change(self: slice_saving.SharedWriting, *arguments: Any) -> None:
        nonlocal num_starts
        start(self, *arguments)
        num_starts += 1
        if index == 1 and num_starts == 1:
            with torch.no_grad():
                next(iter(self._slices.own.values())).values.add_(0.0)

    slice_saving.SharedWriting.start = start_and_change  # type: ignore[method-assign]
    try:
        return train(index, num_workers, table, run_dir)
    finally:
        slice_saving.SharedWriting.start = start  # type: ignore[method-assign]


def test_a_tied_weight_that_is_infinite_is_not_saved(two: ProcessPool, tmp_path: Path) -> None:
    """It is saved under the name that comes first in the alphabet, and trained under the other."""
    table: Table = {**JOB, "model": {"use": "networks:TiedLate"}}
    with pytest.raises(CaseError, match=r"'model.early.weight' has values that are not finite"):
        two.run(train_and_spoil, table, str(tmp_path))
    assert names(tmp_path) == ["step-2"]


def train_and_spoil(index: int, num_workers: int, table: Table, run_dir: str) -> None:
    slices = Sharded.slices
    num_saves = 0

    def spoil(self: Sharded) -> checkpoint.Slices | None:
        nonlocal num_saves
        found = slices(self)
        num_saves += 1
        if num_saves == 2 and index == 1 and found is not None:
            found.own["model.early.weight"].values[-1] = float("inf")
        return found

    Sharded.slices = spoil  # type: ignore[method-assign]
    try:
        train(index, num_workers, table, run_dir)
    finally:
        Sharded.slices = slices  # type: ignore[method-assign]


def test_a_counter_that_differs_stops_the_run_at_the_commit(two: ProcessPool, tmp_path: Path) -> None:
    """Members have the optimizer's counters in common, and the first one saves them for all."""
    with pytest.raises(CaseError, match=r"worker 1.*buffers|buffers.*worker 1"):
        two.run(train_and_miscount, JOB, str(tmp_path))
    assert names(tmp_path) == ["step-2"]


def train_and_miscount(index: int, num_workers: int, table: Table, run_dir: str) -> None:
    slices = Sharded.slices
    num_saves = 0

    def miscount(self: Sharded) -> checkpoint.Slices | None:
        nonlocal num_saves
        found = slices(self)
        num_saves += 1
        if num_saves == 2 and index == 1 and found is not None:
            next(tensor for name, tensor in found.common.items() if name.endswith(".step")).sub_(1)
        return found

    Sharded.slices = miscount  # type: ignore[method-assign]
    try:
        train(index, num_workers, table, run_dir)
    finally:
        Sharded.slices = slices  # type: ignore[method-assign]


@pytest.mark.parametrize("member", [0, 1])
def test_a_disk_that_refuses_one_member_costs_that_checkpoint(two: ProcessPool, tmp_path: Path, member: int) -> None:
    outcomes = two.run(train_on_full_disk, JOB, str(tmp_path), member)
    assert names(tmp_path) == ["step-4", "step-6"]
    (warning,) = outcomes[0].of("warning")
    assert f"checkpoint at step 2 was not saved: cannot save the checkpoint {tmp_path}" in warning["message"]
    assert f"worker {member} could not write to it" in warning["message"]
    said = [warning["message"] for warning in outcomes[member].of("warning")]
    assert any("No space left on device" in message for message in said), said
    assert [event["step"] for event in outcomes[0].of("checkpoint")] == [4, 6]


def train_on_full_disk(index: int, num_workers: int, table: Table, run_dir: str, member: int) -> Outcome:
    write, is_full = checkpoint.write_slices, True

    def refuse(*arguments: Any, **options: Any) -> checkpoint.Wrote:
        nonlocal is_full
        if index == member and is_full:
            is_full = False
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*arguments, **options)

    with_write(refuse)
    try:
        return train(index, num_workers, table, run_dir)
    finally:
        with_write(write)


def with_write(write: Callable[..., Any]) -> None:
    checkpoint.write_slices = write


def test_a_disk_that_takes_no_folder_costs_that_checkpoint(two: ProcessPool, tmp_path: Path) -> None:
    outcomes = two.run(train_without_a_draft, JOB, str(tmp_path))
    assert names(tmp_path) == ["step-4", "step-6"]
    (warning,) = outcomes[0].of("warning")
    assert "checkpoint at step 2 was not saved" in warning["message"]
    assert "No space left on device" in warning["message"]


def train_without_a_draft(index: int, num_workers: int, table: Table, run_dir: str) -> Outcome:
    make, is_full = slice_saving.SharedDraft, True

    def refuse(*arguments: Any) -> slice_saving.SharedDraft:
        nonlocal is_full
        if is_full:
            is_full = False
            raise StorageError(f"cannot save the checkpoint: {os.strerror(errno.ENOSPC)}")
        return make(*arguments)

    slice_saving.SharedDraft = refuse  # type: ignore[misc,assignment]
    try:
        return train(index, num_workers, table, run_dir)
    finally:
        slice_saving.SharedDraft = make  # type: ignore[misc]


def test_members_read_what_they_hold_and_fall_back_together(three: ProcessPool, tmp_path: Path) -> None:
    """As workers enter a generation: the first verifies, all map; a damaged checkpoint is passed over by all."""
    whole = three.run(train_in_team, JOB, str(tmp_path / "whole"), False)
    three.run(train_in_team, {**JOB, "stop": {"steps": 4}}, str(tmp_path / "halves"), False)
    newest = tmp_path / "halves" / "checkpoints" / "step-4" / "optimizer.safetensors"
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    resumed = three.run(train_in_team, JOB, str(tmp_path / "halves"), True)
    assert [outcome.of("run_started")[0]["start_step"] for outcome in resumed] == [2, 2, 2]
    (warning,) = resumed[0].of("warning")
    assert "checkpoint step-4 is damaged" in warning["message"] and "using step-2" in warning["message"]
    hashes = {outcome.summary.weights_sha256 for outcome in (*whole, *resumed)}
    assert len(hashes) == 1, "a resumed run ends with other weights"


@pytest.mark.long
def test_members_without_the_run_directory_are_sent_the_state_into_files(two: ProcessPool, tmp_path: Path) -> None:
    """Nobody has all of it in memory: the first maps the checkpoint, and what the others get lies in files."""
    table = {**JOB, "model": {"use": "mlp", "hidden": [1600, 64]}}  # a tensor of more than 256 KB
    whole = two.run(train_in_team, table, str(tmp_path / "whole"), False)
    two.run(train_in_team, {**table, "stop": {"steps": 4}}, str(tmp_path / "halves"), False)
    resumed = two.run(train_apart, table, str(tmp_path / "halves"))
    assert [outcome.of("run_started")[0]["start_step"] for outcome, _ in resumed] == [4, 4]
    hashes = {outcome.summary.weights_sha256 for outcome in (*whole, *(outcome for outcome, _ in resumed))}
    assert len(hashes) == 1, "a resumed run ends with other weights"
    assert [in_files for _, in_files in resumed] == [True, True]


def train_apart(index: int, num_workers: int, table: Table, run_dir: str) -> tuple[Outcome, bool]:
    """Train as one of members that have no folder in common; return whether what was shared lay in files."""
    choose, share, in_files = slice_saving.choose_folder, checkpoint.share_state, False

    def note(*arguments: Any, **options: Any) -> checkpoint.State:
        nonlocal in_files
        state = share(*arguments, **options)
        in_files = all(lies_in_file(tensor) for tensor in state.tensors.values() if is_large(tensor))
        return state

    modules: Any = (session_module, checkpointer_module)
    for module in modules:
        module.choose_folder = lambda store, team: None
    checkpoint.share_state = note
    try:
        return train_in_team(index, num_workers, table, run_dir, True), in_files
    finally:
        checkpoint.share_state = share
        for module in modules:
            module.choose_folder = choose


def test_members_begin_together_where_there_is_no_checkpoint(two: ProcessPool, tmp_path: Path) -> None:
    """A run that ended before its first checkpoint is resumed too."""
    whole = two.run(train_in_team, JOB, str(tmp_path / "whole"), False)
    resumed = two.run(train_in_team, JOB, str(tmp_path / "resumed"), True)
    assert [outcome.of("run_started")[0]["start_step"] for outcome in resumed] == [0, 0]
    assert resumed[0].summary.weights_sha256 == whole[0].summary.weights_sha256


def train_in_team(index: int, num_workers: int, table: Table, run_dir: str, resume: bool) -> Outcome:
    """Train as a worker does that is told of a generation. Nothing may load all of a checkpoint."""

    def enter(session: Session, *, resume: bool, log_file: Path) -> None:
        team = session._parts.team
        session.train(team, may_load=resume, log_file=log_file, is_end=lambda: True)

    def refuse(*arguments: Any) -> Any:
        raise AssertionError("a member has loaded all of a checkpoint")

    run, load = Session.run, Folder.load_newest
    Session.run, Folder.load_newest = enter, refuse  # type: ignore[method-assign,assignment]
    Path(run_dir).mkdir(parents=True, exist_ok=True)
    try:
        return train(index, num_workers, table, run_dir, resume)
    finally:
        Session.run, Folder.load_newest = run, load  # type: ignore[method-assign]
