"""Run directories and checkpoints in a bad state: what is told, what is kept, and that training still ends right."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from workspace import (
    STEPS,
    Workspace,
    assert_ended_well,
    assert_refused,
    contents,
    settings,
    summary,
    warnings_of,
)

pytestmark = pytest.mark.timeout(300)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def test_an_unwritable_run_directory_is_told(workspace: Workspace) -> None:
    (workspace.path / "file").write_text("in the way")
    done = workspace.train(run_dir="file/run")
    assert_refused(done, 2, "file/run", "not a directory", "--run-dir")
    assert (workspace.path / "file").read_text() == "in the way"


def test_a_run_directory_that_holds_a_run_is_left_alone(half_done: Path, workspace: Workspace) -> None:
    before = contents(half_done)
    assert_refused(workspace.train(), 2, str(half_done), "holds a run already", "--resume")
    assert contents(half_done) == before


def test_a_run_directory_in_use_is_left_alone(workspace: Workspace) -> None:
    with workspace.started("train", "job.toml", "--run-dir", "run", TEST_HANG_AT="12") as process:
        workspace.wait_for_step(process, 11)
        for arguments in (["--resume"], []):
            done = workspace.train(*arguments)
            if arguments:
                assert_refused(done, 2, "is in use by process", str(process.pid), "--run-dir")
            else:
                assert_refused(done, 2, "run")
        listed = json.loads(workspace.run("runs", ".", "--json").stdout)
        assert [run["state"] for run in listed] == ["running"]
        assert process.poll() is None


def test_nothing_to_resume_is_told(workspace: Workspace) -> None:
    assert_refused(workspace.train("--resume", run_dir="rum"), 2, "there is no run directory", "rum")
    assert_refused(workspace.run("train", "job.toml", "--resume"), 2, "no run of 'tiny'", "--run-dir")
    (workspace.path / "empty").mkdir()
    assert_refused(workspace.train("--resume", run_dir="empty"), 2, "is not a run directory")
    assert list((workspace.path / "empty").iterdir()) == []


def test_a_run_that_nobody_can_join_says_why(half_done: Path, workspace: Workspace) -> None:
    assert_refused(workspace.run("join", "nowhere"), 2, "no run directory 'nowhere', and no run of this name in runs")
    assert_refused(workspace.run("join", "./nowhere"), 2, "there is no run directory and no ticket 'nowhere'")
    assert_refused(workspace.run("join", str(half_done)), 2, "it has ended, or it trains in one process")
    assert_refused(workspace.run("scale", str(half_done), "2"), 2, "it has ended, or it trains in one process")


def test_a_changed_job_is_not_resumed(half_done: Path, workspace: Workspace) -> None:
    before = contents(half_done)
    done = workspace.train("--resume", *settings(optimizer__lr=0.02, seed=3))
    assert_refused(done, 2, "optimizer.lr was 0.01, is 0.02", "seed was 0, is 3")
    assert "stop.steps" not in done.stderr, "that may be changed"
    assert contents(half_done) == before


def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    half_done: Path, reference_sha256: str, workspace: Workspace
) -> None:
    flip_a_bit(half_done / "checkpoints" / "step-45" / "model.safetensors")
    done = workspace.train("--resume")
    assert_ended_well(done)
    (warning,) = warnings_of(half_done)
    assert f"warning: {warning}" in done.stdout
    for fact in ("step-45", "damaged", "SHA-256", "using step-40"):
        assert fact in warning
    assert "continues after step 40" in done.stdout
    assert summary(half_done)["weights_sha256"] == reference_sha256


def test_damage_to_all_checkpoints_ends_the_attempt_and_touches_nothing(half_done: Path, workspace: Workspace) -> None:
    for checkpoint in (half_done / "checkpoints").iterdir():
        flip_a_bit(checkpoint / "model.safetensors")
    before = contents(half_done / "checkpoints")
    done = workspace.train("--resume")
    assert_refused(done, 1, "step-45", "step-40", "step-30")
    assert contents(half_done / "checkpoints") == before


def test_an_attempt_that_fails_before_it_saves_leaves_the_job_as_it_was(half_done: Path, workspace: Workspace) -> None:
    """The hint names this file: it would fail again with what was changed for the attempt."""
    before = (half_done / "job.toml").read_bytes()
    for path in (half_done / "checkpoints").glob("*/model.safetensors"):
        flip_a_bit(path)
    done = workspace.train("--resume", *settings(checkpoint__keep=7))
    assert done.returncode == 1
    assert (half_done / "job.toml").read_bytes() == before


def test_a_run_without_a_checkpoint_starts_again(half_done: Path, reference_sha256: str, workspace: Workspace) -> None:
    shutil.rmtree(half_done / "checkpoints")
    done = workspace.train("--resume")
    assert_ended_well(done)
    assert "no checkpoint yet" in done.stdout
    assert summary(half_done)["weights_sha256"] == reference_sha256


@pytest.fixture
def small_disk(workspace: Workspace) -> Iterator[Path]:
    """A file system of 1 MB."""
    place = workspace.path / "small-disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def fill(disk: Path, leave_bytes: int) -> Path:
    filler = disk / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(disk).free - leave_bytes))
    return filler


def test_a_full_disk_is_told_before_training(small_disk: Path, workspace: Workspace) -> None:
    fill(small_disk, leave_bytes=0)
    done = workspace.train(run_dir=small_disk / "run")
    assert_refused(done, 2, str(small_disk / "run"), "no space left on device", "--run-dir")
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def test_a_disk_that_fills_up_costs_checkpoints_and_nothing_else(
    small_disk: Path, reference_sha256: str, workspace: Workspace
) -> None:
    run = small_disk / "run"
    filler = fill(small_disk, leave_bytes=220_000)  # room for a few checkpoints of 70 kB, not for the events as well
    done = workspace.train(*settings(checkpoint__keep=100), run_dir=run)
    assert "warning: checkpoint at step 100 was not saved" in done.stdout, "it continues as long as it can"
    facts = (
        "step 120 was reached",
        "could not be saved",
        "No space left on device",
        "--resume continues after step-20",
    )
    assert_refused(done, 1, *facts)
    assert re.search(rf"this continues from step-20\n  cordee train \S+ --resume --run-dir {run}\n", done.stdout)
    assert summary(run)["status"] == "failed"
    assert not list(run.rglob("*.tmp")), "half-written files take room that is needed"
    kept = sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").iterdir())
    assert kept and kept[0] == 10 and len(kept) < STEPS // 10
    # With room again the run continues from the last whole checkpoint, to the same end.
    filler.unlink()
    again = workspace.train("--resume", *settings(checkpoint__keep=3), run_dir=run)
    assert again.returncode == 0, again.stderr
    assert summary(run)["weights_sha256"] == reference_sha256
