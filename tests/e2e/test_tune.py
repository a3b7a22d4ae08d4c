"""`cordee tune` on real trainings: pruning, best.toml, kill -9 and Ctrl-C, and what is refused."""

from __future__ import annotations

import csv
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cordee.core import Job

JOB = """
seed = 1
[model]
use = "mlp"
hidden = [16]
[data]
use = "digits"
[optimizer]
use = "adam"
lr = 0.003
[training]
batch_size = 64
epochs = 4
"""
# Trials are processes of their own, which take long to start on a busy machine.
pytestmark = pytest.mark.timeout(900)
SEARCH = ("--search", "optimizer.lr=log:1e-5..1e-1", "--search", "optimizer.use=adam|sgd")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "cordee", "tune", *arguments]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CORDEE_RUNS": str(folder / "runs")}
    return subprocess.run(command(*arguments), cwd=folder, env=environment, text=True, capture_output=True, timeout=300)


def states(study: Path) -> list[str]:
    with sqlite3.connect(study / "study.db") as database:
        return [state for (state,) in database.execute("select state from trials order by number")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(JOB)
    return tmp_path


@pytest.mark.long
def test_a_search_is_killed_and_continues(folder: Path) -> None:
    """Six trials; the tuner is killed with trials under way, and the same command finishes them."""
    study = folder / "runs" / "tune-small"
    environment = {**os.environ, "CORDEE_RUNS": str(folder / "runs")}
    # Steps that take a while, so that the kill comes in the middle of trials.
    slow = ("--set", "training.epochs=40", "--trials", "6", "--no-prune")
    first = subprocess.Popen(command("small.toml", *SEARCH, *slow), cwd=folder, env=environment)
    deadline_s = time.monotonic() + 240
    try:
        while not list(study.glob("trial-*/events.jsonl")):
            assert time.monotonic() < deadline_s
            assert first.poll() is None
            time.sleep(0.05)
    finally:
        first.kill()
        first.wait()
    assert "RUNNING" in states(study)
    begun = len(states(study))

    done = run(folder, "small.toml", *SEARCH, *slow)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "continues: " in done.stdout
    assert states(study) == ["COMPLETE"] * 6, (begun, states(study))
    rows = list(csv.DictReader((study / "trials.csv").read_text().splitlines()))
    assert [row["trial"] for row in rows] == [str(number) for number in range(6)]
    assert len({row["optimizer.lr"] for row in rows}) == 6  # a search that continues does not repeat its draws
    assert sorted(path.name for path in study.glob("trial-*")) == [f"trial-{number:04d}" for number in range(6)]

    # The best job is the one of the best trial, and it trains to what the trial measured.
    best = max(rows, key=lambda row: float(row["accuracy"]))
    job = Job.load(study / "best.toml")
    assert job.optimizer.args["lr"] == float(best["optimizer.lr"])
    assert job.optimizer.use == best["optimizer.use"]
    assert (study / "report.html").read_text().count("optimizer.lr") > 6
    assert (study / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "importance: " in done.stdout

    # Another search or job in the same folder is refused.
    other = run(folder, "small.toml", "--search", "optimizer.lr=log:1e-5..1e-2", *slow)
    assert other.returncode == 2
    assert "has a search with --search" in other.stderr
    other = run(folder, "small.toml", *SEARCH, *slow, "--set", "training.batch_size=32")
    assert other.returncode == 2
    assert "training.batch_size was 64, is 32" in other.stderr


@pytest.mark.long
def test_hopeless_trials_are_pruned_and_ctrl_c_is_clean(folder: Path) -> None:
    study = folder / "runs" / "tune-small"
    environment = {**os.environ, "CORDEE_RUNS": str(folder / "runs")}
    rest = ("--set", "training.epochs=40", "--trials", "9", "--at-once", "1")
    process = subprocess.Popen(
        command("small.toml", *SEARCH, *rest), cwd=folder, env=environment, text=True, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.readline()  # the first trial has ended, and the second begins
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "the same command continues the search" in said
    assert subprocess.run(["pgrep", "-f", str(study)], capture_output=True).returncode == 1  # no trial is left behind

    done = run(folder, "small.toml", *SEARCH, *rest)
    assert done.returncode == 0, done.stdout + done.stderr
    assert states(study).count("COMPLETE") + states(study).count("PRUNED") == 9
    assert "PRUNED" in states(study), done.stdout
    assert "pruned after" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--search", "optimizer.lr=log:0..1"), "the lower bound must be above 0"),
        (("--search", "optimizer.nonsense=1|2"), "with optimizer.nonsense=1 the job cannot be run"),
        (("--search", "training.batch_sise=int:1..2"), "did you mean 'batch_size'"),
        (("--search", "training.batch_size=int:0..8"), "training.batch_size = 0 must be at least 1"),
        (("--search", "optimizer.lr=1|2", "--metric", "f1"), "--metric names the metric 'f1', which is not measured"),
        (("--search", "optimizer.lr=1|2", "--trials", "0"), "--trials 0 must be at least 1"),
    ],
)
def test_bad_input(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    done = run(folder, "small.toml", *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(folder.glob("runs/tune-small/trial-*"))


def test_a_damaged_study_is_named(folder: Path) -> None:
    study = folder / "runs" / "tune-small"
    study.mkdir(parents=True)
    (study / "study.db").write_bytes(b"this is no database, but long enough to be read as one" * 100)
    done = run(folder, "small.toml", "--search", "optimizer.lr=1|2")
    assert done.returncode == 2
    assert "study.db is not a study that can be read" in done.stderr
