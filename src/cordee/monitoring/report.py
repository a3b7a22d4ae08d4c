"""The end of a run, and the list of runs, for a person to read."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from cordee.core.durations import format_duration
from cordee.monitoring.run_list import RunInfo
from cordee.monitoring.summary import Summary
from cordee.monitoring.wording import number, percent, plural, quantity

_STATUS_STYLES = {
    "completed": "green",
    "stopped": "green",
    "running": "cyan",
    "interrupted": "yellow",
    "died": "yellow",
    "failed": "red",
    "unreadable": "red",
}
_STOP_RULES = {
    "accuracy": "the test accuracy of stop.accuracy was reached",
    "loss": "the loss of stop.loss was reached",
    "time": "the time of stop.time was used up",
    "steps": "the steps of stop.steps were taken",
    "patience": "no better result for stop.patience evaluations",
    "interrupt": "it was asked to stop",
}
_LABEL_COLUMNS = 15


def render_result(summary: Summary, run_dir: str | Path, hints: Sequence[str] = ()) -> RenderableType:
    """Return the result of a run in a few lines, and `hints` at what to do next.

    Print it with `soft_wrap=True`: then paths and commands are not broken into lines and can be copied.
    """
    rows = [
        ("test accuracy", _with(percent(summary.test_accuracy), "top-5", percent(summary.test_top5_accuracy))),
        ("test loss", number(summary.test_loss)),
        *((f"test {name}", number(value)) for name, value in summary.metrics.items()),
        ("train loss", number(summary.train_loss)),
        ("time", _time(summary)),
        ("prediction", _forecast(summary)),
        ("staleness", _staleness(summary)),
        ("recoveries", _recoveries(summary)),
        ("weights", f"sha256 {summary.weights_sha256[:12]}" if summary.weights_sha256 else ""),
        ("files", str(run_dir)),
    ]
    lines = [_line((f"{summary.status}", f"bold {_STATUS_STYLES[summary.status]}"), (_why(summary), ""))]
    lines += [_line((f"  {label:<{_LABEL_COLUMNS}}", "bright_black"), (value, "")) for label, value in rows if value]
    if hints:
        lines.append(_line(("next", "bold")))
        lines += [_line((f"  {hint}", "")) for hint in hints]
    return Group(*lines)


def render_runs(runs: Sequence[RunInfo]) -> RenderableType:
    """Return a table of `runs` that fits 80 columns and shows more where there is more room."""
    return _RunTable(runs) if runs else Text("no runs yet: cordee train JOB.toml makes one")


class _Column(NamedTuple):
    title: str
    is_number: bool
    left_out: int  # in which order it makes room for the others; 0 never does
    cell: Callable[[RunInfo], Text]


_COLUMNS = (
    _Column("run", False, 0, lambda run: Text(run.path.name)),
    _Column("state", False, 0, lambda run: Text(run.state, _STATUS_STYLES[run.state])),
    _Column("strategy", False, 4, lambda run: Text(_strategy(run))),
    _Column("steps", True, 2, lambda run: Text("" if run.steps is None else f"{run.steps:,}")),
    _Column("accuracy", True, 0, lambda run: Text(percent(run.test_accuracy))),
    _Column("time", True, 3, lambda run: Text(_duration(run.wall_seconds))),
    _Column("started", False, 1, lambda run: Text(_date(run.started))),
)
_GAP = 2  # columns of the screen between two of the table
_LONGEST_NAME = 36  # longer ones are folded rather than have other columns left out


class _RunTable:
    def __init__(self, runs: Sequence[RunInfo]) -> None:
        self._runs = runs

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
        columns = _columns_that_fit(self._runs, options.max_width)
        for column in columns:
            table.add_column(
                column.title,
                justify="right" if column.is_number else "left",
                no_wrap=column.title != "run",
                overflow="fold",
            )
        for run in self._runs:
            table.add_row(*(column.cell(run) for column in columns))
        yield table
        if any(run.state in ("died", "interrupted") for run in self._runs):
            yield Text("a run that died or was interrupted continues with `cordee resume RUN`", "bright_black")
        for run in self._runs:
            if run.problem:
                yield Text(f"{run.path.name}: {run.problem}", "bright_black")


def _columns_that_fit(runs: Sequence[RunInfo], width: int) -> list[_Column]:
    needed = {}
    for column in _COLUMNS:
        longest = max(column.cell(run).cell_len for run in runs)
        needed[column] = max(min(longest, _LONGEST_NAME), len(column.title)) + _GAP
    for column in sorted((column for column in _COLUMNS if column.left_out), key=lambda column: column.left_out):
        if sum(needed.values()) - _GAP > width:
            del needed[column]
    return list(needed)


def _why(summary: Summary) -> str:
    if summary.error:
        return f": {summary.error}"
    if summary.stopped_by:
        if summary.stopped_by.startswith("metrics."):
            return f": the value of stop.{summary.stopped_by} was reached"
        return f": {_STOP_RULES.get(summary.stopped_by, summary.stopped_by)}"
    if summary.status == "completed":
        return f": {_epochs(summary)}all {plural(summary.steps, 'step')} done"
    return f" after {plural(summary.steps, 'step')}"


def _epochs(summary: Summary) -> str:
    return (
        f"{plural(int(summary.epochs), 'epoch')}, " if summary.epochs and summary.epochs == int(summary.epochs) else ""
    )


def _time(summary: Summary) -> str:
    if summary.wall_seconds is None:
        return ""
    speed = quantity(summary.samples_per_second)
    return (
        f"{format_duration(summary.wall_seconds)} for {plural(summary.steps, 'step')}"
        f"{f', {speed} samples/s' if speed else ''}"
    )


FAR_OFF = 3.0  # times: beyond it, something else than the model was measured


def _forecast(summary: Summary) -> str:
    """Return what a step was predicted to take beside what it took."""
    predicted_s, measured_s = summary.predicted_step_seconds, summary.step_seconds
    if not predicted_s or not measured_s:
        return ""
    if summary.prediction_is_sure is False:
        return "not usable: the machine was busy when it was profiled; run `cordee plan` again when it is quiet"
    between = ""
    if summary.predicted_step_interval is not None:
        low_s, high_s = summary.predicted_step_interval
        between = f" ({1e3 * low_s:.3g} to {1e3 * high_s:.3g})"
    text = f"{1e3 * predicted_s:.3g} ms a step{between}, measured {1e3 * measured_s:.3g} ms"
    if not 1 / FAR_OFF < predicted_s / measured_s < FAR_OFF:
        return f"{text}: too far apart to be compared, the machine was busy in one of them"
    return f"{text} ({predicted_s / measured_s - 1:+.0%})"


def _recoveries(summary: Summary) -> str:
    if not summary.recoveries:
        return ""
    lost = f", {plural(summary.updates_lost, 'update')} lost" if summary.updates_lost else ""
    return f"{summary.recoveries}, {plural(summary.steps_redone, 'step')} done again{lost}"


def _staleness(summary: Summary) -> str:
    """Return how old gradients were when they came in; nothing for a synchronous run, where all are current."""
    ages = {int(age): count for age, count in (summary.staleness or {}).items() if count}
    if not any(ages):
        return ""
    mean = sum(age * count for age, count in ages.items()) / sum(ages.values())
    return f"gradients came {mean:.1f} updates late on average, at most {max(ages)}"


def _with(value: str, label: str, extra: str) -> str:
    return f"{value}, {label} {extra}" if value and extra else value


def _line(*parts: tuple[str, str]) -> Text:
    return Text.assemble(*parts)


def _strategy(run: RunInfo) -> str:
    count = f" x{run.workers}" if run.workers and run.workers > 1 else ""
    return f"{run.strategy or ''}{count}"


def _duration(seconds: float | None) -> str:
    return "" if seconds is None else format_duration(seconds)


def _date(moment: float | None) -> str:
    return "" if moment is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))
