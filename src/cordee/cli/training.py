"""Commands that train a job, and that make this host or process take part in a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from cordee.cli.output import print_text
from cordee.cli.run_commands import found
from cordee.core.interrupts import INTERRUPTED


def train(
    job: Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job file.", show_default=False)],
    strategy: Annotated[str | None, typer.Option(help="Instead of the job's strategy.name.", metavar="S")] = None,
    workers: Annotated[int | None, typer.Option(help="Instead of the job's strategy.workers.", metavar="N")] = None,
    engine: Annotated[str | None, typer.Option(help="Instead of the job's cluster.engine.", metavar="E")] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where the run is written; else a new folder in ./runs.", metavar="D")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --run-dir, or the newest.")] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Override one key, e.g. training.epochs=3.", metavar="K=V")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the job, say what would be trained, and end.")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when training has begun; the run outlives the terminal.")
    ] = False,
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Show the run in a web page while it trains; prints the address.")
    ] = False,
) -> None:
    """Train a job: progress on screen, everything else in the run directory.

    Ctrl-C stops after the step and saves; a second Ctrl-C stops at once. Exit code: 0 when the run ended well,
    2 for a mistake in the job, 1 for a failure, 130 after Ctrl-C.

    For example:

        cordee train examples/digits.toml --set training.epochs=3

        cordee train job.toml --run-dir runs/a --resume
    """
    overrides = list(settings or [])
    overrides += [f"strategy.name={strategy}"] if strategy is not None else []
    overrides += [f"strategy.workers={workers}"] if workers is not None else []

    overrides += [f"cluster.engine={engine}"] if engine is not None else []

    from cordee.cluster.engines import work_as_agent
    from cordee.core import Job

    if dry_run and (detach or resume):
        raise typer.BadParameter("--dry-run trains nothing: leave out --detach and --resume")
    # A mistake in it is reported at once, before the two seconds that importing torch takes.
    checked = Job.load(job, overrides)
    if dry_run:
        _check_only(job, overrides)
        return
    if detach:
        _train_detached(job, checked.name, overrides, run_dir, resume)
        return
    if (code := work_as_agent(checked.cluster.engine, checked)) is not None:
        raise typer.Exit(code)

    from cordee.launch import train as run_training

    with contextlib.ExitStack() as stack:
        if dashboard:
            run_dir = _run_dir(checked.name, run_dir, resume, "--dashboard")
            stack.enter_context(_showing(run_dir))
        run = run_training(job, overrides=overrides, run_dir=run_dir, resume=resume, quiet=quiet)
    if run.status == "interrupted":
        raise typer.Exit(INTERRUPTED)


def _check_only(job: Path, overrides: list[str]) -> None:
    from cordee.launch import check_job
    from cordee.monitoring.wording import header_lines

    parts = check_job(job, overrides=overrides)
    print_text("\n".join(header_lines(parts.describe())))
    for warning in parts.warnings:
        print_text(f"warning: {warning}")
    print_text("the job is sound; nothing was trained or written")


def _train_detached(job: Path, name: str, overrides: list[str], run_dir: Path | None, resume: bool) -> None:
    import shlex

    from cordee.tools.run_control import start_detached

    path = _run_dir(name, run_dir, resume, "--detach")
    arguments = [str(job), *(f"--set={override}" for override in overrides), *(["--resume"] if resume else [])]
    pid = start_detached(arguments, path)
    run = shlex.quote(str(path if run_dir else path.name))
    print_text(
        f"{path.name} trains as process {pid}\nnext\n  cordee show {run}\n  cordee logs {run} -f\n  cordee stop {run}"
    )


def _run_dir(name: str, run_dir: Path | None, resume: bool, option: str) -> Path:
    """Return where the run will be, for what has to know that before the run begins."""
    from cordee.core.env import runs_folder
    from cordee.core.errors import JobError
    from cordee.monitoring import new_run_path

    if resume and run_dir is None:
        raise JobError(f"--resume with {option} needs --run-dir: `cordee runs` lists the runs")
    return run_dir or new_run_path(runs_folder(), name)


@contextlib.contextmanager
def _showing(run: Path) -> Iterator[None]:
    """Inside, a process of its own shows the run, which is not there yet, in a web page."""
    import importlib
    import subprocess
    import sys
    from urllib.parse import quote

    importlib.import_module("cordee.dashboard.server")  # which packages are missing is said before training
    command = [sys.executable, "-m", "cordee", "dashboard", "--until-closed", "--runs", str(run.absolute().parent)]
    # The dashboard ends when the pipe does, however this process ends.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0) as shown:
        assert shown.stdin is not None
        assert shown.stdout is not None
        address, _, token = shown.stdout.readline().strip().partition("/?")
        if token:
            print_text(f"dashboard: {address}/run/{quote(run.name)}?{token}")
        yield
        shown.stdin.close()


def agent(
    address: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="Where the run listens, as this host reaches it.")
    ],
    ticket: Annotated[
        str, typer.Option(help="What the run printed; - reads it from standard input.", metavar="T", show_default=False)
    ],
) -> None:
    """Make this host a slot of a run: the run starts a worker here.

    The run, started with `--engine agents`, prints this command. A ticket is good for one agent. The job's data and
    modules must be on this host, and the same versions of cordee, torch and Python. Ctrl-C or SIGTERM has the worker
    leave after its step.
    """
    import signal
    import sys
    import threading

    import msgspec

    from cordee.cluster.engines.agent import run_agent
    from cordee.cluster.engines.agent_messages import AgentOrder

    order = AgentOrder.from_text(sys.stdin.readline() if ticket == "-" else ticket)
    is_asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: is_asked.set())
    print_text(f"an agent of the run at {address}; Ctrl-C leaves after the step")
    raise typer.Exit(run_agent(msgspec.structs.replace(order, address=f"tcp://{address}"), should_stop=is_asked.is_set))


def join(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A run: its directory or its name in `cordee runs`; or a ticket: a copy of its control.json.",
            show_default=False,
        ),
    ],
    data_root: Annotated[
        Path | None,
        typer.Option(help="On another host: where the job's data is there.", metavar="DIR", show_default=False),
    ] = None,
) -> None:
    """Become one more worker of a run that is under way, until it ends.

    Whoever can read control.json in the run's directory may join. From another host: copy that file (scp keeps it
    private) and give it as RUN; the run must have been started with cluster.address, and the job's data and modules
    must be there. Ctrl-C or SIGTERM leaves after the step, and nothing is lost. Exit code 1 if this worker fails;
    the run continues without it.

    For example:

        scp big:runs/lenet/control.json . && cordee join control.json
    """
    from cordee.cluster.control import reach, read_control

    place = found(run)
    control = read_control(place)  # what is wrong with it is reported before torch is imported
    reach(control, place)
    from cordee.tools.join import join_run

    join_run(place, control, data_root, print_text)
