"""Groups, frozen parameters, schedulers of torch, averaged weights and recomputation: every strategy as `single`.

Weights differ by the order of sums in single precision only; rates are the same bits. Each job is interrupted half-way
and continued, by other processes' objects, which must not be seen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from driving import Outcome, StopAt, Table, job, largest_difference, train_alone, train_together
from process_pool import ProcessPool

import cordee
from cordee.core import Job
from cordee.monitoring import read_events

pytestmark = pytest.mark.timeout(150)

TOLERANCE = 2e-5  # single precision, 15 steps with momentum
STRATEGIES = ["data_parallel", "sharded", "pipeline", "tensor"]
GROUPS = [{"match": "bias", "weight_decay": 0.0, "lr": 0.02}]
ONE_CYCLE: Table = {"use": "OneCycleLR", "max_lr": [0.2, 0.05]}
PLATEAU: Table = {"use": "ReduceLROnPlateau", "metric": "f1", "factor": 0.5, "patience": 0, "threshold": 0.3}


def table(schedule: Table, **training: Any) -> Table:
    return job(
        model={"use": "mlp", "hidden": [24, 16, 24, 16]},
        optimizer={"use": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "groups": GROUPS},
        schedule=schedule,
        metrics={"f1": "f1", "median": {"use": "odd_data:median_margin", "better": "higher"}},
        training={"steps": 15, "ema": 0.8, "freeze": ["^linear2.bias"], **training},
        evaluation={"every_steps": 3},
        checkpoint={"every_steps": 0, "keep_best": "median"},
    )


def rates(outcome: Outcome) -> list[float]:
    return [event["lr"] for event in outcome.of("step")]


def check(alone: Outcome, together: Outcome) -> None:
    assert largest_difference(alone, together) <= TOLERANCE
    assert rates(alone) == rates(together)
    ours, theirs = together.of("evaluation"), alone.of("evaluation")
    assert [event["step"] for event in ours] == [event["step"] for event in theirs]
    for own, single in zip(ours, theirs, strict=True):  # of the averages
        assert own["test_loss"] == pytest.approx(single["test_loss"], rel=1e-5)
        assert own["metrics"] == pytest.approx(single["metrics"], rel=1e-4, abs=1e-6)
    assert together.summary.best_step == alone.summary.best_step


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("schedule", [ONE_CYCLE, PLATEAU], ids=["one-cycle", "plateau"])
def test_as_single(two: ProcessPool, tmp_path: Path, name: str, schedule: Table) -> None:
    alone = train_alone(table(schedule), tmp_path / "alone")
    assert len(set(rates(alone))) >= 3, "the schedule changes nothing"
    mine = {**table(schedule), "strategy": {"name": name}}
    check(alone, train_together(two, mine, tmp_path / "together")[0])


@pytest.mark.parametrize("schedule", [ONE_CYCLE, PLATEAU], ids=["one-cycle", "plateau"])
def test_resumed_by_another_strategy(two: ProcessPool, tmp_path: Path, schedule: Table) -> None:
    alone = train_alone(table(schedule), tmp_path / "alone")
    sharded = {**table(schedule), "strategy": {"name": "sharded"}}
    train_together(two, sharded, tmp_path / "run", stop_at=StopAt(1, 8 + 2 * 5))  # after some step of the eighth on
    resumed = train_alone(table(schedule), tmp_path / "run", resume=True)
    assert 0 < len(rates(resumed)) < 15
    assert largest_difference(alone, resumed) <= TOLERANCE
    assert rates(resumed) == rates(alone)[-len(rates(resumed)) :]
    assert resumed.of("evaluation")[-1]["test_loss"] == pytest.approx(alone.of("evaluation")[-1]["test_loss"], rel=1e-5)


@pytest.mark.parametrize("name", STRATEGIES)
def test_recomputation_changes_nothing(two: ProcessPool, tmp_path: Path, name: str) -> None:
    settings = {"model": {"use": "mlp", "hidden": [24, 16, 24, 16], "dropout": 0.2}, "strategy": {"name": name}}
    plain = train_together(two, {**table(ONE_CYCLE), **settings}, tmp_path / "plain")[0]
    again = train_together(two, {**table(ONE_CYCLE, recompute=True), **settings}, tmp_path / "again")[0]
    assert largest_difference(plain, again) == 0.0


@pytest.mark.parametrize("staleness", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("schedule", [ONE_CYCLE, PLATEAU], ids=["one-cycle", "plateau"])
def test_parameter_servers(tmp_path: Path, schedule: Table, staleness: int) -> None:
    """Reproducible servers have the bits of `single`, and asynchronous ones its rates."""
    training = {"reproducible": True} if staleness == 0 else {}
    alone = train_alone(table(schedule, **training), tmp_path / "alone")
    strategy = {"name": "parameter_server", "workers": 2, "servers": 2, "staleness": staleness}
    mine = Job.from_dict({**table(schedule, **training), "strategy": strategy})
    run = cordee.train(mine, run_dir=tmp_path / "run", quiet=True)
    found = list(read_events(run.directory / "events.jsonl"))
    if schedule is ONE_CYCLE or staleness == 0:
        assert [event["lr"] for event in found if event["type"] == "step"] == rates(alone)
    if staleness == 0:
        assert run.summary.weights_sha256 == alone.summary.weights_sha256
        assert run.summary.metrics == alone.summary.metrics
        losses = [event["test_loss"] for event in found if event["type"] == "evaluation"]
        assert losses == [event["test_loss"] for event in alone.of("evaluation")]
