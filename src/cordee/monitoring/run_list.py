"""Which runs there are, and how each of them is."""

from __future__ import annotations

import itertools
import tomllib
from pathlib import Path
from typing import Literal

import msgspec

from cordee.core.errors import RunDirectoryError, nearest
from cordee.monitoring.files import read_regular, reason
from cordee.monitoring.jsonl import read_events
from cordee.monitoring.run_directory import EVENTS_FILE, JOB_FILE, LOCK_FILE, SUMMARY_FILE, is_locked
from cordee.monitoring.summary import Status, Summary, read_summary

State = Literal["running", "completed", "stopped", "interrupted", "failed", "died", "unreadable"]
_TAIL_BYTES = 1 << 20  # about 100,000 steps at the usual 20 steps between two events
_MOST_JOB_BYTES = 1 << 20
_NUM_FIRST = 256  # events among which the start of the run is: processes and warnings may come before it


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One run as `cordee runs` lists it; what is not known is None."""

    path: Path
    state: State  # "died": was killed, can be resumed
    name: str
    strategy: str | None = None
    workers: int | None = None
    started: float | None = None  # unix seconds
    wall_seconds: float | None = None
    steps: int | None = None
    test_accuracy: float | None = None
    samples_per_second: float | None = None
    faults: int | None = None  # processes that were lost
    problem: str | None = None  # what is wrong with an unreadable one


class _Strategy(msgspec.Struct):
    name: str | None = None
    workers: int | None = None


class _JobFile(msgspec.Struct):
    name: str = ""
    strategy: _Strategy = msgspec.field(default_factory=_Strategy)


class Trace(msgspec.Struct):
    """The fields of all events that say how a run is."""

    type: str = ""
    time: float | None = None
    status: Status | None = None
    strategy: str | None = None
    workers: int | None = None
    start_step: int | None = None
    step: int | None = None
    round: int | None = None
    test_accuracy: float | None = None
    samples_per_second: float | None = None


class Traces(msgspec.Struct):
    """What the end of an events file says of a run that has no summary (yet)."""

    started: Trace = msgspec.field(default_factory=Trace)
    step: Trace = msgspec.field(default_factory=Trace)
    evaluation: Trace = msgspec.field(default_factory=Trace)
    last: Trace = msgspec.field(default_factory=Trace)
    num_lost: int = 0


def list_runs(runs_folder: str | Path) -> list[RunInfo]:
    """Return the runs in `runs_folder`, newest first; none when there is no such folder.

    A folder that is damaged or may not be read is listed as unreadable. Raises `RunDirectoryError` when
    `runs_folder` itself cannot be read.
    """
    try:
        folders = [path for path in Path(runs_folder).iterdir() if path.is_dir() and not path.name.startswith(".")]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunDirectoryError(f"cannot list the runs in {runs_folder}: {reason(error)}") from None
    runs = [run for run in map(inspect_run, folders) if run is not None]
    return sorted(runs, key=lambda run: (run.started or 0.0, run.path.name), reverse=True)


LATEST = "latest"


def find_run(text: str | Path, runs_folder: str | Path) -> Path:
    """Return the run directory that a person means: a path, or in `runs_folder` a name, the beginning of one, "latest".

    A path that exists is taken as it is, a file too: a ticket stands for its run. Raises `RunDirectoryError` where
    nothing, or more than one run, is meant.
    """
    name, folder = str(text), Path(runs_folder)
    path = Path(name).expanduser()
    if path.exists() or "/" in name:
        return path
    runs = list_runs(folder)
    if name == LATEST:
        if not runs:
            raise RunDirectoryError(f"there are no runs in {folder}: `cordee train JOB.toml` makes one")
        return runs[0].path
    names = [run.path.name for run in runs]
    meant = [each for each in names if each == name] or [each for each in names if each.startswith(name)]
    if len(meant) == 1:
        return folder / meant[0]
    if meant:
        few = ", ".join(meant[:3]) + (f" and {len(meant) - 3} more" if len(meant) > 3 else "")
        raise RunDirectoryError(f"{name!r} is the beginning of {few}: write more of the name, or '{LATEST}'")
    raise RunDirectoryError(
        f"there is no run directory {name!r}, and no run of this name in {folder}{nearest(name, names)}: "
        "`cordee runs` lists what there is"
    )


def inspect_run(path: Path) -> RunInfo | None:
    """Return how the run in `path` is, or None when the folder holds no run."""
    try:
        if not any((path / name).exists() for name in (JOB_FILE, EVENTS_FILE, SUMMARY_FILE)):
            return None
        job = msgspec.convert(tomllib.loads(read_regular(path / JOB_FILE, _MOST_JOB_BYTES).decode()), _JobFile)
        is_running = is_locked(path / LOCK_FILE)
        summary = read_summary(path / SUMMARY_FILE)
        # Beside a summary only the last event matters.
        traces = _read_traces(path / EVENTS_FILE, _TAIL_BYTES if summary is None or is_running else 1 << 14)
        return _describe(path, job, is_running, summary, traces)
    except OSError as error:
        problem = f"{Path(error.filename).name if error.filename else path.name}: {reason(error)}"
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        problem = f"{JOB_FILE}: {error}"
    except (msgspec.DecodeError, RunDirectoryError) as error:
        problem = str(error)
    return RunInfo(path=path, state="unreadable", name=path.name, started=_changed(path), problem=problem)


def resolve_state(is_running: bool, summary: Summary | None, last_event: Trace) -> State:
    """Return the state that a lock, a summary and the last event of a run amount to."""
    if is_running:
        return "running"
    has_ended = last_event.type == "run_ended"
    if summary is not None:
        # A run that ended, was resumed, and was then killed has a summary that is older than its last event.
        is_outdated = summary.ended is not None and (last_event.time or 0.0) > summary.ended and not has_ended
        return "died" if is_outdated else summary.status
    return last_event.status if has_ended and last_event.status else "died"


def _describe(path: Path, job: _JobFile, is_running: bool, summary: Summary | None, traces: Traces) -> RunInfo:
    state = resolve_state(is_running, summary, traces.last)
    name = job.name or path.name
    if summary is not None and state == summary.status:
        return RunInfo(
            path=path,
            state=state,
            name=summary.name or name,
            strategy=summary.strategy or job.strategy.name,
            workers=summary.workers,
            started=summary.started or traces.started.time,
            wall_seconds=summary.wall_seconds,
            steps=summary.steps,
            test_accuracy=summary.test_accuracy,
            samples_per_second=summary.samples_per_second,
            faults=summary.recoveries,
        )
    started, last = traces.started.time, traces.last.time
    return RunInfo(
        path=path,
        state=state,
        name=name,
        strategy=traces.started.strategy or job.strategy.name,
        workers=traces.started.workers or job.strategy.workers,
        started=started or _changed(path),
        wall_seconds=last - started if started and last else None,
        steps=traces.step.step if traces.step.step is not None else traces.started.start_step,
        test_accuracy=traces.evaluation.test_accuracy,
        samples_per_second=traces.step.samples_per_second,
        faults=traces.num_lost,
    )


def _read_traces(path: Path, tail_bytes: int) -> Traces:
    traces = Traces()
    if not path.exists():
        return traces
    for table in read_events(path, tail_bytes=tail_bytes):
        event = traces.last = msgspec.convert(table, Trace)
        if event.type == "run_started":
            traces.started = event
        elif event.type == "step":
            traces.step = event
        elif event.type == "round":
            event.step, traces.step = event.round, event
        elif event.type == "evaluation":
            traces.evaluation = event
        elif event.type == "worker_lost":
            traces.num_lost += 1
    if not traces.started.type:
        first = (msgspec.convert(table, Trace) for table in itertools.islice(read_events(path), _NUM_FIRST))
        traces.started = next((event for event in first if event.type == "run_started"), traces.started)
    return traces


def _changed(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
