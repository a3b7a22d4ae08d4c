"""`cordee bench reproducible` at its smallest: that it measures, not what."""

from __future__ import annotations

from multiprocessing import forkserver

import pytest

from cordee.bench import reproducible
from cordee.core import Job

MODES = [(model, is_reproducible) for model in reproducible._WORK for is_reproducible in (False, True)]


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    """It outlives what it forks, and serves the tests after this one."""
    forkserver.ensure_running()


@pytest.mark.parametrize(("model", "is_reproducible"), MODES)
def test_every_job_is_one(model: str, is_reproducible: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Job] = []
    monkeypatch.setattr(reproducible, "train_for_ever", lambda job, place, clock: jobs.append(job))
    reproducible._train(reproducible.Place(0, 2, ""), None, model=model, is_reproducible=is_reproducible)  # type: ignore[arg-type]
    (job,) = jobs
    assert (job.training.reproducible, job.strategy.workers, job.training.threads) == (is_reproducible, 2, 1)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_both_modes_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    use, data, _ = reproducible._WORK["mlp"]
    monkeypatch.setattr(reproducible, "_WORK", {"mlp": (use, data, 2)})
    said: list[str] = []
    report = reproducible.measure(rounds=1, say=said.append)
    assert [(row["model"], row["workers"]) for row in report.rows] == [("mlp", 1), ("mlp", 2)]
    assert all(row["takes_times_as_long"] > 0 for row in report.rows) and len(report.raw) == 4 and said
