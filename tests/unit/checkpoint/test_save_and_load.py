"""What is saved comes back, old ones go, and nothing is ever without a whole checkpoint."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cordee.checkpoint import State, list_checkpoints, load, load_newest, save, writing
from cordee.checkpoint.layout import decode_values, encode_values
from cordee.checkpoint.writing import superfluous
from cordee.core.errors import CheckpointError, StorageError


def small(step: int) -> State:
    return State({"model.weight": torch.full((3, 2), float(step))}, {"step": step})


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    state = State(
        {
            "model.conv.weight": torch.randn(4, 3, 2),
            "model.conv.transposed": torch.randn(5, 7).t(),
            "model.every_other": torch.arange(10)[::2],
            "model.scalar": torch.tensor(3.5),
            "model.empty": torch.zeros(0, 4),
            "model.expanded": torch.ones(1).expand(6),
            "optimizer.step": torch.tensor(7, dtype=torch.int64),
            "optimizer.größe": torch.tensor([True, False]),
        },
        {"epoch": 3, "best": math.inf, "nothing": None, "text": "é\n", "deep": {"list": [1, 2.5, [-0.0]], "$x": 1}},
    )
    path = save(tmp_path / "run" / "checkpoints", 12, state, keep=3)
    assert path == tmp_path / "run" / "checkpoints" / "step-12"
    assert names(path) == ["manifest.json", "model.safetensors", "optimizer.safetensors", "values.json"]
    loaded = load(path)
    assert loaded.values == state.values
    assert loaded.tensors.keys() == state.tensors.keys()
    for name, tensor in state.tensors.items():
        assert loaded.tensors[name].dtype == tensor.dtype
        assert torch.equal(loaded.tensors[name], tensor), name
    loaded.tensors["model.scalar"].add_(1)  # memory of its own, which may be written


def test_the_model_file_can_be_opened_without_cordee(tmp_path: Path) -> None:
    path = save(tmp_path, 0, State({"model.a.weight": torch.ones(2)}, {}), keep=1)
    assert safetensors.torch.load_file(path / "model.safetensors")["a.weight"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8, torch.bool),
        *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    ],
    ids=str,
)
def test_every_dtype_keeps_its_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (4, 16), dtype=torch.uint8)
    loaded = load(save(tmp_path, 1, State({"model.x": bits.view(dtype)}, {}), keep=1)).tensors["model.x"]
    assert loaded.dtype == dtype
    assert torch.equal(loaded.view(torch.uint8), bits)


def test_conjugate_views_are_saved_as_what_they_mean(tmp_path: Path) -> None:
    value = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    state = State({"model.value": value, "model.conjugate": value.conj()}, {})
    loaded = load(save(tmp_path, 1, state, keep=1)).tensors
    assert torch.equal(loaded["model.conjugate"], value.conj())


def test_a_tied_weight_is_stored_once_and_stays_tied(tmp_path: Path) -> None:
    weight = torch.randn(100)
    path = save(tmp_path, 1, State({"model.a": weight, "model.b": weight, "model.part": weight[:50]}, {}), keep=1)
    assert (path / "model.safetensors").stat().st_size < 1000
    loaded = load(path).tensors
    assert loaded["model.a"].data_ptr() == loaded["model.b"].data_ptr() != loaded["model.part"].data_ptr()
    assert torch.equal(loaded["model.part"], weight[:50])


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text().filter(lambda k: k != "$float"), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.text().filter(lambda key: key != "$float"), plain_values, max_size=4))
def test_values_come_back_exactly(values: dict[str, object]) -> None:
    assert repr(decode_values(encode_values(values))) == repr(values)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.text(min_size=1).filter(lambda n: n != "__metadata__"), st.lists(st.integers(0, 3))))
def test_any_name_and_shape_comes_back(tmp_path: Path, shapes: dict[str, list[int]]) -> None:
    state = State({f"model.{name}": torch.randn(shape[:4]) for name, shape in shapes.items()}, {})
    loaded = load(save(tmp_path, 1, state, keep=1)).tensors
    assert loaded.keys() == state.tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.tensors.items())


@pytest.mark.parametrize(
    ("state", "complaint"),
    [
        (State({"weight": torch.ones(1)}, {}), "'weight' must start with its part"),
        (State({"../x.weight": torch.ones(1)}, {}), "must start with its part"),
        (State({"model.x": torch.ones(1, dtype=torch.complex128)}, {}), "'x' is of type torch.complex128"),
        (State({"model.x": torch.ones(2, 2).to_sparse()}, {}), "'x' is a torch.sparse_coo tensor"),
        (State({"model.x": torch.ones(2, device="meta")}, {}), "'x' is a meta tensor"),
        (State({"model.__metadata__": torch.ones(2)}, {}), "cannot be called '__metadata__'"),
        (State({"model.\ud800": torch.ones(2)}, {}), "not valid text"),
        (State({}, {"a": {"b": [object()]}}), r"values.a.b\[0\] is a object"),
        (State({}, {"a": {1: 2}}), "values.a has the key 1"),
        (State({}, {"a": 2**64}), "does not fit into 64 bits"),
        (State({}, {"a": "\ud800"}), "not valid"),
    ],
)
def test_what_cannot_be_saved_is_named_and_nothing_is_written(state: State, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        save(tmp_path, 1, state, keep=1)
    assert names(tmp_path) == []


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (2, 9, 10, 100):
        save(tmp_path, step, small(step), keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-10", "step-100"]
    assert names(tmp_path) == ["step-10", "step-100"]
    newest = load_newest(tmp_path)
    assert newest is not None
    assert (newest.step, newest.state.values, newest.damaged) == (100, {"step": 100}, [])


def test_what_else_lies_there_is_left_alone(tmp_path: Path) -> None:
    others = ["best", "step-", "step-01", "step-1.bak", "step-x", ".step-1.tmp", "notes.txt"]
    for name in others:
        (tmp_path / name).mkdir()
    save(tmp_path, 5, small(5), keep=1)
    save(tmp_path, 6, small(6), keep=1)
    assert names(tmp_path) == sorted([*others, "step-6"])


@pytest.mark.parametrize(
    ("found", "step", "keep", "removed"),
    [
        ("1 2 3 4", 4, 2, "1 2"),
        ("1 2! 3! 4", 4, 2, ""),  # the damaged ones do not count, and stay while they are among the kept
        ("0 1 2! 3! 4", 4, 2, "0"),
        ("0! 1 2 3", 3, 2, "0! 1"),
        ("1 2 3 9", 3, 2, "1"),  # later steps, left from before a fall-back, are not judged
        ("1 9!", 1, 1, ""),
        ("2 3.previous 3", 3, 2, "3.previous"),
        ("1 3.previous 3! 4", 4, 2, "1"),  # the one that was to be replaced is the whole one
        ("3.previous 4", 4, 2, ""),
    ],
)
def test_what_is_superfluous(found: str, step: int, keep: int, removed: str) -> None:
    def paths(text: str) -> list[tuple[Path, bool]]:
        return [(Path(f"step-{word.rstrip('!')}"), not word.endswith("!")) for word in text.split()]

    assert set(superfluous(paths(found), step, keep)) == {path for path, _ in paths(removed)}


def test_what_is_protected_stays() -> None:
    found = [(Path(f"step-{name}"), True) for name in ("1", "2.previous", "2", "3", "4")]
    assert [path.name for path in superfluous(found, 4, 2, [2])] == ["step-2.previous", "step-1"]
    assert [path.name for path in superfluous(found, 4, 2, [4])] == ["step-2", "step-2.previous", "step-1"]
    damaged = [(Path("step-1"), False), (Path("step-2"), True), (Path("step-3"), True)]
    assert [path.name for path in superfluous(damaged, 3, 2, [1])] == ["step-1"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 5, State({}, {"version": 1}), keep=3)
    save(tmp_path, 5, State({}, {"version": 2}), keep=3)
    assert names(tmp_path) == ["step-5"]
    assert load(tmp_path / "step-5").values == {"version": 2}


@pytest.mark.parametrize("damaged", ["step-5", "step-5.previous", "neither"])
def test_an_interrupted_replacement_is_sorted_out(damaged: str, tmp_path: Path) -> None:
    save(tmp_path, 5, State({}, {"version": 1}), keep=3)
    (tmp_path / "step-5").rename(tmp_path / "step-5.previous")
    newest = load_newest(tmp_path)
    assert newest is not None
    assert newest.state.values == {"version": 1}
    save(tmp_path / "other", 5, State({}, {"version": 2}), keep=3)
    (tmp_path / "other" / "step-5").rename(tmp_path / "step-5")
    if damaged != "neither":
        (tmp_path / damaged / "values.json").write_bytes(b"{}")
    newest = load_newest(tmp_path)
    assert newest is not None
    assert newest.state.values == {"version": 1 if damaged == "step-5" else 2}
    save(tmp_path, 5, State({}, {"version": 3}), keep=3)
    assert names(tmp_path) == ["other", "step-5"]
    assert load(tmp_path / "step-5").values == {"version": 3}


def test_a_file_or_link_in_the_way_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "step-1").write_text("not a directory")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    (tmp_path / "step-2").symlink_to(elsewhere)
    save(tmp_path, 1, small(1), keep=3)
    save(tmp_path, 2, small(2), keep=3)
    assert names(tmp_path) == ["elsewhere", "step-1", "step-2"]
    assert names(elsewhere) == ["precious"]


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(timeout=30)
    host = writing._HOST
    for owner in (f"{host}.{dead.pid}", f"{host}.{os.getppid()}", f"another-host.{dead.pid}", f"{host}.{os.getpid()}"):
        (tmp_path / f".step-7.{owner}.0.tmp").mkdir()
    save(tmp_path, 8, small(8), keep=1)
    living = [f".step-7.another-host.{dead.pid}.0.tmp", f".step-7.{host}.{os.getppid()}.0.tmp"]
    assert names(tmp_path) == sorted([*living, "step-8"])


def test_threads_that_save_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda step: save(tmp_path, step, small(step), keep=100), range(40)))
    assert [load(path).values for path in list_checkpoints(tmp_path)] == [{"step": step} for step in range(40)]
    assert len(names(tmp_path)) == 40


def test_no_checkpoint_at_all_is_none(tmp_path: Path) -> None:
    assert load_newest(tmp_path) is None
    assert load_newest(tmp_path / "not there") is None
    assert list_checkpoints(tmp_path / "not there") == []


def test_a_root_that_is_a_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"cannot save the checkpoint .*step-1: (Not a directory|File exists)"):
        save(tmp_path / "file", 1, small(1), keep=1)
    with pytest.raises(StorageError, match="Not a directory"):
        save(tmp_path / "file" / "below", 1, small(1), keep=1)
    with pytest.raises(CheckpointError, match="Not a directory"):
        load_newest(tmp_path / "file")


def test_an_unwritable_place_is_said() -> None:
    with pytest.raises(StorageError, match="cannot save the checkpoint /proc/cordee/step-1"):
        save(Path("/proc/cordee"), 1, small(1), keep=1)


def test_a_failure_while_replacing_brings_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 5, State({}, {"version": 1}), keep=3)
    rename = os.rename

    def failing(source: Path, target: Path) -> None:
        if Path(source).suffix == ".tmp":
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(StorageError, match="Input/output error"):
        save(tmp_path, 5, State({}, {"version": 2}), keep=3)
    assert names(tmp_path) == ["step-5"]
    assert load(tmp_path / "step-5").values == {"version": 1}


def test_a_saved_checkpoint_with_failed_pruning_is_not_called_unsaved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, small(1), keep=1)
    rename = os.rename

    def failing(source: Path, target: Path) -> None:
        if Path(target).suffix == ".tmp":
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(StorageError, match="step-2 is saved, but older ones cannot be removed"):
        save(tmp_path, 2, small(2), keep=1)
    assert load(tmp_path / "step-2").values == {"step": 2}


def test_an_interrupt_leaves_nothing_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1, small(1), keep=1)
    assert names(tmp_path) == []


def test_parts_are_joined_and_taken_apart() -> None:
    model = State({"a.weight": torch.ones(1)}, {})
    trainer = State({}, {"step": 3})
    joined = State.join(model=model, trainer=trainer)
    assert list(joined.tensors) == ["model.a.weight"]
    assert joined.values == {"trainer": {"step": 3}}
    assert joined.part("model") == model
    assert joined.part("trainer") == trainer
    assert joined.part("optimizer") == State({}, {})
    with pytest.raises(CheckpointError, match="values of 'step' are a int"):
        State({}, {"step": 3}).part("step")
