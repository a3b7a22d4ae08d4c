"""What is made of the figures of `cordee bench planner`: errors, goals, choices. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from cordee.bench.harness import goal_outcome
from cordee.planner.history import MODEL_SPREAD, MODEL_SPREADS, PastRun, estimate
from cordee.planner.prediction import Prediction
from cordee.planner.search import choose
from cordee.strategies.table import STRATEGIES

NEAR = 0.05  # a choice this near to the best one measured is as good
MB = 1e6


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A way to run a job, once: as predicted from a profile of its own, and as it was."""

    round: int
    model: str
    prediction: Prediction
    simulated_s: float
    step_s: float
    load: float  # how much longer a fixed piece of computing took beside the run than beside the profile
    peak_bytes: int  # of the worker that took most, beyond what its process had to begin with; 0: not known
    base_bytes: int  # what the planner takes that to be

    @property
    def way(self) -> tuple[str, str, int]:
        return self.model, self.prediction.strategy, self.prediction.workers

    @property
    def error(self) -> float:
        return self.prediction.step_s / self.step_s - 1

    @property
    def simulated_error(self) -> float:
        return self.simulated_s / self.step_s - 1

    @property
    def predicted_bytes(self) -> float:
        return self.prediction.memory_bytes - self.base_bytes

    @property
    def memory_error(self) -> float | None:
        return self.predicted_bytes / self.peak_bytes - 1 if self.peak_bytes else None

    def describe(self) -> str:
        memory = (
            "" if self.memory_error is None else f", {self.predicted_bytes / MB:.3g} and {self.peak_bytes / MB:.3g} MB"
        )
        errors = f"{self.error:+.0%}, simulated {self.simulated_error:+.0%}"
        return (
            f"{'/'.join(map(str, self.way))}: {1e3 * self.prediction.step_s:.3g} ms predicted, "
            f"{1e3 * self.step_s:.3g} ms measured ({errors}){memory}, load {self.load:.2f}"
        )


class Measured:
    """A way to run a job, over all rounds: medians, of errors too, so that drifts of the machine cancel out."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        self.model, _, _ = trials[0].way
        self.trials = trials
        self.prediction = msgspec.structs.replace(
            trials[0].prediction, step_s=statistics.median(trial.prediction.step_s for trial in trials)
        )
        self.measured_s = statistics.median(trial.step_s for trial in trials)
        self.simulated_s = statistics.median(trial.simulated_s for trial in trials)
        self.error = statistics.median(trial.error for trial in trials)
        self.simulated_error = statistics.median(trial.simulated_error for trial in trials)
        self.predicted_bytes = statistics.median(trial.predicted_bytes for trial in trials)
        self.peak_bytes = statistics.median(trial.peak_bytes for trial in trials)
        known = [trial.memory_error for trial in trials if trial.memory_error is not None]
        self.memory_error = statistics.median(known) if known else None


def by_way(trials: Iterable[Trial]) -> list[Measured]:
    """Return the ways to run jobs, in the order they were first run in."""
    ways: dict[tuple[str, str, int], list[Trial]] = {}
    for trial in trials:
        ways.setdefault(trial.way, []).append(trial)
    return [Measured(own) for own in ways.values()]


class PlanTimes(msgspec.Struct, frozen=True, kw_only=True):
    """How long planning itself takes, in seconds."""

    fresh_s: float  # the whole command, with everything measured again
    cached_s: float  # reading what it measured
    search_s: float  # the best way on 64 devices


def make_rows(trials: Sequence[Trial], times: PlanTimes | None = None) -> list[dict[str, Any]]:
    """Return the rows of all ways, and below them those that hold them against the goals."""
    found = by_way(trials)
    rows = [_row(one) for one in found]
    if times is not None:
        rows.append(_goal_row("seconds of a plan of resnet20, all measured again", times.fresh_s, 30.0, is_most=True))
        rows.append(_goal_row("seconds to find that in the cache", times.cached_s, 1.0, is_most=True))
        rows.append(_goal_row("seconds of a search for 64 devices", times.search_s, 2.0, is_most=True))
    if not found:
        return [*rows, _goal_row("cases", 0.0, 1.0, is_most=False)]
    errors = [abs(one.error) for one in found]
    rows.append(_goal_row("median error", statistics.median(errors), 0.10, is_most=True))
    rows.append(_goal_row("error at 90 %", _at_90(errors), 0.25, is_most=True))
    single = [abs(trial.error) for trial in trials]
    rows.append(_goal_row("median error of one plan and one run", statistics.median(single), 0.10, is_most=True))
    rows.append(_goal_row("error at 90 % of one plan and one run", _at_90(single), 0.25, is_most=True))
    simulated = [abs(one.simulated_error) for one in found if one.prediction.workers > 1]
    if simulated:
        rows.append(_goal_row("simulator, median error", statistics.median(simulated), 0.15, is_most=True))
        rows.append(_goal_row("simulator, error at 90 %", _at_90(simulated), 0.15, is_most=True))
    if memory := [abs(one.memory_error) for one in found if one.memory_error is not None]:
        rows.append(_goal_row("median error of the memory", statistics.median(memory), 0.10, is_most=True))
    if choices := list(_are_near(found)):
        rows.append(_goal_row("choices within 5 % of the best", sum(choices) / len(choices), 0.90, is_most=False))
    return rows + _second_plan_rows(trials)


def _second_plan_rows(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """Return rows of plans that know one run of each way, of the same round, held against the runs of other rounds."""
    rounds = sorted({trial.round for trial in trials})
    first, second, is_inside = [], [], []
    choices: list[bool] = []
    for known in rounds:
        plans = {trial.way: _second_plan(trial) for trial in trials if trial.round == known}
        others = [trial for trial in trials if trial.round != known and trial.way in plans]
        for trial in others:
            plan = plans[trial.way]
            before = next(one for one in trials if one.round == known and one.way == trial.way)
            first.append(abs(before.prediction.step_s / trial.step_s - 1))
            second.append(abs(plan.step_s / trial.step_s - 1))
            assert plan.interval is not None
            is_inside.append(plan.interval[0] <= trial.step_s <= plan.interval[1])
        measured = by_way([msgspec.structs.replace(trial, prediction=plans[trial.way]) for trial in others])
        choices += _are_near(measured)
    if not second:
        return []
    return [
        _goal_row("first plan, runs of other rounds: median error", statistics.median(first), 0.05, is_most=True),
        _goal_row("second plan, runs of other rounds: median error", statistics.median(second), 0.05, is_most=True),
        _goal_row("second plan, error at 90 %", _at_90(second), 0.15, is_most=True),
        _goal_row("second plan, runs inside its intervals", statistics.fmean(is_inside), 0.90, is_most=False),
        *([_goal_row("second plan, choices", statistics.fmean(choices), 0.90, is_most=False)] if choices else []),
    ]


def _second_plan(trial: Trial) -> Prediction:
    spread = MODEL_SPREADS.get(STRATEGIES[trial.prediction.strategy].cost_model, MODEL_SPREAD)
    found = estimate(trial.prediction.step_s, spread, [PastRun(step_s=trial.step_s, ended=1.0, steps=1)])
    return msgspec.structs.replace(trial.prediction, step_s=found.step_s, interval=found.interval)


def _are_near(found: Sequence[Measured]) -> Iterable[bool]:
    """Yield for each model, and each number of workers it was run with, and all of them together, whether the way that
    the planner would choose is as good as the best that was run."""
    for model in dict.fromkeys(one.model for one in found):
        own = [one for one in found if one.model == model]
        sizes = sorted({one.prediction.workers for one in own if one.prediction.workers > 1})
        for among in [own, *([one for one in own if one.prediction.workers == size] for size in sizes)]:
            predictions = sorted((one.prediction for one in among), key=lambda p: p.step_s)
            best, _ = choose(predictions)
            if best is not None and len(among) > 1:
                chosen = next(one for one in among if one.prediction is best)
                yield chosen.measured_s <= min(one.measured_s for one in among) * (1 + NEAR)


def _at_90(errors: Sequence[float]) -> float:
    """Return the error that nine tenths do not exceed."""
    return sorted(errors)[max(0, -(-9 * len(errors) // 10) - 1)]


# Columns of a way to run a job that a row of a goal leaves empty.
_FIGURES = (
    *("workers", "predicted_ms", "measured_ms", "error", "simulated_ms", "simulated_error"),
    *("predicted_mb", "measured_mb", "memory_error", "load"),
)


def _row(one: Measured) -> dict[str, Any]:
    return {
        "model": one.model,
        "strategy": one.prediction.label,
        "workers": one.prediction.workers,
        "predicted_ms": 1e3 * one.prediction.step_s,
        "measured_ms": 1e3 * one.measured_s,
        "error": one.error,
        "simulated_ms": 1e3 * one.simulated_s,
        "simulated_error": one.simulated_error,
        "predicted_mb": one.predicted_bytes / MB if one.peak_bytes else None,
        "measured_mb": one.peak_bytes / MB if one.peak_bytes else None,
        "memory_error": one.memory_error,
        "load": statistics.median(trial.load for trial in one.trials),
        "figure": None,
        "goal": None,
        "outcome": "",
    }


def _goal_row(what: str, value: float, goal: float, *, is_most: bool) -> dict[str, Any]:
    is_reached = value <= goal if is_most else value >= goal
    row = {"model": "all", "strategy": what, **dict.fromkeys(_FIGURES)}
    return {**row, "figure": value, "goal": goal, "outcome": goal_outcome(is_reached)}
