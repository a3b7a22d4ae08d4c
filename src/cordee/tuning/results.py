"""What a search found, as files: a table, a page and a picture with the history and the weight of each key."""

from __future__ import annotations

import csv
import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from cordee.dashboard.report_page import render_page
from cordee.monitoring.files import write_atomically
from cordee.tuning.study import Tried

CSV_FILE, PAGE_FILE, PICTURE_FILE = "trials.csv", "report.html", "report.png"


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """What the page shows."""

    metric: str
    is_maximized: bool
    trials: list[Tried]
    importances: dict[str, float]
    best: list[float | None]  # after each trial, the best value of the completed trials so far


def write_results(
    trials: Sequence[Tried], importances: dict[str, float], metric: str, is_maximized: bool, folder: Path
) -> list[Path]:
    """Write the files, and return them. The picture needs matplotlib (extra `report`) and is left out without it."""
    results = Results(
        metric=metric,
        is_maximized=is_maximized,
        trials=list(trials),
        importances=importances,
        best=best_so_far(trials, is_maximized),
    )
    written = [folder / CSV_FILE, folder / PAGE_FILE]
    write_atomically(written[0], _table(results).encode())
    write_atomically(written[1], render_page(f"Search: {folder.name}", results, "tuning.js").encode())
    if importlib.util.find_spec("matplotlib") is not None:
        written.append(folder / PICTURE_FILE)
        write_atomically(written[-1], draw(results))
    return written


def best_so_far(trials: Sequence[Tried], is_maximized: bool) -> list[float | None]:
    """Return the best value of the completed trials up to each trial. Pure."""
    best: float | None = None
    found = []
    for trial in trials:
        if trial.state == "completed" and trial.value is not None:
            choose = max if is_maximized else min
            best = trial.value if best is None else choose(best, trial.value)
        found.append(best)
    return found


def _table(results: Results) -> str:
    keys = list(dict.fromkeys(key for trial in results.trials for key in trial.point))
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["trial", "state", results.metric, *keys, "evaluations", "seconds", "error"])
    for trial in results.trials:
        values = [trial.point.get(key, "") for key in keys]
        row = [trial.number, trial.state, trial.value, *values, trial.evaluations, trial.seconds, trial.error]
        writer.writerow("" if value is None else value for value in row)
    return text.getvalue()


# The shape says how a trial ended, as the colour does.
_SIGNS = {"completed": ("o", "#1d5fa8"), "pruned": ("x", "#b45309"), "failed": ("v", "#b42318")}


def draw(results: Results) -> bytes:
    """Return a picture: the history, the weight of each key, and the results over the values of each key."""
    from matplotlib.figure import Figure  # without pyplot: no display, no global state
    from matplotlib.ticker import MaxNLocator

    keys = list(dict.fromkeys(key for trial in results.trials for key in trial.point))
    columns = max(2, min(len(keys), 3))
    rows = 1 + -(-len(keys) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.2 * rows), layout="constrained")
    grid = figure.add_gridspec(rows, columns)
    history = figure.add_subplot(grid[0, : columns - 1])
    _scatter(history, results, [float(trial.number) for trial in results.trials])
    best = [
        (trial.number, value) for trial, value in zip(results.trials, results.best, strict=True) if value is not None
    ]
    history.step([at for at, _ in best], [value for _, value in best], where="post", color="#1a7f37", label="best")
    history.set(xlabel="trial", ylabel=results.metric, title="History")
    history.xaxis.set_major_locator(MaxNLocator(integer=True))
    history.legend(fontsize="small")
    weights = figure.add_subplot(grid[0, columns - 1])
    if results.importances:
        weights.barh(list(results.importances)[::-1], list(results.importances.values())[::-1], color="#1d5fa8")
        weights.set_xlim(0, 1)
    else:
        weights.text(0.5, 0.5, "too few completed trials", ha="center", va="center", transform=weights.transAxes)
        weights.set_axis_off()
    weights.set_title("Importance")
    for place, key in enumerate(keys):
        axes = figure.add_subplot(grid[1 + place // columns, place % columns])
        values: list[Any] = [trial.point.get(key) for trial in results.trials]
        if any(isinstance(value, str) for value in values):
            names = sorted({str(value) for value in values})
            axes.set_xticks(range(len(names)), names)
            axes.set_xlim(-0.5, len(names) - 0.5)
            values = [names.index(str(value)) for value in values]
        _scatter(axes, results, values)
        positive = [value for value in values if isinstance(value, float) and value > 0]
        if len(positive) == len(values) and max(positive) > 50 * min(positive):
            axes.set_xscale("log")
        axes.set(xlabel=key, ylabel=results.metric)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    return picture.getvalue()


def _scatter(axes: Any, results: Results, xs: Sequence[Any]) -> None:
    for state, (sign, colour) in _SIGNS.items():
        shown = [
            (x, trial.value)
            for x, trial in zip(xs, results.trials, strict=True)
            if trial.state == state and trial.value is not None and x is not None
        ]
        if shown:
            axes.scatter([x for x, _ in shown], [y for _, y in shown], marker=sign, color=colour, label=state, s=28)
