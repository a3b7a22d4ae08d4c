"""Commands for runs that are under way or have ended. RUN is a directory, a name, its beginning, or 'latest'."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from cordee.cli.output import print_json, print_table, print_text, wrapped
from cordee.core.interrupts import INTERRUPTED


def complete_runs(incomplete: str) -> list[str]:
    """Return the runs whose name begins so, for the shell."""
    from cordee.core.env import runs_folder
    from cordee.monitoring import list_runs

    return [
        name for name in ("latest", *(run.path.name for run in list_runs(runs_folder()))) if name.startswith(incomplete)
    ]


RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run: its directory, its name in `cordee runs`, the beginning of it, or 'latest'.",
        autocompletion=complete_runs,
    ),
]


def found(run: str) -> Path:
    """Return the directory of the run that is meant. Raises RunDirectoryError."""
    from cordee.core.env import runs_folder
    from cordee.monitoring import find_run

    return find_run(run, runs_folder())


def runs(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="FOLDER", help="Where runs are; else $CORDEE_RUNS or ./runs.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list instead of a table.")] = False,
) -> None:
    """List runs with their state, newest first."""
    from cordee.core.env import runs_folder
    from cordee.monitoring import list_runs, render_runs

    listed = list_runs(folder or runs_folder())
    if as_json:
        print_json(listed)
    elif not listed:
        print_text(f"no runs in {folder or runs_folder()}: start one with `cordee train JOB.toml`")
    else:
        print_table(render_runs(listed))


def show(
    run: RunName = "latest",
    as_json: Annotated[bool, typer.Option("--json", help="The same as JSON.")] = False,
) -> None:
    """Show how a run is: progress, results, losses, warnings, and what can be done next."""
    from cordee.monitoring.overview import describe_overview, next_commands, read_overview

    overview = read_overview(found(run))
    if as_json:
        print_json(overview)
        return
    rows = describe_overview(overview)
    widest = max(len(label) for label, _ in rows)
    lines = [wrapped(f"{label:<{widest}}  ", value) for label, value in rows]
    print_text("\n".join([*lines, "next", *(f"  {command}" for command in next_commands(overview.run))]))


def watch(run: RunName = "latest") -> None:
    """Show a run on the whole terminal, as it goes: progress, curves, members and what happened.

    Reads the run directory and changes nothing. Press q to leave; the run continues.
    """
    from cordee.core.errors import JobError

    path = found(run)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise JobError(f"cordee watch needs a terminal: `cordee show {path.name}` prints the same as lines")
    from cordee.tools.watch import watch_run

    watch_run(path)


def timeline(
    run: RunName = "latest",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="The file; else RUN.trace.json.gz here.", metavar="FILE", show_default=False
        ),
    ] = None,
) -> None:
    """Write what each member did when as a trace that ui.perfetto.dev and chrome://tracing open."""
    from cordee.monitoring.trace import write_trace

    path = found(run)
    file = output or Path(f"{path.resolve().name}.trace.json.gz")
    num_rows, num_members = write_trace(path, file)
    print_text(f"{file}: {num_rows} rows of {num_members} members; open it in ui.perfetto.dev or chrome://tracing")


def logs(
    run: RunName = "latest",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print what is added until the run ends.")] = False,
    member: Annotated[
        str,
        typer.Option("--member", help="Only of this member: worker-1, 1, launcher.", metavar="M", show_default=False),
    ] = "",
    tail: Annotated[
        int,
        typer.Option(
            "--tail", "-n", help="Begin with the last N lines; else all.", metavar="N", show_default=False, min=-1
        ),
    ] = -1,
) -> None:
    """Print the logs of all members of a run, merged by time."""
    from cordee.monitoring.merged_logs import LogLine, Logs
    from cordee.tools.run_control import follow_logs

    path = found(run)
    reader = Logs(path, member)
    members = reader.members()
    if not members:
        print_text(f"there are no logs in {path}")
        return
    widest = max(len(name) for name in members)

    def say(line: LogLine) -> None:
        print_text(line.text if member else f"{line.member:<{widest}} | {line.text}")

    lines = reader.new_lines()
    for line in lines if tail < 0 else lines[len(lines) - min(tail, len(lines)) :]:
        say(line)
    if follow:
        follow_logs(path, reader, say)


def stop(
    run: RunName,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the run has saved and ended.")] = True,
) -> None:
    """Stop a run after its step, saved; `cordee resume` continues it.

    The same as Ctrl-C in its terminal, or SIGTERM to its process.
    """
    from cordee.tools.run_control import stop_run

    path = found(run)
    state = stop_run(path, wait_s=None if wait else 0.0, say=print_text)
    if wait:
        print_text(f"{path.name} is {state}; `cordee resume {path.name}` continues it")


def resume(
    run: RunName = "latest",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Override one key, e.g. training.epochs=3.", metavar="K=V")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
) -> None:
    """Continue a run that was stopped, interrupted or killed, from its newest complete checkpoint.

    The same as `cordee train RUN/job.toml --resume --run-dir RUN`, or for a run of `cordee run --elastic` its --resume.
    """
    from cordee.core.errors import RunDirectoryError

    path = found(run)
    if not (path / "job.toml").is_file():
        raise RunDirectoryError(f"{path} is not a run directory: it has no job.toml")
    from cordee.runs.script.program import is_script_run

    if is_script_run(path):
        from cordee.tools.script_run import resume_script

        if resume_script(path, settings or ()).status == "interrupted":
            raise typer.Exit(INTERRUPTED)
        return
    from cordee.launch import train as run_training

    ended = run_training(path / "job.toml", overrides=settings or (), run_dir=path, resume=True, quiet=quiet)
    if ended.status == "interrupted":
        raise typer.Exit(INTERRUPTED)


def export(
    run: RunName,
    output: Annotated[
        list[Path] | None,
        typer.Option(
            "--output", "-o", help="File to write: .safetensors, .pt or .onnx (repeat for several).", metavar="FILE"
        ),
    ] = None,
    step: Annotated[int | None, typer.Option(help="The step of the checkpoint to take; else the newest.")] = None,
    best: Annotated[bool, typer.Option("--best", help="Take the checkpoint of the best evaluation.")] = False,
    trained: Annotated[
        bool, typer.Option("--trained", help="With training.ema: the weights themselves, not the averages.")
    ] = False,
) -> None:
    """Write the trained weights of a run for use elsewhere.

    Without --output: model.safetensors in the run directory. A .pt file is a state dict for
    `torch.load(..., weights_only=True)`; ONNX takes any batch size.
    """
    path = found(run)
    from cordee.tools.export import export_run

    outputs = output or [path / "model.safetensors"]
    for written in export_run(path, outputs, step=step, takes_best=best, takes_trained=trained):
        print_text(str(written))


def scale(
    run: RunName,
    workers: Annotated[int, typer.Argument(metavar="N", help="The new number of workers.", show_default=False)],
    threads: Annotated[
        int, typer.Option(help="Kernel threads of each worker; else unchanged.", metavar="T", show_default=False)
    ] = 0,
) -> None:
    """Change the number of workers of a run that is under way, up or down, and of their threads.

    Returns at once; workers join when they have loaded their data, and leave after a step.
    """
    from cordee.cluster.control import scale_run

    print_text(scale_run(found(run), workers, threads))


def dashboard(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="Begin with this run; else with the list.",
            show_default=False,
            autocompletion=complete_runs,
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="Where to listen; 0: the system chooses.", min=0, max=65535)] = 0,
    host: Annotated[str, typer.Option(help="Which address of this host to listen at.", metavar="H")] = "127.0.0.1",
    folder: Annotated[
        Path | None, typer.Option("--runs", help="Where runs are; else $CORDEE_RUNS or ./runs.", show_default=False)
    ] = None,
    until_closed: Annotated[bool, typer.Option("--until-closed", hidden=True)] = False,
) -> None:
    """Show runs in a web page, while they train and afterwards.

    Reads run directories and nothing else, and changes nothing. Prints the address to open, which carries a token:
    whoever has it can read the runs. Ctrl-C ends it; runs are not affected.
    """
    from cordee.core.env import runs_folder
    from cordee.monitoring import find_run

    folder = folder or runs_folder()
    path = find_run(run, folder) if run is not None else None
    from cordee.dashboard.server import serve

    serve(folder, path, (host, port), print_text, until_closed=until_closed)
