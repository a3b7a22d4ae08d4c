"""From a job to a finished run: the run directory, the monitor, the worker, the summary."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from cordee.core.errors import JobError, RunDirectoryError, StorageError
from cordee.core.fault_points import identify, reach
from cordee.core.importing import refuse_what_workers_miss, stop_import
from cordee.core.interrupts import INTERRUPTED, InterruptFlag
from cordee.core.module_changes import refuse_changed_modules
from cordee.core.references import LIVE_PREFIX, Use, program_folders, texts_in
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
    read_events,
    render_result,
    setup_logging,
)
from cordee.monitoring.csv_file import CsvSink
from cordee.monitoring.timeline import Timeline, TimelineFolder
from cordee.monitoring.trackers import MlflowSink, WandbSink, flatten
from cordee.planner.auto import Decision, Replanner, decide, plans_first
from cordee.planner.kernels import Choice, choose_kernels
from cordee.planner.prediction import Prediction
from cordee.planner.recording import StepTimer, record_run
from cordee.run import Run
from cordee.runs import PROCESS_MODULES
from cordee.runs.kind import KINDS, describe_without_slot, kind_of, lead_run, needs_engine
from cordee.runs.resuming import (
    compare_data,
    continuing_with,
    describe_data,
    find_run_path,
    fit_to_run,
    resume_command,
    saying_how_to_resume,
)
from cordee.runs.script.program import is_script
from cordee.runs.storage import Claim, RunStorage, bring_run, claimed, open_storage, storing
from cordee.strategies.choice import choose_strategy, refuse_others_settings
from cordee.training.components import Components, assemble
from cordee.training.progress import Progress, summarise
from cordee.training.session import Session

log = logging.getLogger("cordee.launch")


def train(
    job: Job | Mapping[str, Any] | str | Path,
    *,
    overrides: Iterable[str] = (),
    data: Any = None,
    callbacks: Iterable[Any] = (),
    engine: str | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    quiet: bool = False,
) -> Run:
    """Train `job` (a Job, a table in the shape of the job file, or the path of one) and return the run.

    `data` is what to train on instead of the job's `data.use`: a Spark DataFrame, which Spark writes as Parquet to
    `checkpoint.storage`, or else beside the run directory, or anything that `data.use` may be. `engine` is where the
    processes of the run come from, instead of the job's `cluster.engine`. `callbacks` are called while the run trains,
    besides those of the job: objects, or with several processes classes or functions that make them.
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
    if is_script(asked):
        raise JobError(
            "the job is that of a script: `cordee run --elastic` starts it, `cordee resume RUN` continues it"
        )
    if named := {f"callback_{number}": Use(each) for number, each in enumerate(callbacks, 1)}:
        asked = msgspec.structs.replace(asked, callbacks={**asked.callbacks, **named})
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
    path = find_run_path(asked, run_dir, resume, storage)
    if resume and storage is not None:
        bring_run(storage, path)
    if frame is not None:
        beside = storage.url.rstrip("/") if storage is not None else str(path.absolute().parent)
        written = data_of_frame(frame, asked.data, f"{beside}/{path.absolute().name}-data", resume=resume)
        asked = msgspec.structs.replace(asked, data=written)
    asked, note = fit_to_run(asked, path, overrides) if resume else (asked, "")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_leaving_torch_as_it_was())
        opened: list[Engine] = []

        def open_processes(job: Job) -> None:
            opened.append(stack.enter_context(open_engine(PROCESS_MODULES, job)))

        parts, decision, kernels = _decide(asked, name, open_processes)
        job = parts.job
        asked = msgspec.structs.replace(asked, training=job.training)
        if needs_engine(job) and not opened:
            open_processes(job)
        if job.cluster.address:
            find_listening(job.cluster.address)
        data = describe_data(job, parts.splits)
        changed = compare_data(path, data, is_stored=storage is not None) if resume else ""
        if resume:
            directory = RunDirectory.open_existing(path)
        elif run_dir is not None:
            directory = RunDirectory.create(path, job.to_toml())
        else:
            directory = RunDirectory.create_in(runs_folder(), job.name, job.to_toml())
        claim = stack.enter_context(_claimed(storage, job, directory, data, resume, quiet))
        stack.enter_context(saying_how_to_resume(directory, _silent if quiet else _say))
        log_file = directory.launcher_log if opened else directory.worker_log()
        with directory, setup_logging(log_file, is_required=True), contextlib.ExitStack() as within:
            if resume:
                within.enter_context(continuing_with(directory, job, data))
            else:
                directory.write_data(data)
            _log_decision(asked, decision)
            with Monitor(_sinks(job, directory, quiet), member="launcher") as monitor:
                if opened and (description := opened[0].describe()):
                    if others := describe_without_slot(job):
                        description += f"; {others}"
                    monitor.emit(events.EngineOpened(engine=job.cluster.engine, description=description))
                if kernels.text:
                    monitor.emit(_describe_kernels(parts.job, kernels.text))
                if decision.prediction is not None:
                    monitor.emit(_describe_prediction(decision.prediction, decision.is_sure))
                told = [note, kernels.warning, changed]
                for warning in (*filter(None, told), *(() if resume else parts.warnings)):
                    monitor.emit(events.Warned(message=warning))
                monitor.add(timer := StepTimer())
                if asked.strategy.name == "auto":
                    monitor.add(Replanner(asked, parts, monitor.emit))
                flag = InterruptFlag(
                    lambda: monitor.emit(events.Warned(message="stopping after this step; Ctrl-C again stops at once"))
                )
                with flag, storing(claim, job, directory, monitor, flag, resume=resume) as stored:
                    if not opened:
                        summary = _run_alone(parts, directory, monitor, flag, resume, decision, memory, stored)
                    else:
                        marker = stored.marker if stored is not None else ""
                        with reporting_failure(parts.describe(), directory, monitor, stored):
                            summary = lead_run(parts, directory, monitor, flag, opened[0], resume=resume, marker=marker)
                            summary = _with_prediction(summary, decision)
                        summary = close_run(directory, monitor, summary, stored)
                        reach("launch.closed")
                        _load_weights(parts, directory)
                record_run(parts, timer, directory.path, summary)
    run = Run(directory.path, summary, parts.model)
    if not quiet:
        _console().print(render_result(run.summary, run.directory, _hints(run)), soft_wrap=True)
    return run


def check_job(job: Job | Mapping[str, Any] | str | Path, *, overrides: Iterable[str] = ()) -> Components:
    """Do all that `train` does before the first process starts and the first file is written; return what would train.

    Raises what `train` would raise.
    """
    asked = _as_job(job, overrides)
    check_settings(asked)
    with _leaving_torch_as_it_was():
        parts, _, _ = _decide(asked, choose_strategy(asked), lambda job: None)
    if parts.job.cluster.address:
        find_listening(parts.job.cluster.address)
    return parts


def _decide(asked: Job, name: str, open_early: Callable[[Job], None]) -> tuple[Components, Decision, Choice]:
    """Return what trains, why so, and how its kernels compute, checked.

    `open_early` is called where processes can start meanwhile.
    """
    refuse_others_settings(asked)
    job = msgspec.structs.replace(asked, strategy=msgspec.structs.replace(asked.strategy, name=name))
    if needs_engine(job):
        _refuse_live_parts(job)
        if used := _used_of_this_script(job):
            refuse_what_workers_miss(used)
        refuse_changed_modules([text for text in texts_in(job.to_dict()) if ":" in text])
        if not plans_first(asked):  # processes import torch while the job is looked at here
            open_early(job)
    team = Team(num_workers=job.strategy.workers, num_local_workers=job.strategy.workers)
    parts = assemble(job, team)
    kernels = choose_kernels(asked.training, parts)
    if kernels.training != parts.job.training:
        parts = assemble(msgspec.structs.replace(job, training=kernels.training), team)
    asked = msgspec.structs.replace(asked, training=kernels.training)
    decision = decide(asked, parts)
    if decision.job is not parts.job:
        parts = assemble(decision.job, team)
    KINDS[kind_of(parts.job)].check(parts)
    return parts, decision, kernels


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
    folder = TimelineFolder(directory.path)
    monitor.timeline = Timeline("worker-0", lambda line: folder.write("worker-0", line))
    monitor.timeline.enter("loading")
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
        summary = close_run(directory, monitor, summary, stored, error)
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
def reporting_failure(
    started_run: events.RunStarted, directory: RunDirectory, monitor: Monitor, stored: RunStorage | None = None
) -> Iterator[None]:
    """Write how far a run with worker processes came, if it ends with an error or a second Ctrl-C."""
    started = time.time()
    try:
        yield
    except BaseException as error:
        progress = _progress_by_events(directory.events_file, time.time() - started)
        summary = summarise(started_run, progress, None, started=started, error=error)
        close_run(directory, monitor, summary, stored, error)
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
        predicted_step_interval=decision.prediction.interval,
        predicted_memory_bytes=round(decision.prediction.memory_bytes),
        prediction_is_sure=decision.is_sure,
    )


def _describe_kernels(job: Job, reason: str) -> events.Kernels:
    chosen = job.training
    return events.Kernels(
        memory_format=chosen.memory_format, precision=chosen.precision, threads=chosen.num_threads, reason=reason
    )


def _describe_prediction(found: Prediction, is_sure: bool) -> events.Predicted:
    return events.Predicted(
        step_seconds=found.step_s,
        step_interval=found.interval,
        num_runs=found.num_runs,
        compute_seconds=found.compute_s,
        exchange_seconds=found.communication_s,
        idle_share=found.idle_share,
        memory_bytes=found.memory_bytes,
        traffic_bytes=found.traffic_bytes,
        is_sure=is_sure,
    )


def _log_decision(asked: Job, decision: Decision) -> None:
    if asked.strategy.name == "auto":
        log.info("strategy auto is %s: %s", decision.job.strategy.name, decision.reason)
    elif decision.prediction is not None:
        doubt = "" if decision.is_sure else ", not reliable, as the machine was busy when it was profiled"
        log.info(
            "a step is predicted to take %.3g s%s: %s", decision.prediction.step_s, doubt, decision.prediction.note
        )


def close_run(
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
    if job.monitoring.csv:
        sinks.append(CsvSink(directory.path / "metrics.csv"))
    if job.monitoring.mlflow:
        sinks.append(MlflowSink(directory.path, job.name, flatten(job.to_dict())))
    if job.monitoring.wandb:
        sinks.append(WandbSink(directory.path, job.name, flatten(job.to_dict())))
    return sinks


def _as_job(job: Job | Mapping[str, Any] | str | Path, overrides: Iterable[str]) -> Job:
    is_file = isinstance(job, (str, Path))
    job = Job.coerce(job, overrides)
    if is_file:
        return job  # which knows its own folder
    return msgspec.structs.replace(job, python_path=tuple(dict.fromkeys([*job.python_path, *program_folders()])))


@contextlib.contextmanager
def _claimed(
    storage: Storage | None, job: Job, directory: RunDirectory, data: str, resume: bool, quiet: bool
) -> Iterator[Claim | None]:
    """Inside, the run has its place in the storage. A new directory is removed if it cannot have that."""
    is_claimed = False
    try:
        with claimed(storage, job, directory, data, is_new=not resume, say=_silent if quiet else _say) as claim:
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


def _refuse_live_parts(job: Job) -> None:
    """Workers are other processes: what they use must have a name they can import it by."""
    sections = job.to_dict()
    listed = {f"{kind}.{name}": table for kind in ("metrics", "callbacks") for name, table in sections[kind].items()}
    for section, table in {**sections, **listed}.items():
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
    return [text.removeprefix(prefix) for text in texts_in(job.to_dict()) if text.startswith(prefix)]


def _console() -> Console:
    return Console(highlight=False)


@contextlib.contextmanager
def _leaving_torch_as_it_was() -> Iterator[None]:
    """Give the caller's random numbers and thread count back afterwards: a notebook continues with them."""
    random_state, num_threads = torch.get_rng_state(), torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_rng_state(random_state)
        torch.set_num_threads(num_threads)


def _hints(run: Run) -> list[str]:
    if run.status == "interrupted":
        return [resume_command(run.directory)]
    return [f"cordee export {shlex.quote(str(run.directory))}", "cordee runs"]
