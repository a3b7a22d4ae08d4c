"""The search itself: trials side by side, each reported to the study as it goes, and ended where it is hopeless."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from cordee.compute.devices import usable_cores
from cordee.compute.job_metrics import require_known
from cordee.core import Job
from cordee.core.errors import JobError, RunDirectoryError, TrainingError
from cordee.core.interrupts import InterruptFlag
from cordee.launch import check_job
from cordee.monitoring.files import write_atomically
from cordee.monitoring.run_directory import LOCK_FILE, DirectoryLock, is_locked
from cordee.monitoring.wording import number, percent, plural
from cordee.tuning.results import write_results
from cordee.tuning.space import Dimension, corners, describe, place
from cordee.tuning.study import Direction, Study, Tried, open_study
from cordee.tuning.trials import Readings, TrialProcess, finished_summary

BEST_FILE = "best.toml"
_LOOK_EVERY_S = 0.2
_FIRST_FAILURES = 3  # when all of so many fail, the job is at fault, not a value


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How a search is made."""

    trials: int = 20  # of the study in all, those of earlier calls included
    at_once: int = 0  # trials side by side; 0: as many as the cores have room for
    metric: str = ""  # "": the accuracy, or the loss where there is none
    seed: int = 0
    prunes: bool = True

    def __post_init__(self) -> None:
        if self.trials < 1 or self.at_once < 0:
            raise JobError(f"--trials {self.trials} must be at least 1, and --at-once {self.at_once} at least 0")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came out. `is_interrupted`: the same command continues."""

    folder: Path
    best: Tried | None
    trials: list[Tried]
    importances: dict[str, float]
    metric: str
    is_interrupted: bool
    files: list[Path] = []


def tune(
    job: Path,
    overrides: list[str],
    space: list[Dimension],
    settings: Settings,
    folder: Path,
    say: Callable[[str], None],
) -> Outcome:
    """Search, and write what was found into `folder`; a search that is there is continued.

    Raises JobError for a job or a search that makes no sense, before the first trial, and TrainingError where the
    first trials all fail. Ctrl-C has the trials under way save and end; they continue with the next call.
    """
    asked = Job.load(job, overrides)
    if asked.cluster.engine != "local":
        raise JobError(
            f"cordee tune starts its trials on this host, and cluster.engine is '{asked.cluster.engine}': set "
            "cluster.engine = 'local'"
        )
    metric, direction = _check(job, overrides, space, settings.metric)
    at_once = settings.at_once or max(1, usable_cores() // asked.strategy.workers)
    with _held(folder):
        study = open_study(folder, asked, space, metric, direction, settings.seed)
        study.prune_by_median(settings.prunes)
        fixed = [*overrides, "checkpoint.storage=", "checkpoint.keep=1"]
        if at_once > 1 and asked.training.threads in (0, "auto") and not asked.training.reproducible:
            fixed.append(f"training.threads={max(1, usable_cores() // (at_once * asked.strategy.workers))}")
        search = _Search(study, job, fixed, metric, folder, say)
        flag = InterruptFlag(lambda: say("stopping: trials save and end after their step; Ctrl-C again stops at once"))
        say(f"{plural(settings.trials, 'trial')}, {at_once} at once, by {metric}: {', '.join(describe(space))}")
        with flag:
            search.run(settings.trials, at_once, flag)
        best, trials, importances = study.best(), study.ended(), study.importances()
        files = [_write_best(asked, best, metric, folder)] if best is not None else []
        files += write_results(trials, importances, metric, study.is_maximized, folder) if trials else []
    return Outcome(
        folder=folder,
        best=best,
        trials=trials,
        importances=importances,
        metric=metric,
        is_interrupted=flag(),
        files=files,
    )


def _check(job: Path, overrides: list[str], space: list[Dimension], metric: str) -> tuple[str, Direction]:
    """Return the metric and the direction of the search, if the job is sound at the edges. Raises JobError."""
    for point in corners(space):
        values = place(point)
        try:
            parts = check_job(job, overrides=[*overrides, *values])
        except JobError as error:
            raise JobError(f"with {', '.join(values)} the job cannot be run: {error}") from error
    if parts.test is None:
        raise JobError("trials are compared on a test set, and the data has none: set data.test_fraction = 0.1, say")
    metric = metric or ("accuracy" if parts.splits.num_classes is not None else "loss")
    better = require_known(metric, "--metric", parts.metrics)
    if "accuracy" in metric and parts.splits.num_classes is None and metric not in parts.job.metrics:
        raise JobError(f"--metric {metric} needs classes, and the targets are numbers: use --metric loss")
    return metric, "maximize" if better == "higher" else "minimize"


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Inside, no other process searches in this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / LOCK_FILE
    if is_locked(lock):
        raise RunDirectoryError(f"another `cordee tune` searches in {folder}: wait for it, or choose another --folder")
    held = DirectoryLock(lock)
    try:
        yield
    finally:
        held.release()


class _Search:
    """Trials under way, and what happens to each."""

    def __init__(
        self, study: Study, job: Path, overrides: list[str], metric: str, folder: Path, say: Callable[[str], None]
    ) -> None:
        self._study, self._job, self._overrides = study, job, overrides
        self._metric, self._folder, self._say = metric, folder, say
        self._processes: list[TrialProcess] = []

    def run(self, num_trials: int, at_once: int, flag: InterruptFlag) -> None:
        waiting = self._study.unfinished()
        if waiting:
            self._say(f"continues: {len(waiting)} trials were under way, {len(self._study.ended())} have ended")
        try:
            while not flag():
                while len(self._processes) < at_once and (waiting or self._study.count() < num_trials):
                    self._begin(waiting.pop(0) if waiting else self._study.begin())
                if not self._processes:
                    return
                time.sleep(_LOOK_EVERY_S)
                self._look()
            for process in self._processes:
                process.stop()
            for process in self._processes:
                process.wait()
            self._look(is_ending=True)
        except BaseException:
            for process in self._processes:
                process.kill()
            raise

    def _begin(self, trial: int) -> None:
        run = self._folder / f"trial-{trial:04d}"
        point = self._study.point(trial)
        readings = Readings(run, self._metric)
        if finished_summary(run) is not None:  # the search was killed before it could tell
            self._report(trial, readings)
            self._end_well(trial, readings)
            return
        if self._report(trial, readings):
            self._study.prune(trial)
            self._tell(trial)
            return
        values = place(point)
        self._processes.append(TrialProcess(trial, run, self._job, [*self._overrides, *values], self._metric))

    def _look(self, *, is_ending: bool = False) -> None:
        for process in list(self._processes):
            code = process.exit_code
            wants_end = self._report(process.number, process.readings)
            if code is None:
                if wants_end and not process.is_pruned:
                    process.is_pruned = True
                    process.stop()
                continue
            self._processes.remove(process)
            if finished_summary(process.run) is not None:
                self._end_well(process.number, process.readings)
            elif process.is_pruned:
                self._study.prune(process.number)
                self._tell(process.number)
            elif not is_ending:
                self._fail(process.number, process.problem())

    def _report(self, trial: int, readings: Readings) -> bool:
        """Record what is new; return whether the trial should end."""
        found = [each for each in readings.new() if each.value is not None and math.isfinite(each.value)]
        wants_end = [self._study.report(trial, each.place, each.value or 0.0) for each in found]
        return any(wants_end)  # not before all are recorded

    def _end_well(self, trial: int, readings: Readings) -> None:
        if readings.last is None or readings.last.value is None:
            self._fail(trial, f"it measured no {self._metric}, or none that is a number")
            return
        self._study.complete(trial, readings.last.value)
        self._tell(trial)

    def _fail(self, trial: int, problem: str) -> None:
        self._study.fail(trial, problem)
        self._tell(trial)
        ended = self._study.ended()
        if len(ended) >= _FIRST_FAILURES and all(each.state == "failed" for each in ended):
            raise TrainingError(f"the first {len(ended)} trials all failed, so the search ends; the last: {problem}")

    def _tell(self, trial: int) -> None:
        (tried,) = [each for each in self._study.ended() if each.number == trial]
        best = self._study.best()
        is_best = best is not None and best.number == trial
        self._say(describe_trial(tried, self._metric) + ("  (best so far)" if is_best else ""))


def describe_trial(tried: Tried, metric: str) -> str:
    """Return a trial in a line."""
    point = "  ".join(f"{key}={_short(value)}" for key, value in tried.point.items())
    if tried.state == "failed":
        return f"trial {tried.number}  failed  {point}: {tried.error}"
    result = f"{metric} {show_value(tried.value, metric)}"
    after = f"  pruned after {tried.evaluations} evaluations" if tried.state == "pruned" else ""
    return f"trial {tried.number}  {result}  {point}{after}"


def show_value(value: float | None, metric: str) -> str:
    return percent(value) if metric.endswith("accuracy") else number(value)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _write_best(job: Job, best: Tried, metric: str, folder: Path) -> Path:
    """Write the job of the best trial, so that it can be run as it is."""
    text = job.replace(place(best.point)).to_toml()
    note = f"# Trial {best.number} of `cordee tune`: {metric} {show_value(best.value, metric)}\n"
    write_atomically(folder / BEST_FILE, (note + text).encode())
    return folder / BEST_FILE
