"""`cordee doctor --gpus`: what it trains, what it makes of the outcome, and what it says without a GPU."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cordee.bench import gpu_check
from cordee.bench.gpu_check import examine_gpus, judge_loss, judge_speed
from cordee.cli.app import app
from cordee.cluster import Team
from cordee.compute import devices
from cordee.core.errors import TrainingError
from cordee.training.components import assemble


def test_without_a_gpu_it_says_so_and_fails(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    (finding,) = examine_gpus(report, lambda doing: None)
    assert finding.state == "problem" and "no GPU" in finding.detail
    assert not report.exists()
    outcome = CliRunner().invoke(app, ["doctor", "--gpus", "--report", str(report)])
    assert outcome.exit_code == 1 and "there is no GPU to check" in outcome.output


def test_it_is_one_check_at_a_time() -> None:
    outcome = CliRunner().invoke(app, ["doctor", "--gpus", "--engine", "local"])
    assert outcome.exit_code and "different checks" in str(outcome.exception)


@pytest.mark.parametrize("num_gpus", [1, 2, 3, 8])
def test_the_jobs_can_be_trained(num_gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "num_gpus", lambda: num_gpus)
    jobs = gpu_check._jobs(num_gpus)
    assert len({label for label, _ in jobs}) == len(jobs)
    for _, job in jobs:
        workers = job.strategy.workers
        assert workers <= num_gpus
        parts = assemble(job, Team(workers - 1, workers, num_local_workers=workers, local_rank=workers - 1))
        assert (parts.computation.device.type, parts.computation.device.index) == ("cuda", workers - 1)


def test_losses_are_compared_with_the_cpu() -> None:
    assert judge_loss("a", 0.52, 0.5, 10.0).state == "ok"
    assert judge_loss("a", 0.6, 0.5, 10.0).state == "problem"
    assert judge_loss("a", math.nan, 0.5, 10.0).state == "problem"


def test_speed_is_the_median_of_rounds_in_turn() -> None:
    assert judge_speed([100.0, 50.0, 90.0], [100.0, 100.0, 100.0]).state == "ok"
    assert judge_speed([50.0, 50.0, 90.0], [100.0, 100.0, 100.0]).state == "note"


def test_a_run_is_trained_and_read(tmp_path: Path) -> None:
    job = gpu_check.job_of("single", 1, "cpu", {}, steps=3)
    loss, rate = gpu_check._train(job, tmp_path / "run")
    assert math.isfinite(loss) and rate > 0


def test_a_run_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="sees no GPU"):
        gpu_check._train(gpu_check.job_of("single", 1, "cuda", {}, steps=3), tmp_path / "run")
