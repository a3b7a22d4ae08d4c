"""The study of a search: what it draws, prunes and remembers, without a training."""

from __future__ import annotations

from pathlib import Path

import pytest

from cordee.core import Job
from cordee.core.errors import JobError
from cordee.tuning.results import best_so_far
from cordee.tuning.space import parse_search
from cordee.tuning.study import Study, Tried, open_study

JOB = Job(model="mlp", data="digits")
SPACE = parse_search(["optimizer.lr=log:1e-4..1e-1", "training.batch_size=int:16..50/16", "optimizer.use=adam|sgd"])


def opened(folder: Path) -> Study:
    study = open_study(folder, JOB, SPACE, "accuracy", "maximize", 0)
    study.prune_by_median(True)
    return study


def test_points_are_inside_and_a_search_that_continues_draws_others(tmp_path: Path) -> None:
    points = []
    for _ in range(3):
        study = opened(tmp_path)
        number = study.begin()
        points.append(study.point(number))
        study.complete(number, 0.5)
    assert all(1e-4 <= point["optimizer.lr"] <= 0.1 for point in points)
    assert {point["training.batch_size"] for point in points} <= {16, 32, 48}
    assert len({point["optimizer.lr"] for point in points}) == 3
    assert [trial.number for trial in opened(tmp_path).ended()] == [0, 1, 2]


def test_a_trial_under_way_is_found_again_with_its_values(tmp_path: Path) -> None:
    study = opened(tmp_path)
    number = study.begin()
    point = study.point(number)
    study.report(number, 1, 0.5)
    again = opened(tmp_path)  # as after kill -9
    assert again.unfinished() == [number]
    assert again.point(number) == point
    again.report(number, 1, 0.7)  # what was reported before stays
    again.complete(number, 0.8)
    (tried,) = opened(tmp_path).ended()
    assert (tried.value, tried.evaluations, tried.point) == (0.8, 1, point)
    assert opened(tmp_path).unfinished() == []


def test_a_trial_that_was_killed_before_its_values_were_drawn(tmp_path: Path) -> None:
    study = opened(tmp_path)
    study._study.ask()
    point = opened(tmp_path).point(0)
    assert point.keys() == {"optimizer.lr", "training.batch_size", "optimizer.use"}
    assert opened(tmp_path).point(0) == point


def test_a_trial_worse_than_the_median_is_pruned(tmp_path: Path) -> None:
    study = opened(tmp_path)
    for value in (0.8, 0.85, 0.9, 0.95):
        number = study.begin()
        for place in (1, 2, 3):
            assert not study.report(number, place, value)  # the first trials never are
        study.complete(number, value)
    bad, good = study.begin(), study.begin()
    assert not study.report(bad, 1, 0.1)  # nor is the first evaluation
    assert study.report(bad, 2, 0.1)
    study.report(good, 1, 0.99)
    assert not study.report(good, 2, 0.99)
    study.prune(bad)
    study.fail(good, "the loss is nan")
    ended = study.ended()
    assert [trial.state for trial in ended] == ["completed"] * 4 + ["pruned", "failed"]
    assert ended[-1].error == "the loss is nan"
    best = study.best()
    assert best is not None
    assert best.number == 3  # neither pruned nor failed ones count
    assert sum(study.importances().values()) == pytest.approx(1.0)


def test_without_pruning_none_is_pruned(tmp_path: Path) -> None:
    study = opened(tmp_path)
    study.prune_by_median(False)
    for value in (0.8, 0.85, 0.9, 0.95, 0.1):
        number = study.begin()
        for place in (1, 2, 3):
            assert not study.report(number, place, value)
        study.complete(number, value)


def test_another_search_in_the_folder_is_refused(tmp_path: Path) -> None:
    opened(tmp_path)
    with pytest.raises(JobError, match="has a search with --metric 'accuracy', not 'loss'"):
        open_study(tmp_path, JOB, SPACE, "loss", "maximize", 0)
    with pytest.raises(JobError, match="has a search with --search"):
        open_study(tmp_path, JOB, SPACE[:1], "accuracy", "maximize", 0)
    with pytest.raises(JobError, match=r"training\.batch_size was 32, is 8"):
        open_study(tmp_path, JOB.replace(["training.batch_size=8"]), SPACE, "accuracy", "maximize", 0)
    open_study(tmp_path, JOB.replace(["checkpoint.keep=9"]), SPACE, "accuracy", "maximize", 0)


def test_the_best_so_far() -> None:
    def tried(number: int, state: str, value: float | None) -> Tried:
        return Tried(number=number, state=state, value=value, point={}, evaluations=1, seconds=1.0)

    trials = [tried(0, "failed", None), tried(1, "completed", 0.5), tried(2, "pruned", 0.9), tried(3, "completed", 0.4)]
    assert best_so_far(trials, True) == [None, 0.5, 0.5, 0.5]
    assert best_so_far(trials, False) == [None, 0.5, 0.5, 0.4]
