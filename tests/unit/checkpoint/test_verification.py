"""Loading believes nothing: every kind of tampering is refused with the file and the reason."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cordee.checkpoint import State, layout, load, load_newest, reading, save
from cordee.checkpoint.layout import Written, decode_manifest, decode_values, encode_manifest, parse
from cordee.core.errors import CheckpointError, StorageError

STATE = State({"model.weight": torch.arange(6.0), "optimizer.m": torch.ones(3)}, {"step": 4})


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(tmp_path, 4, STATE, keep=2)


def forge(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest and sign it again, as someone with bad intentions would."""
    table = json.loads((path / "manifest.json").read_text())
    change(table)
    table["sha256"] = ""
    bare = msgspec.json.format(msgspec.json.encode(table), indent=2)
    table["sha256"] = hashlib.sha256(bare).hexdigest()
    (path / "manifest.json").write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=2))


def refused(path: Path, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason) as caught:
        load(path)
    assert str(path) in str(caught.value)


def replace_file(path: Path, name: str, content: bytes) -> None:
    (path / name).write_bytes(content)
    entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    forge(path, lambda table: table["files"].update({name: entry}))


def test_forging_without_a_change_is_accepted(checkpoint: Path) -> None:
    forge(checkpoint, lambda table: None)
    assert load(checkpoint).values == {"step": 4}


@pytest.mark.parametrize("name", ["manifest.json", "values.json", "model.safetensors", "optimizer.safetensors"])
def test_a_missing_file_is_named(name: str, checkpoint: Path) -> None:
    (checkpoint / name).unlink()
    refused(checkpoint, f"{name} is missing")


def test_a_changed_file_is_named(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    refused(checkpoint, f"model.safetensors is cut short: {len(content) - 1} bytes instead of {len(content)}")
    file.write_bytes(content + b"x")
    refused(checkpoint, "model.safetensors has .* bytes, at most .* were expected")
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    refused(checkpoint, "model.safetensors does not match its SHA-256")


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""])
def test_a_file_elsewhere_is_refused(name: str, checkpoint: Path) -> None:
    forge(checkpoint, lambda table: table["files"].update({name: {"bytes": 1, "sha256": "0" * 64}}))
    refused(checkpoint, "manifest.json lists a file")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda table: table.update(format=2), "is of format 2, this Cordée .* reads format 1"),
        (lambda table: table.update(step=5), "is of step 5: the directory was renamed"),
        (lambda table: table.update(step="4"), "is not a manifest: Expected `int`"),
        (lambda table: table.update(more=1), "is not a manifest: .*unknown field `more`"),
        (lambda table: table["files"].pop("values.json"), "'values.json' and at most 64 must be there"),
        (lambda table: table["files"]["values.json"].update(bytes=-1), "impossible size"),
        (lambda table: table["files"]["values.json"].update(sha256="x"), "impossible size or SHA-256"),
        (lambda table: table["files"]["values.json"].update(bytes=1 << 40), "this machine has"),
        (
            lambda table: table["files"].update(
                {f"part{i}.safetensors": {"bytes": 0, "sha256": "0" * 64} for i in range(70)}
            ),
            "lists 73 files",
        ),
    ],
)
def test_a_forged_manifest_is_refused(change: Callable[[dict[str, Any]], None], reason: str, checkpoint: Path) -> None:
    forge(checkpoint, change)
    refused(checkpoint, reason)


def test_values_beyond_the_limit_are_not_read(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_VALUES_BYTES", 5)
    refused(checkpoint, "values.json has .* bytes, more than the 5 allowed")
    monkeypatch.setattr(layout, "MAX_VALUES_BYTES", 5)
    with pytest.raises(CheckpointError, match="keep large ones as tensors"):
        save(checkpoint.parent, 5, STATE, keep=1)


def test_a_huge_manifest_is_not_read(checkpoint: Path) -> None:
    with (checkpoint / "manifest.json").open("r+b") as file:
        file.truncate(1 << 40)  # sparse
    refused(checkpoint, "manifest.json has 1099511627776 bytes, at most 1048576")


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_what_is_not_a_regular_file_is_refused_without_waiting(name: str, checkpoint: Path) -> None:
    file = checkpoint / name
    real = file.rename(checkpoint / "real")
    file.symlink_to(real)
    refused(checkpoint, f"{name} cannot be read: Too many levels of symbolic links")
    file.unlink()
    os.mkfifo(file)
    refused(checkpoint, f"{name} is not a regular file")
    file.unlink()
    file.mkdir()
    refused(checkpoint, f"{name} is not a regular file")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 8,
        b"\xff" * 64,
        (1 << 62).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (58).to_bytes(8, "little") + b'{"x":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}   ' + b"\x00" * 4,
        (60).to_bytes(8, "little") + b'{"x":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}       ' + b"\x00" * 2,
    ],
)
def test_content_that_is_signed_but_no_tensor_file_is_refused(content: bytes, checkpoint: Path) -> None:
    replace_file(checkpoint, "model.safetensors", content)
    refused(checkpoint, "model.safetensors is not a safetensors file")


def test_other_names_must_stand_for_a_tensor_that_is_there(checkpoint: Path) -> None:
    header = b'{"__metadata__":{"b":"a"}}      '
    replace_file(checkpoint, "model.safetensors", len(header).to_bytes(8, "little") + header)
    refused(checkpoint, "says that 'b' is 'a', which does not fit")


@pytest.mark.parametrize("content", [b"[]", b"{", b'{"a": {"$float": "x"}}', b"\xff\xff", b'{"a":' + b"[" * 100_000])
def test_content_that_is_signed_but_no_values_is_refused(content: bytes, checkpoint: Path) -> None:
    replace_file(checkpoint, "values.json", content)
    refused(checkpoint, "values.json (is not a JSON table|holds the number)")


@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda tail: b'{"format":1,"files":' + tail))
def test_decoders_answer_garbage_with_their_own_error(content: bytes) -> None:
    decoders: list[Callable[[bytes], object]] = [decode_manifest, parse]
    for decode in decoders:
        with pytest.raises(CheckpointError):
            decode(content)
    with contextlib.suppress(CheckpointError):
        decode_values(content)


def test_every_bit_of_the_manifest_counts() -> None:
    content = encode_manifest(4, {"values.json": Written(2, "0" * 64)})
    assert decode_manifest(content).step == 4
    for position in range(len(content) * 8):
        flipped = bytearray(content)
        flipped[position // 8] ^= 1 << position % 8
        with pytest.raises(CheckpointError):
            decode_manifest(bytes(flipped))


def test_damaged_ones_are_passed_over_and_reported(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, State({"model.x": torch.full((4,), float(step))}, {}), keep=3)
    (tmp_path / "step-3" / "manifest.json").unlink()
    (tmp_path / "step-2" / "model.safetensors").write_bytes(b"")
    newest = load_newest(tmp_path)
    assert newest is not None
    assert (newest.step, newest.path) == (1, tmp_path / "step-1")
    assert [path.name for path, _ in newest.damaged] == ["step-3", "step-2"]
    assert "manifest.json is missing" in newest.damaged[0][1]
    assert "cut short" in newest.damaged[1][1]
    (tmp_path / "step-1" / "values.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole: .*step-3.*step-2.*step-1"):
        load_newest(tmp_path)


def test_a_copy_under_another_name_is_loaded(checkpoint: Path) -> None:
    assert load(checkpoint.rename(checkpoint.with_name("best"))).values == {"step": 4}
    (checkpoint.parent / "best").rename(checkpoint.with_name("step-9"))
    refused(checkpoint.with_name("step-9"), "is of step 4")


def test_a_checkpoint_directory_that_is_a_link_is_refused(tmp_path):
    save(tmp_path / "elsewhere", 3, State({"model.x": torch.zeros(2)}, {}), keep=1)
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "step-3").symlink_to(tmp_path / "elsewhere" / "step-3")
    with pytest.raises(CheckpointError, match="is a link, and no links are followed"):
        load_newest(tmp_path / "root")
    assert not reading.looks_whole(tmp_path / "root" / "step-3")


def test_a_folder_of_checkpoints_that_is_a_link_is_neither_read_nor_written(tmp_path):
    save(tmp_path / "elsewhere", 3, State({"model.x": torch.zeros(2)}, {}), keep=1)
    (tmp_path / "root").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="root is a link, and no links are followed"):
        load_newest(tmp_path / "root")
    with pytest.raises(StorageError, match=r"cannot save .*step-4: .*root is a link, and no links are followed"):
        save(tmp_path / "root", 4, State({"model.x": torch.zeros(2)}, {}), keep=1)
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["step-3"]
