"""Members that each write a slice of a state make the very files of one who has all of it, or no checkpoint at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cordee.checkpoint import (
    Kind,
    SharedDraft,
    Slice,
    Slices,
    State,
    find_missing,
    load,
    plan_files,
    save,
    write_slices,
)
from cordee.checkpoint.slices import Region
from cordee.core.errors import StorageError

MEMBERS = (0, 1, 2)
VALUES: dict[str, Any] = {"optimizer": {"lr": 0.1}, "progress": {"step": 7}}


def whole(factor: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "model.weight": torch.randn(7, 5, generator=generator) * factor,
        "model.bias": torch.randn(2, generator=generator) * factor,  # fewer rows than members
        "model.half": torch.randn(3, 3, generator=generator).bfloat16(),  # slices are no multiple of 8 bytes
        "model.count": torch.tensor(3),
        "optimizer.weight.exp_avg": torch.randn(7, 5, generator=generator) * factor,
        "optimizer.weight.step": torch.tensor(4.0),
    }


def slices_of(member: int, tensors: dict[str, Tensor]) -> Slices:
    kinds = {name: Kind(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    own = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 0:
            if member == 0:
                own[name] = Slice(0, tensor)
            continue
        rows = -(-len(tensor) // len(MEMBERS))
        start = min(member * rows, len(tensor))
        own[name] = Slice(start * (tensor.numel() // len(tensor)), tensor[start : start + rows])
    return Slices(kinds, {"model.tied": "model.bias"}, own, VALUES, {})


def begin(root: Path, step: int = 7) -> tuple[SharedDraft, list[list[Region]]]:
    """Return the draft into which all members but the last have written, and their regions."""
    slices = slices_of(0, whole())
    draft = SharedDraft(root, step, plan_files(slices), VALUES)
    return draft, [write(draft, member) for member in MEMBERS[:-1]]


def write(draft: SharedDraft, member: int, factor: float = 1.0) -> list[Region]:
    slices = slices_of(member, whole(factor))
    return write_slices(draft.folder, plan_files(slices), slices, is_synced=False)


def files_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_the_files_are_those_of_one_who_has_everything(tmp_path: Path) -> None:
    tensors = whole()
    tensors["model.tied"] = tensors["model.bias"]
    alone = save(tmp_path / "alone", 7, State(tensors, VALUES), keep=1)
    draft, rows = begin(tmp_path / "together")
    rows.append(write(draft, MEMBERS[-1]))
    assert find_missing(plan_files(slices_of(0, whole())), rows, MEMBERS) is None
    together = draft.finish(rows, MEMBERS, keep=1, protected=())
    assert files_of(together) == files_of(alone)
    state = load(together)
    assert all(torch.equal(state.tensors[name], tensor) for name, tensor in tensors.items())
    assert [path.name for path in together.parent.iterdir()] == ["step-7"]


def test_a_slice_that_nobody_has_written_is_named(tmp_path: Path) -> None:
    draft, rows = begin(tmp_path)
    plan = plan_files(slices_of(0, whole()))
    problem = find_missing(plan, [*rows, [Region(0, 0, 0)] * len(plan.places)], MEMBERS)
    assert problem is not None and "were written by nobody" in problem and "'model.weight'" in problem
    twice = find_missing(plan, [rows[0], rows[0], rows[1]], MEMBERS)
    assert twice is not None and "another one has written as well" in twice
    draft.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_slice_that_never_arrived_is_refused_by_name(tmp_path: Path) -> None:
    draft, rows = begin(tmp_path)
    elsewhere, _ = begin(tmp_path / "elsewhere")
    rows.append(write(elsewhere, 2))  # it says that it wrote, and these bytes are not in this file
    with pytest.raises(StorageError, match=r"the slice of 'model.weight' of worker 2 in model.safetensors is missing"):
        draft.finish(rows, MEMBERS, keep=1, protected=())
    elsewhere.discard()
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]


def test_a_slice_of_another_step_is_refused_by_name(tmp_path: Path) -> None:
    draft, rows = begin(tmp_path)
    rows.append(write(draft, 2))
    write(draft, 1, factor=2.0)  # as it was, or will be, at another step
    with pytest.raises(StorageError, match=r"the slice of '.*' of worker 1 in .*, or is not what was written"):
        draft.finish(rows, MEMBERS, keep=1, protected=())
    assert list(tmp_path.iterdir()) == []


def test_members_of_other_shapes_have_another_plan() -> None:
    other = {**whole(), "model.bias": torch.zeros(3)}
    assert plan_files(slices_of(0, whole())).digest == plan_files(slices_of(2, whole())).digest
    assert plan_files(slices_of(0, whole())).digest != plan_files(slices_of(0, other)).digest


def test_a_file_that_is_not_there_any_more_is_not_made_again(tmp_path: Path) -> None:
    draft, _ = begin(tmp_path)
    (draft.folder / "optimizer.safetensors").unlink()
    with pytest.raises(FileNotFoundError):
        write(draft, 2)
    draft.discard()
