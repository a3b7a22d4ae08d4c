"""Runs whose directory is on a disk that fills up, or becomes read-only, while they train: training continues."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import test_parameter_server_faults as dispatched
import test_team_faults as team

pytestmark = pytest.mark.timeout(400)
DISK_BYTES = 24_000_000
LONG = "training.epochs = 144"  # twelve times the usual: three processes are replaced, one after the other


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory, on which a run can be filled out."""
    with mounted("-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", place=tmp_path / "disk") as place:
        yield place


@pytest.fixture
def failing_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that `make_read_only` works on while files are open."""
    image = tmp_path / "image"
    image.touch()
    os.truncate(image, 2 * DISK_BYTES)
    made = subprocess.run(["mkfs.ext4", "-q", str(image)], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"a file system cannot be made here: {made.stderr.strip()}")
    with mounted("-o", "loop", str(image), place=tmp_path / "disk") as place:
        yield place


@contextlib.contextmanager
def mounted(*options: str, place: Path) -> Iterator[Path]:
    place.mkdir()
    done = subprocess.run(["mount", *options, str(place)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(disk: Path) -> Path:
    """Leave no room, not even for a byte at the end of a file that has a page of its own."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass
    with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(512)):
            pass
    return filler


def make_read_only(disk: Path) -> None:
    """What the kernel does with a disk that has errors."""
    subprocess.run(["mount", "-o", "remount,abort", str(disk)], check=False, capture_output=True)
    with pytest.raises(OSError, match="Read-only"):
        (disk / "probe").touch()


def said(run: Any) -> str:
    return "".join(Path(path).read_text() for path in (run.process.stdout, run.process.stderr))


def wait_until(condition: Callable[[], object], run: Any, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert run.process.poll() is None, run.process.communicate()
        assert time.monotonic() < deadline, said(run)
        time.sleep(0.05)


def kill_and_await_replacement(run: Any, pid: int) -> None:
    """The events file is full, so that the processes themselves have to be looked at."""
    assert run.process.poll() is None, run.process.communicate()
    launcher = psutil.Process(run.process.pid)
    before = {child.pid for child in launcher.children()}
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: {child.pid for child in launcher.children()} - before, run)
    time.sleep(2.0)  # for it to join


def test_a_team_trains_on_a_full_disk(small_disk: Path, undisturbed_team: str) -> None:
    with team.launch(small_disk) as run:
        run.wait_for_step(10)
        pids = run.pids()
        filler = fill(small_disk)
        wait_until(lambda: "events are not recorded" in said(run), run)
        kill_and_await_replacement(run, pids[1])
        filler.unlink()
        assert run.finish(timeout_s=200)[0] == 0
        assert run.summary()["weights_sha256"] == undisturbed_team
        assert run.summary()["recoveries"] == 1
        assert not run.survivors()


def test_a_dispatched_run_trains_on_a_full_disk(small_disk: Path, undisturbed_dispatched: str) -> None:
    run = dispatched.Launched(small_disk, "strategy.replicas = 2", LONG)
    run.wait_for_step(20)
    pids = {role: run.pids(role)[-1] for role in ("worker", "server", "evaluator")}
    filler = fill(small_disk)
    wait_until(lambda: "events are not recorded" in said(run), run)
    for pid in pids.values():
        kill_and_await_replacement(run, pid)
    filler.unlink()
    assert run.finish()["weights_sha256"] == undisturbed_dispatched


def test_a_team_trains_to_its_end_on_a_disk_that_becomes_read_only(failing_disk: Path) -> None:
    with team.launch(failing_disk) as run:
        run.wait_for_step(10)
        pids = run.pids()
        make_read_only(failing_disk)
        wait_until(lambda: "events are not recorded" in said(run), run)
        kill_and_await_replacement(run, pids[1])
        code, stderr = run.finish(timeout_s=200)
        assert code == 1
        assert f"step {team.STEPS}" in stderr and "ead-only file system" in stderr, stderr
        assert "Traceback" not in stderr
        assert not run.survivors()


def test_a_dispatched_run_trains_to_its_end_on_a_disk_that_becomes_read_only(failing_disk: Path) -> None:
    run = dispatched.Launched(failing_disk, "strategy.replicas = 2", LONG)
    run.wait_for_step(20)
    pids = {role: run.pids(role)[-1] for role in ("worker", "evaluator")}
    make_read_only(failing_disk)
    wait_until(lambda: "events are not recorded" in said(run), run)
    for pid in pids.values():
        kill_and_await_replacement(run, pid)
    stdout, stderr = run.process.communicate(timeout=200)
    assert run.process.returncode == 1
    assert f"step {12 * dispatched.NUM_STEPS} was reached" in stderr and "ead-only file system" in stderr, stderr
    assert "Traceback" not in stdout + stderr


@pytest.fixture(scope="module")
def undisturbed_team(tmp_path_factory: pytest.TempPathFactory) -> str:
    with team.launch(tmp_path_factory.mktemp("team"), "--strategy", "single", "--workers", "1") as run:
        assert run.finish(timeout_s=220)[0] == 0
        return str(run.summary()["weights_sha256"])


@pytest.fixture(scope="module")
def undisturbed_dispatched(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(dispatched.Launched(tmp_path_factory.mktemp("dispatched"), LONG).finish()["weights_sha256"])
