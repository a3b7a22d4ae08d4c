"""What a power cut leaves: the calls of `save` are traced and replayed on a disk that forgets what was not fsynced."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from cordee.checkpoint import CheckpointWriter, Folder, Request, State, list_checkpoints, load, load_newest, save

Node = dict[str, int] | bytes  # a directory's entries, by the number of what they lead to, or a file's content


class ForgetfulDisk:
    """A model of one directory on a disk: each file and directory with all of its states since it was last synced.

    After a power cut each one is, independently, in any of these states.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.history: list[list[Node]] = [[{}]]

    def number(self, path: Path) -> int:
        number = 0
        for part in path.relative_to(self.root).parts:
            number = self.entries(number)[part]
        return number

    def entries(self, number: int) -> dict[str, int]:
        node = self.history[number][-1]
        assert isinstance(node, dict)
        return node

    def create(self, path: Path, node: Node) -> None:
        self.history.append([node])
        self.link(path, len(self.history) - 1)

    def link(self, path: Path, number: int) -> None:
        parent = self.number(path.parent)
        self.history[parent].append({**self.entries(parent), path.name: number})

    def unlink(self, path: Path) -> None:
        parent = self.number(path.parent)
        self.history[parent].append({name: n for name, n in self.entries(parent).items() if name != path.name})

    def rename(self, source: Path, target: Path) -> None:
        assert source.parent == target.parent, "a rename across directories is two changes"
        number, parent = self.number(source), self.number(source.parent)
        kept = {name: n for name, n in self.entries(parent).items() if name != source.name}
        self.history[parent].append({**kept, target.name: number})

    def append(self, path: Path, data: bytes) -> None:
        states = self.history[self.number(path)]
        content = states[-1]
        assert isinstance(content, bytes)
        states.append(content + data[: len(data) // 2])  # a write may get to the disk in part
        states.append(content + data)

    def sync(self, path: Path) -> None:
        states = self.history[self.number(path)]
        del states[:-1]

    def after_power_cut(self, into: Path, choose: Callable[[int], int], number: int = 0) -> None:
        states = self.history[number]
        node = states[choose(len(states))]
        if isinstance(node, bytes):
            into.write_bytes(node)
            return
        into.mkdir()
        for name, inner in node.items():
            self.after_power_cut(into / name, choose, inner)


@contextmanager
def traced(disk: ForgetfulDisk, after_each: Callable[[], None]) -> Iterator[None]:
    """Let the calls through, apply each to the model as well, and call `after_each` after it."""
    inside = [False]

    def path_of(path: Any, dir_fd: int | None = None) -> Path:
        return descriptor_path(dir_fd) / path if dir_fd is not None else Path(path)

    def descriptor_path(descriptor: int) -> Path:
        return Path(f"/proc/self/fd/{descriptor}").readlink()

    def on_open(path: Any, flags: int, *_: Any, dir_fd: int | None = None) -> None:
        if flags & os.O_CREAT:
            disk.create(path_of(path, dir_fd), b"")

    effects: dict[str, Callable[..., None]] = {
        "open": on_open,
        "mkdir": lambda path, *_: disk.create(Path(path), {}),
        "write": lambda descriptor, data: disk.append(descriptor_path(descriptor), bytes(data)),
        "fsync": lambda descriptor: disk.sync(descriptor_path(descriptor)),
        "rename": lambda source, target: disk.rename(Path(source), Path(target)),
        "unlink": lambda path, dir_fd=None: disk.unlink(path_of(path, dir_fd)),
        "rmdir": lambda path, dir_fd=None: disk.unlink(path_of(path, dir_fd)),
    }

    def wrapped(name: str) -> Callable[..., Any]:
        original = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if not inside[0]:
                inside[0] = True
                effects[name](*args, **kwargs)
                after_each()
                inside[0] = False
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in effects:
            patch.setattr(os, name, wrapped(name))
        yield


def test_after_a_power_cut_at_any_call_the_newest_saved_one_is_whole(tmp_path: Path) -> None:
    base = tmp_path / "disk"
    base.mkdir()
    disk = ForgetfulDisk(base)
    dice = random.Random(0)
    saved: list[tuple[int, int]] = []
    num_cuts = 0

    def cut() -> None:
        nonlocal num_cuts
        choices: list[Callable[[int], int]] = [lambda count: 0, lambda count: count - 1, dice.randrange]
        for choose in choices:
            num_cuts += 1
            left = tmp_path / f"left-{num_cuts}"
            disk.after_power_cut(left, choose)
            newest = load_newest(left / "run" / "checkpoints")
            if newest is None:
                assert not saved, f"{saved[-1]} was lost"
                shutil.rmtree(left)
                continue
            assert newest.damaged == []
            for path in list_checkpoints(newest.path.parent):
                load(path)  # one that is being deleted is never seen half deleted
            found = (newest.step, newest.state.values["version"])
            assert newest.state.tensors["model.x"].unique().tolist() == [found[1]]
            assert not saved or found >= saved[-1], f"{saved[-1]} was saved, {found} is left"
            shutil.rmtree(left)

    with traced(disk, cut):
        for version, (step, keep) in enumerate([(1, 2), (2, 2), (3, 2), (3, 2), (3, 1), (4, 1)]):
            state = State({"model.x": torch.full((40,), float(version)), "optimizer.y": torch.ones(3)}, {})
            request = Request(step, state._replace(values={"version": version}), keep, (), 0.0)
            writer = CheckpointWriter(
                Folder(base / "run" / "checkpoints"), lambda _, now=(step, version): saved.append(now)
            )
            writer.start(request)
            writer.wait()
    assert num_cuts > 300


def test_the_model_of_the_disk_notices_a_missing_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "disk"
    base.mkdir()
    disk = ForgetfulDisk(base)
    with traced(disk, lambda: None):
        monkeypatch.setattr("cordee.checkpoint.writing.fsync_directory", lambda path: None)
        save(base, 1, State({}, {}), keep=1)
    disk.after_power_cut(tmp_path / "left", lambda count: 0)
    assert load_newest(tmp_path / "left") is None


def test_files_are_synced_before_the_rename_and_the_parent_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, rename = os.fsync, os.rename

    def recorded_fsync(descriptor: int) -> None:
        calls.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def recorded_rename(source: Path, target: Path) -> None:
        calls.append(f"rename to {Path(target).name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    save(tmp_path, 1, State({"model.x": torch.ones(3), "optimizer.y": torch.ones(3)}, {}), keep=1)
    temporary = next(name for name in calls if name.endswith(".tmp"))
    assert calls == [
        "model.safetensors",
        "optimizer.safetensors",
        "values.json",
        "manifest.json",
        temporary,
        "rename to step-1",
        tmp_path.name,
    ]
