"""`cordee run --elastic`: the user's own script as a run, with a coordinator, a run directory and replaced workers."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cordee.cluster.engines import open_engine
from cordee.core import Job
from cordee.core.env import runs_folder
from cordee.core.errors import JobError, nearest
from cordee.core.fault_points import identify
from cordee.core.interrupts import InterruptFlag
from cordee.monitoring import AnyEvent, JsonlSink, Monitor, RunDirectory, Summary, events, setup_logging
from cordee.runs import PROCESS_MODULES
from cordee.runs.script.program import SCRIPT, SOURCE_FILE, is_script, read_source, script_job

SETTINGS = ("failure_timeout", "max_restarts", "min_workers", "wait_for_workers")  # of the section cluster

ALIAS = "cordee.horovod.alias:install"  # has workers import Cordée's modules where a script imports Horovod's


def resume_script(run_dir: Path, overrides: Sequence[str]) -> Summary:
    """Continue the run of a script from its newest checkpoint, as `run_elastic` does; return the summary."""
    job = Job.load(run_dir / "job.toml", overrides)
    cluster = {key: getattr(job.cluster, key) for key in SETTINGS}
    script = Path(job.model.args["path"])
    return run_elastic(
        script,
        list(job.model.args["args"]),
        job.strategy.workers,
        run_dir=run_dir,
        resume=True,
        cluster=cluster,
        as_horovod=bool(job.model.args.get("setup")),
    )


def run_elastic(
    script: Path,
    args: list[str],
    num_workers: int,
    *,
    run_dir: Path | None = None,
    resume: bool = False,
    cluster: dict[str, Any] | None = None,
    as_horovod: bool = False,
) -> Summary:
    """Run `script` on `num_workers` processes, and continue its loop without those that are lost; return the summary.

    `cluster` are settings of the section of that name in a job file. With `resume` the run in `run_dir` continues from
    its newest checkpoint. With `as_horovod` the script's `import horovod` imports Cordée's. Raises CordeeError that
    names the worker that failed first.
    """
    identify("launcher")
    if num_workers < 1:
        raise JobError(f"-n {num_workers} must be at least 1")
    for key in cluster or {}:
        if key not in SETTINGS:
            raise JobError(
                f"--set {key}: the settings of a script's run are {', '.join(SETTINGS)}{nearest(key, SETTINGS)}; its "
                "workers are processes of this host"
            )
    job = script_job(script, args, num_workers, cluster or {}, ALIAS if as_horovod else "")
    if resume and run_dir is None:
        raise JobError("--resume: say which run with --run-dir")
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(open_engine([*PROCESS_MODULES, "cordee.loop"], job))
        directory = stack.enter_context(_open_directory(job, script, run_dir, resume))
        stack.enter_context(setup_logging(directory.launcher_log, is_required=True))
        monitor = stack.enter_context(Monitor([JsonlSink(directory.events_file), _Notes()], member="launcher"))
        flag = stack.enter_context(
            InterruptFlag(
                lambda: monitor.emit(events.Warned(message="stopping after this step; Ctrl-C again stops at once"))
            )
        )
        # Here, and not above: torch is imported while the fork server does so as well.
        from cordee.launch import close_run, reporting_failure
        from cordee.runs.kind import lead_job

        started = events.RunStarted(strategy=SCRIPT, workers=num_workers, start_step=0, name=job.name)
        with reporting_failure(started, directory, monitor):
            summary = lead_job(job, directory, monitor, flag, engine, facts={}, resume=resume)
        summary = close_run(directory, monitor, summary, None)
    _tell(summary, directory.path, job)
    return summary


@contextlib.contextmanager
def _open_directory(job: Job, script: Path, run_dir: Path | None, resume: bool) -> Iterator[RunDirectory]:
    """Inside, the run has its directory, with the script as it is executed."""
    source = read_source(script)
    if resume:
        assert run_dir is not None
        before = Job.load(run_dir / "job.toml")
        if not is_script(before) or Path(before.model.args["path"]).name != script.name:
            raise JobError(f"{run_dir} is not a run of {script.name}")
        directory = RunDirectory.open_existing(run_dir)
        directory.write_job(job.to_toml())
        directory.summary_file.unlink(missing_ok=True)
    elif run_dir is not None:
        directory = RunDirectory.create(run_dir, job.to_toml())
    else:
        directory = RunDirectory.create_in(runs_folder(), job.name, job.to_toml())
    with directory:
        (directory.path / SOURCE_FILE).write_bytes(source)
        yield directory


class _Notes:
    """Prints what happens to the run; what the script prints comes from its workers."""

    def emit(self, event: AnyEvent) -> None:
        match event:
            case events.Warned(message=message):
                self._print(f"warning: {message}")
            case events.Recovery(step=step, seconds=seconds, steps_redone=redone):
                self._print(f"continued at step {step} after {seconds:.2f} s, {redone} steps redone")
            case events.Generation(generation=generation, members=members) if generation > 1:
                self._print(f"generation {generation}: workers {', '.join(map(str, members))}")

    def close(self) -> None:
        pass

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"cordee: {text}\n")


def _tell(summary: Summary, path: Path, job: Job) -> None:
    recoveries = f", {summary.recoveries} recoveries" if summary.recoveries else ""
    lines = [f"cordee: {summary.status} after {summary.steps} steps{recoveries}: {path}"]
    if summary.status == "interrupted":
        lines.append(f"cordee: this continues: cordee resume {shlex.quote(str(path))}")
    sys.stderr.write("\n".join(lines) + "\n")
