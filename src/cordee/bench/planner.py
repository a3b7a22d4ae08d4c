"""What the planner predicts beside what runs then take: every model, strategy and number of workers.

Each model is profiled anew, and right after that run by `cordee.train` in each of the ways that were predicted, with
the settings the planner thought best. A step's time is the median over windows of the run, the first left out.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from cordee.bench.report import Report, describe_machine
from cordee.core import Job
from cordee.core.errors import CordeeError
from cordee.launch import train
from cordee.planner import Plan, Prediction
from cordee.planner.search import OTHER_TRAINING
from cordee.planning import plan

WORKERS = (1, 2, 4)
WINDOWS = 6  # that a run is cut into
RUN_S = 4.0  # that a run should train for
LEAST_STEPS, MOST_STEPS = 12, 600
NEAR = 0.05  # a choice this near to the best one measured is as good


class Case(NamedTuple):
    """A job to predict and to run."""

    name: str
    model: dict[str, Any]
    data: dict[str, Any]
    batch_size: int


_IMAGES = {"use": "synthetic", "shape": [3, 32, 32], "num_classes": 10, "size": 4096, "test_size": 0}
_TOKENS = {"use": "synthetic", "kind": "tokens", "shape": [64], "num_classes": 256, "size": 2048, "test_size": 0}
_GREY = {"use": "synthetic", "shape": [1, 28, 28], "num_classes": 10, "size": 8192, "test_size": 0}
CASES = (
    Case("mlp", {"use": "mlp", "hidden": [1024, 1024]}, _GREY, 128),
    Case("lenet", {"use": "lenet"}, _GREY, 128),
    Case("resnet20", {"use": "resnet", "depth": 20}, _IMAGES, 64),
    Case("wide_resnet", {"use": "wide_resnet", "depth": 10, "widen_factor": 2}, _IMAGES, 32),
    Case("gpt", {"use": "gpt", "num_layers": 4, "embedding_width": 128}, _TOKENS, 32),
)


def measure(*, rounds: int, say: Callable[[str], None]) -> Report:
    """Predict and run all cases; for `cordee bench planner`. `rounds` runs of each way, their median counts."""
    return run(rounds=min(rounds, 3), say=say)


def run(
    *,
    rounds: int = 1,
    cases: Sequence[Case] = CASES,
    workers: Sequence[int] = WORKERS,
    strategies: Sequence[str] | None = None,
    run_s: float = RUN_S,
    budget_s: float = 4.0,
    say: Callable[[str], None] = lambda _: None,
) -> Report:
    """Return the report. A way that fails is told and left out."""
    rows: list[dict[str, Any]] = []
    raw: dict[str, list[float]] = {}
    near = []
    for case in cases:
        job = job_of(case)
        say(f"{case.name}: profiling")
        made = plan(job, workers=max(workers), fresh=True, budget_s=budget_s)
        found: dict[tuple[str, int], float] = {}
        for prediction in _to_run(made, workers, strategies):
            key = f"{case.name}, {prediction.strategy}, {prediction.workers}"
            try:
                figures = [_run_one(job, prediction, run_s) for _ in range(rounds)]
            except CordeeError as error:
                say(f"{key}: left out: {error}")
                continue
            measured_s = statistics.median(figures)
            found[prediction.strategy, prediction.workers] = measured_s
            raw[key] = [1e3 * figure for figure in figures]
            rows.append(_row(case, prediction, measured_s))
            say(f"{key}: {1e3 * prediction.step_s:.3g} ms predicted, {1e3 * measured_s:.3g} ms measured")
        near.append(_is_near(made, found))
    rows += _verdicts(rows, near)
    settings = {
        "rounds": rounds,
        "workers": list(workers),
        "run_seconds": run_s,
        "cases": [msgspec.to_builtins(case._asdict()) for case in cases],
    }
    return Report("planner", describe_machine(), settings, raw, "ms", rows)


def job_of(case: Case) -> Job:
    return Job.from_dict(
        {
            "name": case.name,
            "model": case.model,
            "data": case.data,
            "optimizer": {"use": "sgd", "lr": 0.001, "momentum": 0.9},
            "training": {"batch_size": case.batch_size, "steps": MOST_STEPS},
            "evaluation": {"every_epochs": 0},
            "checkpoint": {"every_steps": 0},
        }
    )


def _to_run(made: Plan, workers: Sequence[int], strategies: Sequence[str] | None) -> list[Prediction]:
    """Return the predictions of ways that can be run, the smallest crowds first."""
    able = [
        p
        for p in made.predictions
        if p.strategy in (strategies or made.available)
        and p.strategy in made.available
        and p.strategy not in OTHER_TRAINING
        and p.workers in workers
    ]
    return sorted(able, key=lambda p: (p.workers, p.strategy))


def _run_one(job: Job, prediction: Prediction, run_s: float) -> float:
    """Return the seconds of a step in a run of its own."""
    steps = max(LEAST_STEPS, min(MOST_STEPS, round(run_s / prediction.step_s)))
    changes = {
        "training": msgspec.structs.replace(job.training, steps=steps),
        "monitoring": msgspec.structs.replace(job.monitoring, every_steps=max(1, steps // WINDOWS)),
        "strategy": msgspec.structs.replace(
            job.strategy, name=prediction.strategy, workers=prediction.workers, settings=prediction.settings
        ),
    }
    with tempfile.TemporaryDirectory(prefix="cordee-bench-") as folder:
        done = train(msgspec.structs.replace(job, **changes), run_dir=Path(folder) / "run", quiet=True)
        rates = [event["samples_per_second"] for event in done.events() if event["type"] == "step"]
    # The first event is that of the first step, the second window has what warms up.
    steady = rates[2:] or rates
    if not steady:
        assert done.summary.step_seconds is not None
        return done.summary.step_seconds
    return float(job.training.batch_size / statistics.median(steady))


def _row(case: Case, prediction: Prediction, measured_s: float) -> dict[str, Any]:
    return {
        "model": case.name,
        "strategy": prediction.label,
        "workers": prediction.workers,
        "predicted_ms": 1e3 * prediction.step_s,
        "measured_ms": 1e3 * measured_s,
        "error": prediction.step_s / measured_s - 1,
        "goal": None,
        "outcome": "",
    }


def _is_near(made: Plan, found: dict[tuple[str, int], float]) -> bool | None:
    """Return whether the way that was chosen is as good as the best one that was run."""
    if made.choice is None or (made.choice.strategy, made.choice.workers) not in found:
        return None
    return found[made.choice.strategy, made.choice.workers] <= min(found.values()) * (1 + NEAR)


def _verdicts(rows: Sequence[dict[str, Any]], near: Sequence[bool | None]) -> list[dict[str, Any]]:
    errors = sorted(abs(row["error"]) for row in rows)
    known = [is_near for is_near in near if is_near is not None]
    if not errors:
        return []
    at_90 = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
    verdicts = [
        _verdict("median error", statistics.median(errors), 0.10, is_most=True),
        _verdict("error at 90 %", at_90, 0.25, is_most=True),
    ]
    if known:
        verdicts.append(_verdict("choices within 5 % of the best", sum(known) / len(known), 0.90, is_most=False))
    return verdicts


def _verdict(what: str, value: float, goal: float, *, is_most: bool) -> dict[str, Any]:
    is_reached = value <= goal if is_most else value >= goal
    return {
        "model": "all",
        "strategy": what,
        "workers": None,
        "predicted_ms": None,
        "measured_ms": None,
        "error": value,
        "goal": goal,
        "outcome": "reached" if is_reached else "MISSED",
    }
