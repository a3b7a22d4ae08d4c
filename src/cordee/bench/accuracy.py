"""What the shipped job files reach: each is run as it is with seeds 0, 1, 2, …, and held against its goal.

The job files are not part of the installed package, so this runs in a checkout. Sets whose files are not on
the machine are reported as such.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from cordee.bench.harness import Report, describe_machine, goal_outcome
from cordee.core import Job
from cordee.core.errors import DataError, JobError
from cordee.data import FILE_SOURCES, find_files
from cordee.launch import train


class _Goal(NamedTuple):
    job: str
    accuracy: float
    most_rounds: int | None  # the larger sets take a minute or more each time


GOALS = (
    _Goal("iris", 0.95, None),
    _Goal("digits", 0.97, None),
    _Goal("mnist", 0.98, 3),
    _Goal("fashion_mnist", 0.89, 3),
)


def measure(*, rounds: int, say: Callable[[str], None]) -> Report:
    folder = find_examples()
    say(f"job files: {folder}")
    raw: dict[str, list[float]] = {}
    rows = []
    for goal in GOALS:
        path = folder / f"{goal.job}.toml"
        num_rounds = min(rounds, goal.most_rounds or rounds)
        if _has_data(path):
            accuracies, seconds = _run(path, num_rounds, say)
            raw[goal.job], raw[f"{goal.job}, seconds"] = accuracies, seconds
            rows.append(_row(goal, accuracies, seconds))
        else:
            say(f"{goal.job}: no files on this machine (cordee doctor says where they are looked for)")
            rows.append(_row(goal, [], []))
    settings = {"rounds": rounds, "goals": {goal.job: goal.accuracy for goal in GOALS}}
    return Report(
        "accuracy", describe_machine(), settings, raw, "share of the test set that is right, or seconds", rows
    )


def find_examples() -> Path:
    """Return the folder of the shipped job files: of the working folder, or of the checkout this code is in."""
    places = [Path.cwd() / "examples", Path(__file__).resolve().parents[3] / "examples"]
    for place in places:
        if all((place / f"{goal.job}.toml").is_file() for goal in GOALS):
            return place
    raise JobError(
        f"the job files to run are not in {' or '.join(map(str, places))}: "
        "run this benchmark in a checkout of Cordée, whose folder examples/ has them"
    )


def _has_data(path: Path) -> bool:
    use = Job.load(path).data.use
    if use not in FILE_SOURCES:
        return True
    try:
        find_files(use)
    except DataError:
        return False
    return True


def _run(path: Path, num_rounds: int, say: Callable[[str], None]) -> tuple[list[float], list[float]]:
    accuracies, seconds = [], []
    for seed in range(num_rounds):
        with tempfile.TemporaryDirectory(prefix="cordee-bench-") as folder:
            run = train(path, overrides=[f"seed={seed}"], run_dir=Path(folder) / "run", quiet=True)
        accuracy, spent_s = run.summary.test_accuracy, run.summary.wall_seconds
        assert accuracy is not None and spent_s is not None
        accuracies.append(accuracy)
        seconds.append(spent_s)
        say(f"{path.stem}, seed {seed}: {accuracy:.4f} in {spent_s:.1f} s")
    return accuracies, seconds


def _row(goal: _Goal, accuracies: list[float], seconds: list[float]) -> dict[str, Any]:
    outcome = goal_outcome(min(accuracies) >= goal.accuracy) if accuracies else "no files"
    return {
        "job": goal.job,
        "runs": len(accuracies),
        "goal": goal.accuracy,
        "lowest": min(accuracies, default=None),
        "median": statistics.median(accuracies) if accuracies else None,
        "outcome": outcome,
        "median_seconds": statistics.median(seconds) if seconds else None,
    }
