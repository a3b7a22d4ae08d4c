"""Runs beside each other: what each took to a given accuracy, in figures, curves and words."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from cordee.core.errors import JobError, MissingExtraError, RunDirectoryError
from cordee.dashboard.reading import RunReader
from cordee.dashboard.report_page import render_page
from cordee.dashboard.series import Curve
from cordee.monitoring import inspect_run
from cordee.monitoring.run_directory import SUMMARY_FILE
from cordee.monitoring.summary import Summary, read_summary
from cordee.monitoring.timeline import Phase
from cordee.monitoring.wording import percent, quantity

_SAME = 1.02  # times: less is no difference that a person would look for
_REACHED = 0.99  # of the accuracy that all runs reached: the target, where none is given


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One run among others. What was not measured is None."""

    run: str
    group: str  # runs that differ by their seed only are of one group
    strategy: str
    workers: int
    status: str
    steps: int
    seconds: float | None
    samples_per_second: float | None
    test_accuracy: float | None
    test_loss: float | None
    seconds_to_target: float | None  # from the begin of training to the evaluation that reached the target
    is_first_evaluation: bool  # that which reached the target: the run may have been there earlier
    peak_memory_bytes: int | None
    bytes_sent: int | None  # over sockets, by all members
    exchange_share: float | None  # of the time of all workers' steps
    idle_share: float | None  # that workers waited for each other
    checkpoint_stall_share: float | None
    step_seconds: float | None
    predicted_step_seconds: float | None
    recoveries: int
    steps_redone: int
    weights_sha256: str | None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """All runs, the accuracy that times are measured to, and what follows from them."""

    runs: list[Compared]
    target: float | None
    verdict: list[str]
    curves: dict[str, dict[str, Any]]  # by run, then by curve: x, low, high


def compare_runs(runs: Sequence[Path], target: float | None = None, groups: Sequence[str] = ()) -> Comparison:
    """Return a comparison of runs that have ended. `groups` names the group of each run; else each is its own.

    Raises RunDirectoryError for what is no run, and JobError where there is nothing to compare.
    """
    if len(runs) < 2:
        raise JobError("compare needs two runs or more")
    if target is not None and not 0.0 < target <= 1.0:
        raise JobError(f"--accuracy {target} must be above 0 and at most 1 (0.9 is 90 %)")
    summaries = [_summary_of(run) for run in runs]
    readers = []
    for run in runs:
        reader = RunReader(run)
        reader.update()
        readers.append(reader)
    if target is None:
        best = [max(reader.curves["accuracy"].part(0, math.inf, 1 << 30).high, default=None) for reader in readers]
        known = [each for each in best if each is not None]
        target = _REACHED * min(known) if len(known) == len(runs) else None
    names, begins = _names(runs), _begins(readers)
    found = [
        _compared(name, group, summary, reader, _reach(reader, begin, target))
        for name, group, summary, reader, begin in zip(names, groups or names, summaries, readers, begins, strict=True)
    ]
    curves = {
        name: {key: _since(begin, reader, curve) for key, curve in reader.curves.items() if len(curve)}
        for name, reader, begin in zip(names, readers, begins, strict=True)
    }
    return Comparison(runs=found, target=target, verdict=conclude(found, target), curves=curves)


def _begins(readers: Sequence[RunReader]) -> list[float]:
    """Return when each run began to train; by the same sign for all, where a run of an earlier version is among them.

    The first loss would not do: with `local_sgd` it is reported when the workers first agree, after many steps.
    """
    if all(reader.recorded_begin is not None for reader in readers):
        return [reader.begin for reader in readers]
    return [reader.first_result or 0.0 for reader in readers]


def conclude(runs: Sequence[Compared], target: float | None) -> list[str]:
    """Return what the figures say, a sentence each; nothing is called faster that is within the spread of the seeds."""
    said = [f"{run.run} {run.status}: its figures are not those of a whole run." for run in runs if not _is_whole(run)]
    groups: dict[str, list[Compared]] = {}
    for run in runs:
        if _is_whole(run):
            groups.setdefault(run.group, []).append(run)
    said += _ranking(groups, "seconds_to_target", f"to {percent(target)} test accuracy" if target else "", is_time=True)
    whole = [run for runs in groups.values() for run in runs]
    if early := [run.run for run in whole if run.is_first_evaluation]:
        who = "All runs" if len(early) == len(whole) > 1 else ", ".join(early)
        said.append(
            f"{who} reached it by the first evaluation, and may have been there earlier: evaluate more "
            "often to compare times (evaluation.every_epochs)."
        )
    said += _ranking(groups, "samples_per_second", "in samples per second", is_time=False)
    hashes = {run.weights_sha256 for group in groups.values() for run in group}
    if len(groups) > 1 and len(hashes) == 1 and None not in hashes:
        said.append("All runs ended with the same weights, bit for bit.")
    return said or ["There is nothing to conclude: no run ended well."]


def _ranking(groups: dict[str, list[Compared]], key: str, what: str, *, is_time: bool) -> list[str]:
    values = {name: [getattr(run, key) for run in runs] for name, runs in groups.items()}
    known = {name: [value for value in found if value] for name, found in values.items()}
    if not what or len(known) < 2 or not all(known.values()):
        missing = [name for name, found in known.items() if not found]
        return (
            [f"Not every run got {what}: {', '.join(missing)} did not."]
            if what and missing and any(known.values())
            else []
        )
    middle = {name: statistics.median(found) for name, found in known.items()}
    order = sorted(middle, key=lambda name: middle[name], reverse=not is_time)
    first, second = order[:2]
    ratio = middle[second] / middle[first] if is_time else middle[first] / middle[second]
    shown = {name: f"{middle[name]:.3g} s" if is_time else quantity(middle[name]) for name in order}
    figures = ", ".join(f"{name} {shown[name]}" for name in order)
    if _overlap(known[first], known[second]):
        return [
            f"Fastest {what}: no difference beyond the spread of the seeds between {first} and {second} ({figures})."
        ]
    if ratio < _SAME:
        return [f"Fastest {what}: {first} and {second}, less than {round(100 * (_SAME - 1))} % apart ({figures})."]
    doubt = "" if all(len(found) > 1 for found in known.values()) else "; one run each, so chance is not ruled out"
    return [f"Fastest {what}: {first}, {ratio:.2f} times as fast as {second} ({figures}{doubt})."]


def _overlap(one: list[float], other: list[float]) -> bool:
    return min(len(one), len(other)) > 1 and min(one) <= max(other) and min(other) <= max(one)


def _is_whole(run: Compared) -> bool:
    return run.status in ("completed", "stopped")


def _compared(
    name: str, group: str, summary: Summary, reader: RunReader, reached: tuple[float, bool] | None
) -> Compared:
    stall, wall = summary.checkpoint_stall_seconds, summary.wall_seconds
    return Compared(
        run=name,
        group=group,
        strategy=summary.strategy,
        workers=summary.workers,
        status=summary.status,
        steps=summary.steps,
        seconds=wall,
        samples_per_second=summary.samples_per_second,
        test_accuracy=summary.test_accuracy,
        test_loss=summary.test_loss,
        seconds_to_target=reached[0] if reached else None,
        is_first_evaluation=reached is not None and reached[1],
        peak_memory_bytes=summary.peak_memory_bytes,
        bytes_sent=reader.lanes.bytes_sent() if reader.phases else summary.bytes_sent,
        exchange_share=_share_of(reader, Phase.EXCHANGE),
        idle_share=_share_of(reader, Phase.WAIT),
        checkpoint_stall_share=stall / wall if stall is not None and wall else None,
        step_seconds=summary.step_seconds,
        predicted_step_seconds=summary.predicted_step_seconds,
        recoveries=summary.recoveries,
        steps_redone=summary.steps_redone,
        weights_sha256=summary.weights_sha256,
    )


def _reach(reader: RunReader, begin: float, target: float | None) -> tuple[float, bool] | None:
    """Return when a run reached the target, in seconds since its begin, and whether by its first evaluation."""
    if target is None or not len(reader.curves["loss"]):
        return None
    tested = reader.curves["accuracy"].part(0, math.inf, 1 << 30)
    reached = [at for at, value in zip(tested.x, tested.high, strict=True) if value >= target - 1e-6]
    return (reached[0] - begin, reached[0] == tested.x[0]) if reached else None


def _share_of(reader: RunReader, phase: Phase) -> float | None:
    """Return the share of a phase in the steps of all workers; evaluating and saving are no part of a step."""
    workers = [spent for member, spent in reader.phases.items() if member.startswith("worker")]
    total = sum(sum(spent[: Phase.WAIT + 1]) for spent in workers)
    return sum(spent[phase] for spent in workers) / total if total else None


def _since(begin: float, reader: RunReader, curve: Curve) -> dict[str, list[float]]:
    """Return a curve by the seconds since training began: starting processes is no part of a comparison."""
    part = curve.part(begin, reader.end, 800)
    return {**part._asdict(), "x": [at - begin for at in part.x]}


def _summary_of(run: Path) -> Summary:
    info = inspect_run(run) if run.is_dir() else None
    if info is None:
        raise RunDirectoryError(f"{run} is not a run directory: it has no job.toml")
    if info.problem is not None:
        raise RunDirectoryError(f"the run {run.name} cannot be compared: {info.problem}")
    summary = read_summary(run / SUMMARY_FILE)
    if summary is None:
        raise RunDirectoryError(f"the run {run.name} has no summary: it is {info.state}")
    if info.state in ("running", "died"):
        raise RunDirectoryError(
            f"the run {run.name} was continued after its summary was written, and has not ended since: it is "
            f"{info.state}"
        )
    return summary


def _names(runs: Sequence[Path]) -> list[str]:
    """Return a name for each run: that of its directory, with the folder before it where two are the same."""
    names = [run.name for run in runs]
    return [
        name if names.count(name) == 1 else f"{run.absolute().parent.name}/{name}"
        for name, run in zip(names, runs, strict=True)
    ]


# Files -------------------------------------------------------------------------------------------------------------


def to_csv(comparison: Comparison) -> str:
    """Return a row for each run."""
    fields = [field.name for field in msgspec.structs.fields(Compared)]
    text = io.StringIO()
    writer = csv.DictWriter(text, fields)
    writer.writeheader()
    writer.writerows(msgspec.to_builtins(run) for run in comparison.runs)
    return text.getvalue()


def to_html(comparison: Comparison, title: str) -> str:
    """Return one page that needs nothing else."""
    return render_page(title, comparison, "report.js")


def to_png(comparison: Comparison) -> bytes:
    """Return the curves of all runs as a picture. Needs matplotlib (extra `report`)."""
    try:
        from matplotlib.figure import Figure  # without pyplot: no display, no global state
    except ImportError:
        raise MissingExtraError("the picture of a comparison", "report") from None

    strokes = ("-", "--", ":", "-.", (0, (1, 3)), (0, (8, 3)))
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for place, (key, title) in enumerate((("accuracy", "test accuracy, %"), ("loss", "training loss"))):
        axes = figure.add_subplot(1, 2, place + 1)
        for number, run in enumerate(comparison.runs):
            curve = comparison.curves[run.run].get(key)
            if curve is not None:
                values = [100 * value for value in curve["high"]] if key == "accuracy" else curve["high"]
                sign = "o" if len(values) == 1 else ""  # one point is no line
                axes.plot(curve["x"], values, marker=sign, linestyle=strokes[number % len(strokes)], label=run.run)
        axes.set(xlabel="seconds since training began", ylabel=title)
        axes.grid(alpha=0.3)
        if key == "loss" and any(key in curves for curves in comparison.curves.values()):
            axes.set_yscale("log")
        if axes.lines:
            axes.legend(fontsize="small")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    return picture.getvalue()


def compare_job(
    job: Path,
    strategies: Sequence[str],
    seeds: int,
    overrides: Sequence[str],
    folder: Path,
    say: Callable[[str], None],
) -> tuple[list[Path], list[str]]:
    """Train a job by each strategy with each seed, one after the other; return the runs and their groups.

    A run that is there already is resumed, or taken as it is: what was interrupted continues. A strategy of one
    worker has one, whatever the number of the others.
    """
    from cordee.core import Job
    from cordee.launch import check_job, train
    from cordee.strategies.table import STRATEGIES

    def chosen(strategy: str) -> list[str]:
        is_alone = strategy in STRATEGIES and STRATEGIES[strategy].is_alone
        return [*overrides, f"strategy.name={strategy}", *(["strategy.workers=1"] if is_alone else [])]

    if seeds < 1:
        raise JobError(f"--seeds {seeds} must be at least 1")
    first = Job.load(job, overrides).seed
    for strategy in strategies:  # before the first is trained
        check_job(job, overrides=chosen(strategy))
    runs, groups = [], []
    for place in range(seeds):
        for strategy in strategies:  # in turn, so that a machine that becomes slower does so for all
            run = folder / (f"{strategy}-seed{first + place}" if seeds > 1 else strategy)
            say(f"{strategy}, seed {first + place}")
            trained = train(
                job,
                overrides=[*chosen(strategy), f"seed={first + place}"],
                run_dir=run,
                resume=run.exists(),
                quiet=True,
            )
            if trained.status == "interrupted":
                raise KeyboardInterrupt
            runs.append(run)
            groups.append(strategy)
    return runs, groups
