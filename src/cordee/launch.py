"""From a job to a finished run: the run directory, the monitor, the worker, the summary."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import socket
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console

from cordee import checkpoint
from cordee.checkpoint.storage import Storage
from cordee.cluster import Team
from cordee.cluster.engine import Engine
from cordee.cluster.engines import check_settings, lead_launch, open_engine, place_run, work_as_agent
from cordee.communication.this_host import find_listening
from cordee.compute.devices import MemoryWatch
from cordee.core import Job
from cordee.core.env import runs_folder
from cordee.core.errors import CheckpointError, JobError, RunDirectoryError, StorageError
from cordee.core.fault_points import identify, reach
from cordee.core.importing import refuse_what_workers_miss, stop_import
from cordee.core.interrupts import INTERRUPTED, InterruptFlag
from cordee.core.job import changed_keys
from cordee.core.module_changes import refuse_changed_modules
from cordee.core.references import LIVE_PREFIX
from cordee.data.dataframes import SOURCE, data_of_frame, is_dataframe
from cordee.monitoring import (
    JsonlSink,
    Monitor,
    ProgressSink,
    RunDirectory,
    Sink,
    Summary,
    TensorBoardSink,
    events,
    list_runs,
    new_run_path,
    read_events,
    render_result,
    setup_logging,
)
from cordee.planner.auto import Decision, Replanner, decide, plans_first
from cordee.run import Run
from cordee.runs import PROCESS_MODULES
from cordee.runs.kind import KINDS, kind_of, lead_run, needs_engine
from cordee.runs.storage import Claim, RunStorage, bring_run, claimed, find_stored, open_storage, storing
from cordee.strategies.choice import choose_strategy, foreign_settings, refuse_others_settings
from cordee.training.components import Components, assemble
from cordee.training.progress import Progress, summarise
from cordee.training.session import Session

log = logging.getLogger("cordee.launch")


def train(
    job: Job | Mapping[str, Any] | str | Path,
    *,
    overrides: Iterable[str] = (),
    data: Any = None,
    engine: str | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    quiet: bool = False,
) -> Run:
    """Train `job` (a Job, a table in the shape of the job file, or the path of one) and return the run.

    `data` is what to train on instead of the job's `data.use`: a Spark DataFrame, which Spark writes as Parquet to
    `checkpoint.storage`, or else beside the run directory, or anything that `data.use` may be. `engine` is where the
    processes of the run come from, instead of the job's `cluster.engine`.
    The first Ctrl-C ends the run after the step, saved, with the status 'interrupted'. Raises a CordeeError
    if the job cannot be run or the training fails; what was saved before stays, and `resume` continues from it.
    """
    stop_import("cordee.train")
    memory = MemoryWatch()
    identify("launcher")
    overrides = [*overrides, *([f"cluster.engine={engine}"] if engine is not None else [])]
    if isinstance(job, Mapping) and data is not None:
        section = job.get("data", {})
        job = {**job, "data": {"use": SOURCE, **section} if isinstance(section, Mapping) else section}
    asked = _as_job(job, overrides)
    if data is not None and not is_dataframe(data):
        asked = msgspec.structs.replace(asked, data=msgspec.structs.replace(asked.data, use=data))
    check_settings(asked)
    if (code := work_as_agent(asked.cluster.engine, asked)) is not None:
        raise SystemExit(code)  # the program runs in every process that a scheduler started, and trains in one
    with lead_launch(asked.cluster.engine) as set_code:
        placed, resume = place_run(asked, Path(run_dir) if run_dir is not None else None, resume)
        run = _train(asked, overrides, placed, resume, quiet, memory, data if is_dataframe(data) else None)
        set_code(INTERRUPTED if run.status == "interrupted" else 0)
    return run


def _train(
    asked: Job,
    overrides: list[str],
    run_dir: Path | None,
    resume: bool,
    quiet: bool,
    memory: MemoryWatch,
    frame: Any = None,
) -> Run:
    """Train in this process, and in those that the engine starts."""
    name = choose_strategy(asked)
    storage = open_storage(asked)
    path = _run_path(asked, run_dir, resume, storage)
    if resume and storage is not None:
        bring_run(storage, path)
    if frame is not None:
        beside = storage.url.rstrip("/") if storage is not None else str(path.absolute().parent)
        written = data_of_frame(frame, asked.data, f"{beside}/{path.absolute().name}-data", resume=resume)
        asked = msgspec.structs.replace(asked, data=written)
    asked, note = fit_to_run(asked, path, overrides) if resume else (asked, "")
    refuse_others_settings(asked)
    strategy = msgspec.structs.replace(asked.strategy, name=name)
    job = msgspec.structs.replace(asked, strategy=strategy)
    num_workers = job.strategy.workers
    with contextlib.ExitStack() as stack:
        stack.enter_context(_leaving_torch_as_it_was())
        opened: Engine | None = None
        if needs_engine(job):
            _refuse_live_parts(job)
            if used := _used_of_this_script(job):
                refuse_what_workers_miss(used)
            refuse_changed_modules([text for text in _texts(job.to_dict()) if ":" in text])
            if not plans_first(asked):  # it imports torch while the job is looked at here
                opened = stack.enter_context(open_engine(PROCESS_MODULES, job))
        team = Team(num_workers=num_workers, num_local_workers=num_workers)
        parts = assemble(job, team)
        decision = decide(asked, parts)
        if decision.job is not parts.job:
            job = decision.job
            parts = assemble(job, team)
        if needs_engine(job) and opened is None:
            opened = stack.enter_context(open_engine(PROCESS_MODULES, job))
        KINDS[kind_of(job)].check(parts)
        if job.cluster.address:
            find_listening(job.cluster.address)
        if resume:
            directory = RunDirectory.open_existing(path)
        elif run_dir is not None:
            directory = RunDirectory.create(path, job.to_toml())
        else:
            directory = RunDirectory.create_in(runs_folder(), job.name, job.to_toml())
        claim = stack.enter_context(_claimed(storage, job, directory, resume, quiet))
        stack.enter_context(_printing_how_to_resume(directory, quiet))
        with directory, setup_logging(directory.launcher_log if opened else directory.worker_log(), is_required=True):
            if resume:
                directory.write_job(job.to_toml())
                directory.summary_file.unlink(missing_ok=True)
            _log_decision(asked, decision)
            with Monitor(_sinks(job, directory, quiet), member="launcher") as monitor:
                if opened is not None and (description := opened.describe()):
                    monitor.emit(events.EngineOpened(engine=job.cluster.engine, description=description))
                for warning in (*([note] if note else []), *(() if resume else parts.warnings)):
                    monitor.emit(events.Warned(message=warning))
                if asked.strategy.name == "auto":
                    monitor.add(Replanner(asked, parts, monitor.emit))
                flag = InterruptFlag(
                    lambda: monitor.emit(events.Warned(message="stopping after this step; Ctrl-C again stops at once"))
                )
                with flag, storing(claim, job, directory, monitor, flag, resume=resume) as stored:
                    if opened is None:
                        summary = _run_alone(parts, directory, monitor, flag, resume, decision, memory, stored)
                    else:
                        marker = stored.marker if stored is not None else ""
                        with _reporting_failure(parts, directory, monitor, stored):
                            summary = lead_run(parts, directory, monitor, flag, opened, resume=resume, marker=marker)
                            summary = _with_prediction(summary, decision)
                        summary = _close_run(directory, monitor, summary, stored)
                        reach("launch.closed")
                        _load_weights(parts, directory)
    run = Run(directory.path, summary, parts.model)
    if not quiet:
        _console().print(render_result(run.summary, run.directory, _hints(run)), soft_wrap=True)
    return run


def _run_alone(
    parts: Components,
    directory: RunDirectory,
    monitor: Monitor,
    flag: InterruptFlag,
    resume: bool,
    decision: Decision,
    memory: MemoryWatch,
    stored: RunStorage | None,
) -> Summary:
    """Train in this process."""
    session = Session(parts, monitor, directory.path, should_stop=flag, memory=memory)
    error: BaseException | None = None
    try:
        parts.setup()
        monitor.emit(events.WorkerStarted(worker=0, pid=os.getpid(), host=socket.gethostname(), role="worker"))
        session.run(resume=resume, log_file=directory.worker_log())
    except BaseException as problem:
        error = problem
        if isinstance(problem, Exception):
            session.close()  # what was saved before the error is not lost
        raise
    finally:
        summary = _with_prediction(session.summarise(error), decision)
        summary = _close_run(directory, monitor, summary, stored, error)
    return summary


def _progress_by_events(events_file: Path, elapsed_s: float) -> Progress:
    """Return how far the run came by its events; lines that are damaged, or a file that is, count as not there."""
    progress = Progress(elapsed_s=elapsed_s)
    with contextlib.suppress(OSError, RunDirectoryError):
        for event in read_events(events_file):
            if event["type"] == "step":
                with contextlib.suppress(msgspec.ValidationError):
                    last = msgspec.convert(event, events.Step)
                    if last.epoch is not None and last.samples is not None:
                        progress.step, progress.epoch, progress.samples = last.step, last.epoch - 1, last.samples
    return progress


@contextlib.contextmanager
def _reporting_failure(
    parts: Components, directory: RunDirectory, monitor: Monitor, stored: RunStorage | None = None
) -> Iterator[None]:
    """Write how far a run with worker processes came, if it ends with an error or a second Ctrl-C."""
    started = time.time()
    try:
        yield
    except BaseException as error:
        progress = _progress_by_events(directory.events_file, time.time() - started)
        summary = summarise(parts.describe(), progress, None, started=started, error=error)
        _close_run(directory, monitor, summary, stored, error)
        raise


def _load_weights(parts: Components, directory: RunDirectory) -> None:
    """Put the weights that worker processes have trained into the model of `parts`."""
    if (loaded := checkpoint.load_newest(directory.checkpoints)) is not None:
        checkpoint.load_model_state(parts.model, loaded.state.part("model").tensors)


def _with_prediction(summary: Summary, decision: Decision) -> Summary:
    """Return the summary with what was predicted, and what a step took beside it."""
    if decision.prediction is None:
        return summary
    return msgspec.structs.replace(
        summary,
        predicted_step_seconds=decision.prediction.step_s,
        predicted_memory_bytes=round(decision.prediction.memory_bytes),
        prediction_is_sure=decision.is_sure,
    )


def _log_decision(asked: Job, decision: Decision) -> None:
    if asked.strategy.name == "auto":
        log.info("strategy auto is %s: %s", decision.job.strategy.name, decision.reason)
    elif decision.prediction is not None:
        doubt = "" if decision.is_sure else ", not reliable, as the machine was busy when it was profiled"
        log.info(
            "a step is predicted to take %.3g s%s: %s", decision.prediction.step_s, doubt, decision.prediction.note
        )


def _close_run(
    directory: RunDirectory,
    monitor: Monitor,
    summary: Summary,
    stored: RunStorage | None,
    error: BaseException | None = None,
) -> Summary:
    """Write how the run ended, when its checkpoints are in the storage; return that.

    Raises StorageError if it cannot be written, but not in place of what the run failed with.
    """
    if stored is not None:
        summary = stored.finish(summary, at_once=isinstance(error, KeyboardInterrupt))
    problem: StorageError | None = None
    try:
        reach("launch.summary", StorageError)
        directory.write_summary(summary)
    except StorageError as error:
        problem = error
        monitor.emit(events.Warned(message=str(error)))
    monitor.emit(events.RunEnded.of(summary))
    if problem is not None and summary.status in ("completed", "stopped"):
        raise problem
    return summary


def _sinks(job: Job, directory: RunDirectory, quiet: bool) -> list[Sink]:
    sinks: list[Sink] = [JsonlSink(directory.events_file)]
    if not quiet:
        sinks.append(ProgressSink(_console()))
    if job.monitoring.tensorboard:
        sinks.append(TensorBoardSink(directory.tensorboard))
    return sinks


def _as_job(job: Job | Mapping[str, Any] | str | Path, overrides: Iterable[str]) -> Job:
    is_file = isinstance(job, (str, Path))
    job = Job.coerce(job, overrides)
    if is_file:
        return job  # which knows its own folder
    return msgspec.structs.replace(job, python_path=tuple(dict.fromkeys([*job.python_path, *_program_folders()])))


def _program_folders() -> list[str]:
    """Return where this program finds its own modules, so that the job it writes finds them from elsewhere."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folders = [Path(script).parent, Path.cwd()] if script else [Path.cwd()]
    return [str(folder.resolve()) for folder in folders]


@contextlib.contextmanager
def _claimed(
    storage: Storage | None, job: Job, directory: RunDirectory, resume: bool, quiet: bool
) -> Iterator[Claim | None]:
    """Inside, the run has its place in the storage. A new directory is removed if it cannot have that."""
    is_claimed = False
    try:
        with claimed(storage, job, directory, is_new=not resume, say=_silent if quiet else _say) as claim:
            is_claimed = True
            yield claim
    finally:
        if not is_claimed and not resume:
            directory.discard()
        elif not is_claimed:
            directory.release()


def _silent(message: str) -> None:
    log.info("%s", message)


def _say(message: str) -> None:
    _console().print(message, soft_wrap=True)


def _run_path(job: Job, run_dir: str | Path | None, resume: bool, storage: Storage | None) -> Path:
    if run_dir is not None:
        return Path(run_dir)
    if not resume:
        return new_run_path(runs_folder(), job.name)
    candidates = [info for info in list_runs(runs_folder()) if info.name == job.name]
    newest = max(candidates, key=lambda info: info.started or 0.0, default=None)
    stored = find_stored(storage, job.name) if storage is not None else None
    if stored is not None and (newest is None or stored.started > (newest.started or 0.0)):
        return runs_folder() / stored.name
    if newest is None:
        where = f"{runs_folder()}" + (f" or in {storage.url}" if storage is not None else "")
        raise RunDirectoryError(
            f"no run of '{job.name}' in {where} to resume: name one with --run-dir, or start without --resume"
        )
    return newest.path


def _refuse_live_parts(job: Job) -> None:
    """Workers are other processes: what they use must have a name they can import it by."""
    for section, table in job.to_dict().items():
        if isinstance(table, dict) and str(table.get("use", "")).startswith(LIVE_PREFIX):
            raise JobError(
                f"{section}: {table['use'].removeprefix(LIVE_PREFIX)} exists only in this process, and the job has "
                f"{job.strategy.workers} workers: define it in a module and name it 'module:callable', "
                "or set strategy.workers = 1"
            )


def _used_of_this_script(job: Job) -> list[str]:
    """Return the names of the program's own file that the job uses."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is None:
        return []
    prefix = f"{Path(script).resolve()}:"
    return [text.removeprefix(prefix) for text in _texts(job.to_dict()) if text.startswith(prefix)]


def _texts(table: Any) -> Iterator[str]:
    if isinstance(table, str):
        yield table
    elif isinstance(table, Mapping | list | tuple):
        for value in table.values() if isinstance(table, Mapping) else table:
            yield from _texts(value)


def _console() -> Console:
    return Console(highlight=False)


def _hints(run: Run) -> list[str]:
    if run.status == "interrupted":
        return [_resume_command(run.directory)]
    return [f"cordee export {shlex.quote(str(run.directory))}", "cordee runs"]


def _resume_command(path: Path) -> str:
    return f"cordee train {shlex.quote(str(path / 'job.toml'))} --resume --run-dir {shlex.quote(str(path))}"


@contextlib.contextmanager
def _printing_how_to_resume(directory: RunDirectory, quiet: bool) -> Iterator[None]:
    """After a second Ctrl-C or a failure: print what is kept and the command that continues from it."""
    try:
        yield
    except (KeyboardInterrupt, Exception) as error:
        is_interrupted = isinstance(error, KeyboardInterrupt)
        kept = _newest_whole(directory.checkpoints)
        start = f"continues from {kept}" if kept else "starts again: there is no checkpoint yet"
        if not quiet and (is_interrupted or (kept and not isinstance(error, CheckpointError))):
            what = "stopped at once" if is_interrupted else "the run failed"
            _console().print(f"{what}; this {start}\n  {_resume_command(directory.path)}", soft_wrap=True)
        raise


def _newest_whole(checkpoints: Path) -> str | None:
    """Return the name of the newest checkpoint that is whole by its manifest and sizes, if there is one."""
    try:
        found = checkpoint.list_checkpoints(checkpoints)
    except CheckpointError:
        return None
    return next((path.name for path in reversed(found) if checkpoint.looks_whole(path)), None)


@contextlib.contextmanager
def _leaving_torch_as_it_was() -> Iterator[None]:
    """Give the caller's random numbers and thread count back afterwards: a notebook continues with them."""
    random_state, num_threads = torch.get_rng_state(), torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_rng_state(random_state)
        torch.set_num_threads(num_threads)


def fit_to_run(job: Job, path: Path, overrides: Iterable[str]) -> tuple[Job, str]:
    """Return the job as it continues in the run directory `path`, and what is left out of it, in words.

    Settings of the strategy that the run had before are left out if it continues with another, unless `overrides` (of
    the form "a.b=c") give them. Raises JobError for changes that would make it another run, and RunDirectoryError if
    what the directory says is damaged.
    """
    before = _recorded(path)
    if before is None:
        return job, ""
    now = tomllib.loads(job.to_toml())
    if changes := changed_keys(before, now):
        raise JobError(
            f"the job has changed since the run in {path} began: {'; '.join(changes)}. "
            "Put it back to resume, or start a new run"
        )
    name, old = choose_strategy(job), before.get("strategy", {})
    if name == old.get("name"):
        return job, ""
    asked_for = {keys[-1] for keys in map(_keys, overrides) if keys[0] == "strategy"}
    stale = [
        key
        for key in foreign_settings(name, job.strategy.settings)
        if key not in asked_for and key in old and old[key] == now["strategy"].get(key)
    ]
    if not stale:
        return job, ""
    settings = {key: value for key, value in job.strategy.settings.items() if key not in stale}
    listed = ", ".join(f"strategy.{key} = {old[key]!r}" for key in stale)
    note = f"left out, since the run continues with '{name}' and not with '{old.get('name')}': {listed}"
    return msgspec.structs.replace(job, strategy=msgspec.structs.replace(job.strategy, settings=settings)), note


def _recorded(path: Path) -> Mapping[str, Any] | None:
    try:
        return tomllib.loads((path / "job.toml").read_text(encoding="utf-8"))
    except OSError:
        return None  # whoever opens the directory says what is wrong with it
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RunDirectoryError(f"{path / 'job.toml'} is damaged: {error}") from None


def _keys(override: str) -> list[str]:
    return override.partition("=")[0].strip().split(".")
