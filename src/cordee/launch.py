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
from cordee.assembly import Assembly, assemble
from cordee.cluster import Team
from cordee.core import Job
from cordee.core.env import runs_folder
from cordee.core.errors import CordeeError, JobError, RunDirectoryError, TrainingError
from cordee.core.job import changed_keys
from cordee.interrupts import InterruptFlag
from cordee.monitoring import (
    JsonlSink,
    Monitor,
    ProgressSink,
    RunDirectory,
    Sink,
    Summary,
    TensorBoardSink,
    list_runs,
    new_run_path,
    render_result,
    setup_logging,
)
from cordee.monitoring.summary import Status
from cordee.run import Run
from cordee.strategies import choose_strategy
from cordee.trainer import Outcome, Trainer
from cordee.version import __version__

log = logging.getLogger("cordee.launch")


def train(
    job: Job | Mapping[str, Any] | str | Path,
    *,
    overrides: Iterable[str] = (),
    run_dir: str | Path | None = None,
    resume: bool = False,
    quiet: bool = False,
) -> Run:
    """Train `job` (a Job, a table in the shape of the job file, or the path of one) and return the run.

    The first Ctrl-C ends the run after the step, saved, with the status 'interrupted'. Raises a CordeeError
    if the job cannot be run or the training fails; what was saved before stays, and `resume` goes on from it.
    """
    job = _as_job(job, overrides)
    strategy_name = choose_strategy(job)
    job = msgspec.structs.replace(job, strategy=msgspec.structs.replace(job.strategy, name=strategy_name))
    path = _run_path(job, run_dir, resume)
    if resume:
        _refuse_changes(path, job)
    with _leaving_torch_as_it_was():
        parts = assemble(job, Team())
        directory = RunDirectory.open_existing(path) if resume else RunDirectory.create(path, job.to_toml())
        with directory, setup_logging(directory.worker_log()):
            if resume:
                directory.write_job(job.to_toml())
                directory.summary_file.unlink(missing_ok=True)
            return _run(parts, directory, resume=resume, quiet=quiet)


def _run(parts: Assembly, directory: RunDirectory, *, resume: bool, quiet: bool) -> Run:
    job, started = parts.job, time.time()
    with Monitor(_sinks(job, directory, quiet)) as monitor:
        flag = InterruptFlag(
            lambda: monitor.emit("warning", message="stopping after this step; Ctrl-C again stops at once")
        )
        trainer = Trainer(parts, monitor, directory.checkpoints, should_stop=flag)
        outcome: Outcome | None = None
        error: BaseException | None = None
        try:
            with flag:
                if resume:
                    _resume(trainer, monitor, directory)
                _announce(parts, directory, monitor, start_step=trainer.progress.step)
                outcome = trainer.run()
        except (CordeeError, KeyboardInterrupt) as problem:
            error = problem
            raise
        except Exception as problem:  # the user's model, data or loss: their traceback is in the log
            log.exception("training failed at step %d", trainer.progress.step + 1)
            error = TrainingError(
                f"step {trainer.progress.step + 1} raised {type(problem).__name__}: {problem} "
                f"(the traceback is in {directory.worker_log()})"
            )
            raise error from problem
        finally:
            summary = _summarise(parts, trainer, outcome, error, started)
            directory.write_summary(summary)
            monitor.emit("run_ended", **msgspec.to_builtins(summary))
    run = Run(directory.path, summary, parts.strategy.model)
    if not quiet:
        _console().print(render_result(run.summary, run.directory, _hints(run)))
    return run


def _resume(trainer: Trainer, monitor: Monitor, directory: RunDirectory) -> None:
    loaded = checkpoint.load_newest(directory.checkpoints)
    if loaded is None:
        monitor.emit("warning", message="the run has no checkpoint yet: starting from the beginning")
        return
    for path, reason in loaded.damaged:
        monitor.emit("warning", message=f"checkpoint {path.name} is damaged ({reason}); using {loaded.path.name}")
    trainer.resume(loaded.state)


def _announce(parts: Assembly, directory: RunDirectory, monitor: Monitor, *, start_step: int) -> None:
    job, splits = parts.job, parts.splits
    monitor.emit(
        "run_started",
        run_dir=str(directory.path),
        name=job.name,
        strategy=job.strategy.name,
        workers=parts.team.num_workers,
        device=str(parts.computation.device),
        threads=parts.num_threads,
        model=job.to_dict()["model"]["use"],
        data=splits.name,
        parameters=parts.num_parameters,
        train_samples=splits.train.num_samples,
        test_samples=splits.test.num_samples if splits.test else None,
        batch_size=job.training.batch_size,
        total_steps=parts.total_steps,
        epochs=job.training.num_epochs,
        start_step=start_step,
        cordee_version=__version__,
        torch_version=str(torch.__version__),
    )
    monitor.emit(
        "worker_started", worker=parts.team.worker_index, pid=os.getpid(), host=socket.gethostname(), role="worker"
    )


def _summarise(
    parts: Assembly, trainer: Trainer, outcome: Outcome | None, error: BaseException | None, started: float
) -> Summary:
    progress = trainer.progress
    metrics = outcome.metrics if outcome else None
    status, stopped_by = _status(outcome, error)
    return Summary(
        status=status,
        name=parts.job.name,
        strategy=parts.job.strategy.name,
        workers=parts.team.num_workers,
        device=str(parts.computation.device),
        parameters=parts.num_parameters,
        steps=progress.step,
        epochs=progress.epoch,
        samples=progress.samples,
        wall_seconds=progress.elapsed_s,
        samples_per_second=outcome.samples_per_second if outcome else None,
        train_loss=outcome.train_loss if outcome else None,
        test_loss=metrics.loss if metrics else None,
        test_accuracy=metrics.accuracy if metrics else None,
        test_top5_accuracy=metrics.top5_accuracy if metrics else None,
        weights_sha256=checkpoint.weights_sha256(parts.strategy.model.state_dict()) if outcome else None,
        stopped_by=stopped_by,
        error=str(error) if status == "failed" else None,
        cordee_version=__version__,
        torch_version=str(torch.__version__),
        started=started,
        ended=time.time(),
    )


def _status(outcome: Outcome | None, error: BaseException | None) -> tuple[Status, str | None]:
    if isinstance(error, KeyboardInterrupt) or (outcome is not None and outcome.stopped_by == "interrupt"):
        return "interrupted", "interrupt"
    if outcome is None:
        return "failed", "error"
    return ("stopped" if outcome.stopped_by else "completed"), outcome.stopped_by


def _sinks(job: Job, directory: RunDirectory, quiet: bool) -> list[Sink]:
    sinks: list[Sink] = [JsonlSink(directory.events_file)]
    if not quiet:
        sinks.append(ProgressSink(_console()))
    if job.monitoring.tensorboard:
        sinks.append(TensorBoardSink(directory.tensorboard))
    return sinks


def _as_job(job: Job | Mapping[str, Any] | str | Path, overrides: Iterable[str]) -> Job:
    if isinstance(job, (str, Path)):
        return Job.load(job, overrides)
    if isinstance(job, Mapping):
        job = Job.from_dict(job)
    if not isinstance(job, Job):
        raise JobError(f"a job is a cordee.Job, a table or the path of a job file, not {type(job).__name__}")
    job = job.replace(overrides) if overrides else job
    return msgspec.structs.replace(job, python_path=tuple(dict.fromkeys([*job.python_path, *_program_folders()])))


def _program_folders() -> list[str]:
    """Return where this program finds its own modules, so that the job it writes finds them from elsewhere."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folders = [Path(script).parent, Path.cwd()] if script else [Path.cwd()]
    return [str(folder.resolve()) for folder in folders]


def _run_path(job: Job, run_dir: str | Path | None, resume: bool) -> Path:
    if run_dir is not None:
        return Path(run_dir)
    if not resume:
        return new_run_path(runs_folder(), job.name)
    candidates = [info for info in list_runs(runs_folder()) if info.name == job.name]
    if not candidates:
        raise RunDirectoryError(
            f"no run of '{job.name}' in {runs_folder()} to resume: name one with --run-dir, or start without --resume"
        )
    return max(candidates, key=lambda info: info.started or 0.0).path


def _refuse_changes(path: Path, job: Job) -> None:
    try:
        before = tomllib.loads((path / "job.toml").read_text(encoding="utf-8"))
    except OSError:
        return  # open_existing says what is wrong with the directory
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RunDirectoryError(f"{path / 'job.toml'} is damaged: {error}") from None
    if changes := changed_keys(before, tomllib.loads(job.to_toml())):
        raise JobError(
            f"the job has changed since the run in {path} began: {'; '.join(changes)}. "
            "Put it back to resume, or start a new run"
        )


def _console() -> Console:
    return Console(highlight=False)


def _hints(run: Run) -> list[str]:
    where = shlex.quote(str(run.directory))
    if run.status == "interrupted":
        return [f"cordee train {shlex.quote(str(run.directory / 'job.toml'))} --resume --run-dir {where}"]
    return [f"cordee export {where}", "cordee runs"]


@contextlib.contextmanager
def _leaving_torch_as_it_was() -> Iterator[None]:
    """Give the caller's random numbers and thread count back afterwards: a notebook goes on with them."""
    random_state, num_threads = torch.get_rng_state(), torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_rng_state(random_state)
        torch.set_num_threads(num_threads)
