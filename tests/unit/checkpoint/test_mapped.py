"""A checkpoint that is looked at where it lies has what a loaded one has, and is verified in the same way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cordee.checkpoint import State, load, map_state, newest_whole, save
from cordee.checkpoint.layout import lay_out, parse_mapped
from cordee.checkpoint.reading import verify
from cordee.core.errors import CheckpointError


def state() -> State:
    weight = torch.randn(6, 3, dtype=torch.float64)
    tensors = {
        "model.weight": weight,
        "model.tied": weight,
        "model.half": torch.randn(5).bfloat16(),
        "model.flags": torch.tensor([True, False, True]),
        "model.nothing": torch.empty(0, 4),
        "model.count": torch.tensor(3),
        "optimizer.weight.exp_avg": torch.randn(6, 3),
    }
    return State(tensors, {"progress": {"step": 4}})


def test_it_is_what_is_loaded(tmp_path: Path) -> None:
    path = save(tmp_path, 4, state(), keep=1)
    verify(path)
    mapped, loaded = map_state(path), load(path)
    assert mapped.values == loaded.values
    assert mapped.tensors.keys() == loaded.tensors.keys()
    for name, tensor in loaded.tensors.items():
        assert (mapped.tensors[name].dtype, mapped.tensors[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(mapped.tensors[name], tensor), name


def test_a_change_stays_in_memory(tmp_path: Path) -> None:
    path = save(tmp_path, 4, state(), keep=1)
    map_state(path).tensors["model.weight"].zero_()
    verify(path)


@pytest.mark.parametrize("change", ["flipped", "cut short", "longer", "missing"])
def test_damage_is_found_and_the_one_before_is_used(tmp_path: Path, change: str) -> None:
    before, path = (save(tmp_path, step, state(), keep=2) for step in (4, 8))
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= change == "flipped"
    file.write_bytes({"cut short": content[:-1], "longer": content + b"0"}.get(change, content))
    if change == "missing":
        file.unlink()
    with pytest.raises(CheckpointError, match=r"model.safetensors"):
        verify(path)
    if change != "flipped":
        with pytest.raises(CheckpointError, match=r"model.safetensors"):
            map_state(path)
    found = newest_whole(tmp_path)
    assert found is not None and found.path == before and [damaged for damaged, _ in found.damaged] == [path]
    (before / "values.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole"):
        newest_whole(tmp_path)


def test_none_is_none(tmp_path: Path) -> None:
    assert newest_whole(tmp_path) is None


@pytest.mark.parametrize("start", [0, 4, 8, 30, 60])
def test_other_bytes_are_refused(start: int) -> None:
    layout = lay_out({"weight": torch.randn(3, 3)})
    content = torch.frombuffer(bytearray(layout.header + bytes(36)), dtype=torch.uint8)
    assert parse_mapped(content)["weight"].shape == (3, 3)
    content[start : start + 4] = 255
    with pytest.raises(CheckpointError):
        parse_mapped(content)
    with pytest.raises(CheckpointError):
        parse_mapped(content[:20])
