"""The thread that writes: what it is given is copied, one at a time, and what it fails with is told."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from cordee.checkpoint import CheckpointWriter, Folder, Request, Saved, State, load, save
from cordee.core.errors import CheckpointError


def request(step: int, state: State, protected: tuple[int, ...] = ()) -> Request:
    return Request(step, state, 9, protected, time.perf_counter())


def test_the_caller_may_change_its_tensors_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release, done = threading.Event(), list[Saved]()

    def held(*args: Any, **settings: Any) -> Path:
        assert release.wait(30)
        return save(*args, **settings)

    monkeypatch.setattr("cordee.checkpoint.writing.save", held)
    writer = CheckpointWriter(Folder(tmp_path), done.append)
    weight, values = torch.ones(5), {"progress": {"step": 1}}
    tied = {"model.a": weight, "model.b": weight, "model.c": torch.arange(6.0).reshape(2, 3).T}
    writer.start(request(1, State(tied, values)))
    assert writer.step == 1 and not done
    weight.zero_()
    values["progress"]["step"] = 2
    release.set()
    writer.wait()
    assert writer.step is None and [saved.path for saved in done] == [tmp_path / "step-1"]
    loaded = load(tmp_path / "step-1")
    assert loaded.values == {"progress": {"step": 1}}
    assert loaded.tensors["model.a"].tolist() == [1.0] * 5
    assert loaded.tensors["model.a"].data_ptr() == loaded.tensors["model.b"].data_ptr(), "stored once"
    assert torch.equal(loaded.tensors["model.c"], tied["model.c"])


def test_weights_that_are_not_shared_any_more_get_copies_of_their_own(tmp_path: Path) -> None:
    writer = CheckpointWriter(Folder(tmp_path), lambda saved: None)
    weight = torch.ones(3)
    writer.start(request(1, State({"model.a": weight, "model.b": weight}, {})))
    writer.start(request(2, State({"model.a": weight, "model.b": torch.zeros(3)}, {})))
    writer.start(request(3, State({"model.a": torch.ones(4), "model.b": torch.zeros(3).double()}, {})))
    writer.wait()
    assert load(tmp_path / "step-2").tensors["model.a"].tolist() == [1.0] * 3
    assert load(tmp_path / "step-2").tensors["model.b"].tolist() == [0.0] * 3
    assert load(tmp_path / "step-3").tensors["model.a"].shape == (4,)
    assert load(tmp_path / "step-3").tensors["model.b"].dtype == torch.float64


def test_a_state_that_cannot_be_saved_is_refused_before_the_thread(tmp_path: Path) -> None:
    writer = CheckpointWriter(Folder(tmp_path), lambda saved: None)
    with pytest.raises(CheckpointError, match=r"'model\.x' is a meta tensor"):
        writer.start(request(1, State({"model.x": torch.empty(2, device="meta")}, {})))
    with pytest.raises(CheckpointError, match="safetensors cannot hold"):  # found in the thread, told by `wait`
        writer.start(request(1, State({"model.x": torch.ones(2, dtype=torch.complex128)}, {})))
        writer.wait()
    writer.wait()


def test_writing_at_once_needs_no_copy_and_counts_as_a_stall(tmp_path: Path) -> None:
    done = list[Saved]()
    writer = CheckpointWriter(Folder(tmp_path), done.append)
    writer.write(request(4, State({"model.x": torch.ones(2)}, {})))
    (saved,) = done
    assert saved.stall_s >= saved.seconds > 0 and saved.problem is None
