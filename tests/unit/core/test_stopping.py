"""Every stop policy, and the state of patience."""

from __future__ import annotations

import math

import msgspec
import pytest

from cordee.core.settings import Stop
from cordee.core.stopping import Get, Patience, StopPolicy


def found(loss: float, accuracy: float | None, **named: float) -> Get:
    """Return what an evaluation measured."""
    return {"loss": loss, "accuracy": accuracy, **named}.get


def test_nothing_set_stops_nothing() -> None:
    policy = StopPolicy(Stop())
    assert policy.after_step(10**9, is_time_up=policy.is_time_up(1e9)) is None
    assert policy.after_evaluation(found(0.0, 1.0)) is None


def test_steps() -> None:
    policy = StopPolicy(Stop(steps=3))
    assert [policy.after_step(step, is_time_up=False) for step in (1, 2, 3, 4)] == [None, None, "steps", "steps"]


def test_time() -> None:
    policy = StopPolicy(Stop(time="1m"))
    assert [policy.is_time_up(elapsed_s) for elapsed_s in (0.0, 59.9, 60.0)] == [False, False, True]
    assert policy.after_step(1, is_time_up=True) == "time"
    assert StopPolicy(Stop(time=0.5)).is_time_up(0.5)


def test_accuracy_and_loss_are_reached_and_not_passed() -> None:
    policy = StopPolicy(Stop(accuracy=0.9, loss=0.1))
    assert policy.after_evaluation(found(0.11, 0.899)) is None
    assert policy.after_evaluation(found(0.11, 0.9)) == "accuracy"
    assert policy.after_evaluation(found(0.1, 0.5)) == "loss"
    assert policy.after_evaluation(found(0.1, None)) == "loss"


def test_patience_counts_evaluations_since_the_best() -> None:
    policy = StopPolicy(Stop(patience=2))
    reasons = [policy.after_evaluation(found(1.0, accuracy)) for accuracy in (0.5, 0.5, 0.6, 0.6, 0.55)]
    assert reasons == [None, None, None, None, "patience"]
    assert policy.patience == Patience(best=0.6, evaluations_since=2)


def test_patience_looks_at_the_loss_where_there_is_no_accuracy() -> None:
    policy = StopPolicy(Stop(patience=1))
    assert [policy.after_evaluation(found(loss, None)) for loss in (1.0, 0.5, 0.5)] == [None, None, "patience"]


def test_a_loss_that_is_not_a_number_is_never_the_best() -> None:
    policy = StopPolicy(Stop(patience=2))
    assert [policy.after_evaluation(found(loss, None)) for loss in (math.nan, 1.0, math.nan, 1.0)] == [None] * 3 + [
        "patience"
    ]


def test_patience_goes_on_from_its_saved_state() -> None:
    first, second = StopPolicy(Stop(patience=2)), StopPolicy(Stop(patience=2))
    for accuracy in (0.5, 0.4):
        first.after_evaluation(found(1.0, accuracy))
    second.patience = msgspec.convert(msgspec.to_builtins(first.patience), Patience)
    assert second.after_evaluation(found(1.0, 0.5)) == "patience"


def test_asking_again_changes_nothing() -> None:
    policy = StopPolicy(Stop(patience=1, accuracy=0.9))
    policy.after_evaluation(found(1.0, 0.5))
    before = policy.patience
    assert policy.stop_reason(found(1.0, 0.5)) is None
    assert policy.stop_reason(found(1.0, 0.95)) == "accuracy"
    assert policy.patience == before


@pytest.mark.parametrize("accuracy", [0.9, 0.95])
def test_what_was_reached_comes_before_patience(accuracy: float) -> None:
    policy = StopPolicy(Stop(patience=1, accuracy=0.9))
    policy.after_evaluation(found(1.0, 0.99))
    assert policy.after_evaluation(found(1.0, accuracy)) == "accuracy"


def test_metrics_are_reached_from_their_own_side() -> None:
    policy = StopPolicy(Stop(metrics={"f1": 0.9, "mae": 0.1}), lower_is_better=frozenset({"loss", "mae"}))
    assert policy.after_evaluation(found(1.0, None, f1=0.89, mae=0.11)) is None
    assert policy.after_evaluation(found(1.0, None, f1=0.9, mae=0.2)) == "metrics.f1"
    assert policy.after_evaluation(found(1.0, None, f1=0.1, mae=0.1)) == "metrics.mae"
    assert policy.after_evaluation(found(1.0, None, f1=math.nan, mae=math.nan)) is None


def test_patience_by_a_metric_of_which_less_is_better() -> None:
    policy = StopPolicy(Stop(patience=2, patience_metric="mae"), lower_is_better=frozenset({"loss", "mae"}))
    values = (0.5, 0.6, 0.4, math.nan, 0.4)
    reasons = [policy.after_evaluation(found(-step, step / 9, mae=mae)) for step, mae in enumerate(values)]
    assert reasons == [None, None, None, None, "patience"]
