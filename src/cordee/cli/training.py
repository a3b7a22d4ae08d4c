"""Commands that train a job, and commands for its runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cordee.cli.output import print_json, print_table, print_text
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

    # A mistake in it is reported at once, before the two seconds that importing torch takes.
    checked = Job.load(job, overrides)
    if (code := work_as_agent(checked.cluster.engine, checked)) is not None:
        raise typer.Exit(code)

    from cordee.launch import train as run_training

    run = run_training(job, overrides=overrides, run_dir=run_dir, resume=resume, quiet=quiet)
    if run.status == "interrupted":
        raise typer.Exit(INTERRUPTED)


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)],
    output: Annotated[
        list[Path] | None,
        typer.Option(
            "--output", "-o", help="File to write: .safetensors, .pt or .onnx (repeat for several).", metavar="FILE"
        ),
    ] = None,
    step: Annotated[int | None, typer.Option(help="The step of the checkpoint to take; else the newest.")] = None,
    best: Annotated[bool, typer.Option("--best", help="Take the checkpoint of the best evaluation.")] = False,
) -> None:
    """Write the trained weights of a run for use elsewhere.

    Without --output: model.safetensors in the run directory. A .pt file is a state dict for
    `torch.load(..., weights_only=True)`; ONNX takes any batch size.
    """
    from cordee.tools.export import export_run

    for path in export_run(run, output or [run / "model.safetensors"], step=step, takes_best=best):
        print_text(str(path))


def runs(
    folder: Annotated[
        Path | None, typer.Argument(help="Where runs are; else $CORDEE_RUNS or ./runs.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list instead of a table.")] = False,
) -> None:
    """List runs with their state, newest first."""
    from cordee.core.env import runs_folder
    from cordee.monitoring import list_runs, render_runs

    found = list_runs(folder or runs_folder())
    if as_json:
        print_json(found)
    elif not found:
        print_text(f"no runs in {folder or runs_folder()}: start one with `cordee train JOB.toml`")
    else:
        print_table(render_runs(found))


def scale(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's directory.", show_default=False)],
    workers: Annotated[int, typer.Argument(metavar="N", help="The new number of workers.", show_default=False)],
    threads: Annotated[
        int, typer.Option(help="Kernel threads of each worker; else unchanged.", metavar="T", show_default=False)
    ] = 0,
) -> None:
    """Change the number of workers of a run that is under way, up or down, and of their threads.

    Returns at once; workers join when they have loaded their data, and leave after a step.
    """
    from cordee.cluster.control import scale_run

    print_text(scale_run(run, workers, threads))


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
        Path,
        typer.Argument(metavar="RUN", help="The run's directory, or a ticket: its control.json.", show_default=False),
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

    control = read_control(run)  # what is wrong with it is reported before torch is imported
    reach(control, run)
    from cordee.tools.join import join_run

    join_run(run, control, data_root, print_text)
