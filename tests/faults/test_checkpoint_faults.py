"""Checkpoints under real faults: writers killed at any moment, damaged files, a full disk.

`CORDEE_FAULT_TRIALS=300 pytest tests/faults/test_checkpoint_faults.py` runs more trials than the default.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cordee.checkpoint import State, export, list_checkpoints, load, load_newest, save
from cordee.core import Job, Use
from cordee.core.errors import CheckpointError, StorageError
from cordee.launch import train

TRIALS = int(os.environ.get("CORDEE_FAULT_TRIALS", "0"))

# Runs in a process of its own that has imported torch and has no threads: forking a child takes milliseconds.
# A child saves on and on and reports each finished save; the parent kills it and looks at what is left.
KILLER = r"""
import json, os, random, select, signal, sys, time
from pathlib import Path
import torch
from cordee.checkpoint import CheckpointWriter, Folder, Request, State, load_newest, save

torch.set_num_threads(1)
mode, root, trials, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
dice = random.Random(seed)
CALLS = ("open", "mkdir", "write", "fsync", "rename", "unlink", "rmdir")


def state(version):
    tensors = {f"model.{i}": torch.full((3000,), float(version)) for i in range(4)}
    return State({**tensors, "optimizer.m": torch.full((9000,), float(version))}, {"version": version})


def die_at_call(number):
    left = [number]

    def wrap(original):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)
        return call

    for name in CALLS:
        setattr(os, name, wrap(getattr(os, name)))


def write_apart(version, report):
    live = state(version)

    def done(saved):
        assert saved.problem is None
        os.writev(report, [saved.step.to_bytes(8, "little")])

    writer = CheckpointWriter(Folder(root), done)
    while True:
        for tensor in live.tensors.values():
            tensor.fill_(version)  # while the one before is being written
        writer.start(Request(version, State(live.tensors, {"version": version}), 2, (), 0.0))
        version += 1


def child(version, report, call):
    if mode == "thread":
        write_apart(version, report)
    if call is not None:
        die_at_call(call)
    while True:
        # Every third save replaces the one before it.
        step = version - 1 if version % 3 == 2 else version
        save(root, step, state(version), keep=2)
        os.writev(report, [version.to_bytes(8, "little")])
        version += 1
        if call is not None and version % 3 == 0:
            os._exit(0)


def check(acknowledged):
    newest = load_newest(root)
    if newest is None:
        assert acknowledged is None, f"{acknowledged} was saved and is lost"
        return None
    assert newest.damaged == [], newest.damaged
    version = newest.state.values["version"]
    for name, tensor in newest.state.tensors.items():
        assert tensor.unique().tolist() == [version], (name, version)
    assert len(newest.state.tensors) == 5
    assert acknowledged is None or version >= acknowledged, f"{acknowledged} was saved, {version} is the newest"
    return version


acknowledged, finished, saves, leftovers = None, 0, 0, 0
for trial in range(trials):
    incoming, report = os.pipe()
    call = trial if mode == "calls" else None
    version = 0 if acknowledged is None else acknowledged + 1
    if call is not None:
        version += -version % 3
    pid = os.fork()
    if pid == 0:
        os.close(incoming)
        child(version, report, call)
    os.close(report)
    if call is None:
        if dice.random() < 0.5:
            select.select([incoming], [], [], 10)  # until the first save is done
        time.sleep(dice.uniform(0, 0.05))
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    received = b""
    while piece := os.read(incoming, 1 << 16):
        received += piece
    os.close(incoming)
    done = [int.from_bytes(received[i : i + 8], "little") for i in range(0, len(received), 8)]
    saves += len(done)
    found = check(done[-1] if done else acknowledged)
    acknowledged = found if found is not None else acknowledged
    leftovers += any(path.suffix == ".tmp" for path in root.iterdir()) if root.exists() else 0
    assert len(os.listdir(root) if root.exists() else []) <= 6, os.listdir(root)
    finished += 1
    if call is not None and os.WIFEXITED(status):
        break
save(root, 1 << 40, state(-1), keep=1)
assert [path.name for path in root.iterdir()] == [f"step-{1 << 40}"], os.listdir(root)
print(json.dumps({"finished": finished, "saves": saves, "leftovers": leftovers}))
"""


def kill_writers(mode: str, root: Path, trials: int, seed: int) -> dict[str, int]:
    ran = subprocess.run(
        [sys.executable, "-c", KILLER, mode, str(root), str(trials), str(seed)],
        capture_output=True,
        text=True,
        timeout=60 + trials,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    result: dict[str, int] = json.loads(ran.stdout)
    return result


@pytest.mark.timeout(600)
def test_a_writer_killed_at_random_moments(tmp_path: Path) -> None:
    trials = TRIALS or 40
    result = kill_writers("random", tmp_path / "checkpoints", trials, seed=0)
    assert result["finished"] == trials
    assert result["leftovers"] > trials // 10, "hardly any writer was killed in the middle of its work"


@pytest.mark.timeout(600)
def test_a_thread_killed_while_the_state_goes_on_changing(tmp_path: Path) -> None:
    trials = TRIALS or 15
    result = kill_writers("thread", tmp_path / "checkpoints", trials, seed=1)
    assert result["finished"] == trials
    assert result["leftovers"] > trials // 10, "hardly any writer was killed in the middle of its work"


def test_a_writer_killed_before_each_of_its_calls(tmp_path: Path) -> None:
    result = kill_writers("calls", tmp_path / "checkpoints", 1000, seed=0)
    assert 50 < result["finished"] < 1000, "the last trial must be the one that gets through"


@pytest.mark.timeout(600)
def test_damaged_files_are_never_loaded_and_whole_ones_never_refused(tmp_path: Path) -> None:
    dice = random.Random(0)
    torch.manual_seed(0)
    root = tmp_path / "checkpoints"
    state = State(
        {"model.a": torch.randn(50), "model.b": torch.randn(3, 3).bfloat16(), "optimizer.m": torch.randn(50)},
        {"step": 2, "best": 0.25, "order": list(range(50))},
    )
    save(root, 1, State({}, {"step": 1}), keep=2)
    whole = save(root, 2, state, keep=2)
    files = sorted(whole.iterdir())
    assert len(files) == 4
    copy = tmp_path / "copy"
    for trial in range(TRIALS or 60):
        file = files[trial % len(files)]
        content = file.read_bytes()
        match dice.choice(["truncate", "flip", "flip many", "swap", "extend", "zero a block"]):
            case "truncate":
                damaged = content[: dice.randrange(len(content))]
            case "flip":
                damaged = flipped(content, [dice.randrange(len(content) * 8)])
            case "flip many":
                damaged = flipped(content, dice.sample(range(len(content) * 8), 16))
            case "swap":
                damaged = files[(trial + 1) % len(files)].read_bytes()
            case "extend":
                damaged = content + dice.randbytes(dice.randrange(1, 100))
            case _:
                start = dice.randrange(len(content) - 8)
                damaged = content[:start] + bytes(min(512, len(content) - start)) + content[start + 512 :]
        assert damaged != content
        shutil.copytree(root, copy)
        target = copy / "step-2" / file.name
        target.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="step-2"):
            load(copy / "step-2")
        newest = load_newest(copy)
        assert newest is not None
        assert (newest.step, [path.name for path, _ in newest.damaged]) == (1, ["step-2"])
        target.write_bytes(content)
        newest = load_newest(copy)
        assert newest is not None
        assert (newest.step, newest.damaged, newest.state.values) == (2, [], state.values)
        assert all(torch.equal(newest.state.tensors[name], tensor) for name, tensor in state.tensors.items())
        shutil.rmtree(copy)


def flipped(content: bytes, bits: list[int]) -> bytes:
    changed = bytearray(content)
    for bit in bits:
        changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    place = tmp_path / "small-disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def everything_in(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_a_full_disk_leaves_all_that_was_there(small_disk: Path) -> None:
    state = State({"model.x": torch.randn(120_000), "optimizer.m": torch.randn(50_000)}, {"note": "x" * 1000})
    for step in (1, 2):
        save(small_disk, step, state, keep=5)
    before = everything_in(small_disk)
    # Also the replacement of a step, and a disk that fills up at other places of the writing.
    for step, num_bytes in ((3, 0), (2, 0), (3, 300_000), (3, 599_000), (3, 610_000)):
        filler = small_disk / "filler"
        free_bytes = shutil.disk_usage(small_disk).free
        filler.write_bytes(bytes(free_bytes - num_bytes))
        with pytest.raises(StorageError, match=rf"cannot save the checkpoint .*step-{step}: No space left on device"):
            save(small_disk, step, state, keep=5)
        filler.unlink()
        assert everything_in(small_disk) == before
        assert {path.name for path in small_disk.iterdir()} == {"step-1", "step-2"}
    newest = load_newest(small_disk)
    assert newest is not None
    assert (newest.step, newest.damaged) == (2, [])


class DiskNet(nn.Module):
    """Has its run's checkpoints on a disk that is full in steps 4 to 8."""

    disk = run_dir = Path()

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.layers = nn.Sequential(nn.Linear(8, 6000), nn.ReLU(), nn.Linear(6000, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.steps += 1
            filler = self.disk / "filler"
            if self.steps in (4, 9):
                while any(thread.name == "cordee-checkpoint" for thread in threading.enumerate()):
                    time.sleep(0.01)  # the one before is being written
            if self.steps == 1:
                subprocess.run(["mount", "--bind", str(self.disk), str(self.run_dir / "checkpoints")], check=True)
            elif self.steps == 4:
                filler.write_bytes(bytes(shutil.disk_usage(self.disk).free))
            elif self.steps == 9:
                filler.unlink()
        outputs: Tensor = self.layers(inputs)
        return outputs


def test_training_goes_on_over_a_disk_that_is_full_for_a_while(small_disk: Path, tmp_path: Path) -> None:
    DiskNet.disk, DiskNet.run_dir = small_disk, tmp_path / "run"
    job = Job(
        model=Use(DiskNet),
        data={"use": "synthetic", "shape": [8], "num_classes": 3, "size": 80, "test_size": 10},
        optimizer={"use": "sgd", "lr": 0.01},
        training={"batch_size": 8, "steps": 10, "threads": 1},
        checkpoint={"every_steps": 3},
    )
    try:
        run = train(job, run_dir=tmp_path / "run", quiet=True)
    finally:
        subprocess.run(["umount", str(tmp_path / "run" / "checkpoints")], check=True)
    assert (run.status, run.summary.steps) == ("completed", 10)
    (warning,) = [event["message"] for event in run.events() if event["type"] == "warning"]
    assert re.match(r"checkpoint at step 6 was not saved: cannot save .*No space left on device", warning)
    assert [path.name for path in list_checkpoints(small_disk)] == ["step-3", "step-9", "step-10"]
    assert {path.name for path in small_disk.iterdir()} == {"step-3", "step-9", "step-10"}
    assert all(load(path) for path in list_checkpoints(small_disk))


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_an_export_to_a_full_disk_leaves_the_old_file(suffix: str, small_disk: Path) -> None:
    target = small_disk / f"net{suffix}"
    export(State({"model.x": torch.zeros(3)}, {}), target)
    before = target.read_bytes()
    with pytest.raises(StorageError, match="cannot export"):
        export(State({"model.x": torch.randn(1_000_000)}, {}), target)
    assert everything_in(small_disk) == {target.name: before}


def test_a_size_limit_is_like_a_full_disk(tmp_path: Path) -> None:
    script = """
import resource, signal, sys, torch
from pathlib import Path
from cordee.checkpoint import State, save
from cordee.core.errors import StorageError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
root = Path(sys.argv[1])
save(root, 1, State({"model.x": torch.ones(10)}, {}), keep=2)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    save(root, 2, State({"model.x": torch.ones(100_000)}, {}), keep=2)
except StorageError as error:
    print(error)
"""
    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert "step-2: File too large" in ran.stdout, ran.stderr
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-1"]
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
