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
PARAMETERS = ("model.weight", "model.bias", "model.half")
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
    return write_slices(draft.folder, plan_files(slices), slices, parameters=PARAMETERS, is_synced=False).regions


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


# Slices that are columns, and blocks of rows and columns.


WIDTHS = {"model.columns": 1, "model.odd": 2, "model.blocks": 2, "model.narrow": 1}  # of the first of two columns


def grid() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        "model.columns": torch.randn(5, 6, generator=generator),
        "model.odd": torch.randn(4, 3, generator=generator).half(),  # runs of 4 and 2 bytes
        "model.blocks": torch.randn(3, 4, 5, generator=generator),
        "model.narrow": torch.randn(4, 1, generator=generator),  # nothing for the second column
    }


def block_of(member: int, tensors: dict[str, Tensor]) -> Slices:
    """Return what member 2 · row + column has of two rows and two columns of blocks."""
    row, column = divmod(member, 2)
    own = {}
    for name, tensor in tensors.items():
        middle, width = -(-len(tensor) // 2), WIDTHS[name]
        top, left = row * middle, column * width
        block = tensor[top : top + middle, :width] if column == 0 else tensor[top : top + middle, width:]
        start = top * tensor[0].numel() + left * tensor[0, 0].numel()
        own[name] = Slice(start, block, max(1, len(block)), tensor[0].numel())
    kinds = {name: Kind(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    return Slices(kinds, {}, own, VALUES, {})


def begin_grid(root: Path) -> tuple[SharedDraft, list[list[Region]]]:
    """Return the draft into which four members have written their blocks, and their regions."""
    parts = [block_of(member, grid()) for member in range(4)]
    plan = plan_files(parts[0])
    draft = SharedDraft(root, 7, plan, VALUES)
    return draft, [write_slices(draft.folder, plan, part, parameters=(), is_synced=False).regions for part in parts]


def test_blocks_make_the_files_of_one_who_has_everything(tmp_path: Path) -> None:
    alone = save(tmp_path / "alone", 7, State(grid(), VALUES), keep=1)
    draft, rows = begin_grid(tmp_path / "together")
    plan = plan_files(block_of(0, grid()))
    assert find_missing(plan, rows, range(4)) is None
    for member in range(4):
        found = find_missing(plan, rows[:member] + rows[member + 1 :], [0, 1, 2])
        assert found is not None and "were written by nobody" in found
    found = find_missing(plan, [*rows, rows[3]], range(5))
    assert found is not None and "another one has written as well" in found
    assert files_of(draft.finish(rows, range(4), keep=1, protected=())) == files_of(alone)


def test_a_block_of_another_step_is_refused_by_name(tmp_path: Path) -> None:
    draft, rows = begin_grid(tmp_path)
    later = {name: tensor * 2 if name == "model.blocks" else tensor for name, tensor in grid().items()}
    block = block_of(2, later)
    write_slices(draft.folder, plan_files(block), block, parameters=(), is_synced=False)
    with pytest.raises(StorageError, match=r"slice of 'model.blocks' of worker 2 in .* is not what was written"):
        draft.finish(rows, range(4), keep=1, protected=())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2])
def test_values_that_must_not_be_saved_are_named(tmp_path: Path, dtype: torch.dtype) -> None:
    for value, refused in [
        (float("nan"), ("model.weight", "model.mask")),
        (float("-inf"), ("model.weight",)),
        (-torch.finfo(dtype).max, ()),
        (-0.0, ()),
    ]:
        for name in ("model.weight", "model.mask"):
            tensors = {each: torch.ones(3, 3, dtype=torch.float64) for each in ("model.weight", "model.mask")}
            tensors[name][1, 2] = value
            tensors = {each: tensor.to(dtype) for each, tensor in tensors.items()}
            kinds = {each: Kind(tensor.dtype, tensor.shape) for each, tensor in tensors.items()}
            slices = Slices(kinds, {}, {each: Slice(0, tensor) for each, tensor in tensors.items()}, {}, {})
            plan = plan_files(slices)
            draft = SharedDraft(tmp_path, 7, plan, {})
            wrote = write_slices(draft.folder, plan, slices, parameters=["model.weight"], is_synced=False)
            draft.discard()
            assert wrote.unsound == (name if name in refused else None), (name, value)
