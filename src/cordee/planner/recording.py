"""Measures the steps of a run while it trains, and keeps what they took for the next plan of the job.

Counted is only the time in which nothing else used this machine's cores, of runs that lost nobody.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil

from cordee.cluster.engines import is_of_this_host
from cordee.core.errors import RunDirectoryError
from cordee.core.references import LIVE_PREFIX
from cordee.monitoring import AnyEvent, Summary, events
from cordee.monitoring.diagnosis import add_up
from cordee.monitoring.timeline import FOLDER, Phase, follow_member, list_members
from cordee.planner.history import PastRun, PastRuns, Way, add_run, plain_settings
from cordee.planner.measurements import keep, key_of, read_kept
from cordee.planner.profiling import profile_key
from cordee.training.components import Components

CALM_SHARE = 0.10  # of all cores, that other programs may use
FIRST_LOOK_S, LONGEST_LOOK_S = 0.5, 10.0  # between two looks at what uses the cores; each takes some milliseconds
WARM_UP_WINDOWS = 2  # step events that do not count: the first step, and what warms up
LEAST_WINDOWS = 3
TAIL_BYTES = 1 << 20  # of each worker's timeline, that phases are read from
# A run in which one of these happened took another time than it would have taken.
_DISTURBING = (
    events.WorkerLost,
    events.WorkerLeft,
    events.CoordinatorLost,
    events.ForkServerLost,
    events.Recovery,
    events.UpdatesLost,
    events.SamplesLost,
    events.Straggler,
    events.Scale,
    events.Fault,
)


class Look(NamedTuple):
    """Seconds of processor time at a moment, of all cores and of the run's own processes."""

    at_s: float
    used_s: float
    own_s: float


def is_calm(before: Look, after: Look, num_cores: int) -> bool:
    """Return whether other programs used next to nothing of the cores between two looks. Pure."""
    elapsed_s = after.at_s - before.at_s
    others_s = (after.used_s - before.used_s) - (after.own_s - before.own_s)
    return elapsed_s > 0 and others_s <= CALM_SHARE * num_cores * elapsed_s


def look_around() -> Look:
    """Return what was used so far. Local; takes some milliseconds."""
    times = psutil.cpu_times()
    used_s = sum(times) - times.idle - getattr(times, "iowait", 0.0)
    used_s -= getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # which are in user and nice as well
    own_s = 0.0
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has just ended
            own = process.cpu_times()
            own_s += own.user + own.system
    return Look(time.monotonic(), used_s, own_s)


class StepTimer:
    """A sink that keeps the speeds of step events, of the time in which the machine was calm."""

    def __init__(
        self,
        look: Callable[[], Look] = look_around,
        clock: Callable[[], float] = time.monotonic,
        num_cores: int | None = None,
    ) -> None:
        self._look, self._clock, self._num_cores = look, clock, num_cores or psutil.cpu_count() or 1
        self._speeds: list[float] = []
        self._since: list[float] = []  # speeds since the last look
        self._last: Look | None = None
        self._wait_s = FIRST_LOOK_S
        self._num_seen = self._steps = self._num_generations = 0
        self._first_step: int | None = None
        self.is_disturbed = False

    def emit(self, event: AnyEvent) -> None:
        if isinstance(event, _DISTURBING):
            self.is_disturbed = True
        elif isinstance(event, events.Generation):
            self._num_generations += 1
            self.is_disturbed |= self._num_generations > 1
        elif isinstance(event, events.Step) and event.samples_per_second:
            self._take(event.step, event.samples_per_second)

    def close(self) -> None:
        pass

    def _take(self, step: int, samples_per_second: float) -> None:
        self._num_seen += 1
        if self._num_seen <= WARM_UP_WINDOWS:
            return
        if self._last is None:
            self._last, self._first_step = self._look(), step
            return
        self._since.append(samples_per_second)
        if self._clock() - self._last.at_s < self._wait_s:
            return
        now = self._look()
        if is_calm(self._last, now, self._num_cores):
            self._speeds += self._since
            self._steps += step - (self._first_step or 0)
        self._last, self._since, self._first_step = now, [], step
        self._wait_s = min(2 * self._wait_s, LONGEST_LOOK_S)

    def result(self, batch_size: int) -> tuple[float, int] | None:
        """Return the seconds of a step, and how many steps were counted; None if there were too few."""
        if self.is_disturbed or len(self._speeds) < LEAST_WINDOWS or self._steps < 1:
            return None
        return batch_size / statistics.median(self._speeds), self._steps


def history_key(parts: Components) -> str | None:
    """Return what runs of a job depend on beside the way it is run; None if they cannot be known again."""
    job = parts.job
    settings = job.to_dict()
    if LIVE_PREFIX in str(settings):
        return None  # what exists in this process only may be another thing in the next one
    training = job.training
    return key_of(
        profile_key(parts),
        str(settings["model"]),
        str(settings["callbacks"]),
        f"{training.reproducible} {training.num_shards} {training.ema} {job.cluster.balance} {job.cluster.engine}",
    )


def way_of(parts: Components) -> Way:
    """Return the way that a job is run, without runs."""
    strategy, workers = parts.job.strategy, parts.job.strategy.workers
    settings = plain_settings(strategy.name, workers, strategy.settings, parts.job.training.batch_size)
    return Way(strategy=strategy.name, workers=workers, settings=settings)


def read_runs(parts: Components) -> PastRuns:
    """Return what is known of earlier runs of a job; nothing where the file is damaged."""
    key = history_key(parts)
    return (read_kept("runs", key, PastRuns) if key is not None else None) or PastRuns()


def forget_runs(parts: Components) -> None:
    """Remove what is known of earlier runs of a job."""
    if read_runs(parts).ways and (key := history_key(parts)) is not None:
        keep("runs", key, PastRuns())


def record_run(parts: Components, timer: StepTimer, run_dir: Path, summary: Summary) -> None:
    """Add a run that has ended to the cache, unless it says nothing of the next. Local; nothing is raised."""
    found, key = timer.result(parts.job.training.batch_size), history_key(parts)
    if found is None or key is None or not is_of_this_host(parts.job.cluster.engine):
        return
    if parts.is_online or summary.status == "failed" or summary.recoveries:
        return
    step_s, steps = found
    compute, exchange, wait = phase_shares(run_dir)
    run = PastRun(
        step_s=step_s,
        ended=time.time(),
        steps=steps,
        peak_bytes=summary.peak_memory_bytes or 0,
        compute=compute,
        exchange=exchange,
        wait=wait,
    )
    keep("runs", key, add_run(read_runs(parts), way_of(parts), run))


def phase_shares(run_dir: Path) -> tuple[float, float, float]:
    """Return the shares of the workers' steps that computing, exchanging and waiting took at the end of a run.

    Computing has the time in which there was no batch as well. Zeros where the timelines do not say.
    """
    totals = [0] * len(Phase)
    for member in list_members(run_dir):
        if not member.startswith("worker"):
            continue
        with contextlib.suppress(RunDirectoryError, OSError):
            size = (run_dir / FOLDER / f"{member}.jsonl").stat().st_size
            lines, _ = follow_member(run_dir, member, max(0, size - TAIL_BYTES))
            totals = [sum(pair) for pair in zip(totals, add_up(lines), strict=True)]
    own, exchange, wait = totals[Phase.DATA] + totals[Phase.COMPUTE], totals[Phase.EXCHANGE], totals[Phase.WAIT]
    whole = own + exchange + wait
    return (own / whole, exchange / whole, wait / whole) if whole else (0.0, 0.0, 0.0)
