"""All commands, and how errors leave the program: one clear message, exit code 2 or 1, no traceback."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from cordee.core.env import wants_colour, wants_traceback
from cordee.core.errors import CordeeError
from cordee.version import __version__

Function = TypeVar("Function", bound=Callable[..., Any])

INTERRUPTED = 130  # what shells report for a program ended by Ctrl-C


class Commands(TyperGroup):
    """All commands. Ctrl-C is told here: typer would end the program without a word."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            _print_error("interrupted")
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError):  # nobody reads it any more
                    stream.flush()
            # All files and processes are closed by now. Taking torch down as well takes half a second, and on a
            # busy machine (load 7 on 2 cores) 2-4 s, in which it would look as if Ctrl-C had not been heard.
            os._exit(INTERRUPTED)


class Command(TyperCommand):
    """One command, whose usage line names its arguments as its help does, without typer's braces."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]


class BenchCommand(Command):
    """Lists the benchmarks below its options. They are looked up only then: they import rich."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        from cordee.bench import BENCHMARKS

        with formatter.section("Benchmarks"):
            formatter.write_dl(list(BENCHMARKS.items()))


class App(typer.Typer):
    def command(self, *args: Any, **options: Any) -> Callable[[Function], Function]:
        return super().command(*args, **{"cls": Command, **options})


app = App(
    name="cordee",
    cls=Commands,
    help="Train one PyTorch model with many workers: one job, every method.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def main() -> None:
    """Run the command line and exit."""
    try:
        app()
    except CordeeError as error:
        _print_error(str(error))
        if wants_traceback():
            raise
        sys.exit(error.exit_code)


def _print_error(message: str) -> None:
    style, plain = ("\033[1;31m", "\033[0m") if sys.stderr.isatty() and wants_colour() else ("", "")
    print(f"{style}cordee:{plain} {message}", file=sys.stderr)


def _print(text: str) -> None:
    """Print to stdout; that the reader has gone, as in `cordee runs | head`, is not an error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"cordee {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Train one PyTorch model with many workers: one job, every method."""


@app.command()
def train(
    job: Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job file.", show_default=False)],
    strategy: Annotated[str | None, typer.Option(help="Instead of the job's strategy.name.", metavar="S")] = None,
    workers: Annotated[int | None, typer.Option(help="Instead of the job's strategy.workers.", metavar="N")] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where the run is written; else a new folder in ./runs.", metavar="D")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --run-dir, or the newest.")] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Override one key, e.g. training.epochs=3.", metavar="K=V")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
) -> None:
    """Train a job: progress on screen, everything else in the run directory.

    Ctrl-C stops after the step and saves; a second one stops at once. Exit code: 0 when the run ended well,
    2 for a mistake in the job, 1 for a failure, 130 after Ctrl-C.

    For example:

        cordee train examples/digits.toml --set training.epochs=3

        cordee train job.toml --run-dir runs/a --resume
    """
    overrides = list(settings or [])
    overrides += [f"strategy.name={strategy}"] if strategy is not None else []
    overrides += [f"strategy.workers={workers}"] if workers is not None else []

    from cordee.core import Job

    Job.load(job, overrides)  # a mistake in it is told at once, before the two seconds that importing torch takes

    from cordee.launch import train as run_training

    run = run_training(job, overrides=overrides, run_dir=run_dir, resume=resume, quiet=quiet)
    if run.status == "interrupted":
        raise typer.Exit(INTERRUPTED)


@app.command()
def plan(
    job: Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job file.", show_default=False)],
    workers: Annotated[
        int | None,
        typer.Option(
            help="Look at up to so many; else the job's, this machine's cores, or the cluster's devices.",
            metavar="N",
            min=1,
        ),
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(help="A cluster file: machines that are not here.", metavar="FILE")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure anew what is in the cache.")] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Override one key, e.g. training.batch_size=256.", metavar="K=V")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Predict step time, memory and traffic of each strategy; say which to use, and why.

    Profiles the model on this machine for some seconds, and keeps the profile in the cache folder.

    For example:

        cordee plan examples/digits.toml --workers 4

        cordee plan job.toml --cluster cluster.toml --json
    """
    from cordee.core import Job

    Job.load(job, settings or [])  # a mistake in it is told at once, before the two seconds that importing torch takes
    if cluster is not None:
        from cordee.planner import load_cluster

        load_cluster(cluster)

    import msgspec
    from rich.console import Console

    from cordee.planner.rendering import render_plan
    from cordee.planning import plan as make_plan

    found = make_plan(job, overrides=settings or [], workers=workers, cluster=cluster, fresh=fresh)
    if as_json:
        _print(msgspec.json.format(msgspec.json.encode(found.to_dict())).decode())
        return
    console = Console(highlight=False)
    with console.capture() as table:
        console.print(render_plan(found))
    _print(table.get().rstrip("\n"))


@app.command()
def simulate(
    scenario: Annotated[
        str | None,
        typer.Argument(metavar="[SCENARIO]", help="A scenario file, or a published one's name.", show_default=False),
    ] = None,
    job: Annotated[
        Path | None, typer.Option(help="Take step and gradients from this job, profiled here.", metavar="JOB.toml")
    ] = None,
    cluster: Annotated[Path | None, typer.Option(help="With --job: take the links from here.", metavar="FILE")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Override one key, e.g. staleness=4.", metavar="K=V")
    ] = None,
    page: Annotated[Path | None, typer.Option("--html", help="Also draw it: a page with charts.", metavar="F")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Predict scaling, idling, staleness and losses on clusters that are not here.

    A scenario is a TOML file (docs/planner.md lists its keys), a job with a cluster file, or a published one:
    horovod-inception3, horovod-resnet101, horovod-vgg16, parameter-server.

    For example:

        cordee simulate horovod-vgg16 --set "workers=[1,64,1024]" --html vgg.html

        cordee simulate --job job.toml --cluster cluster.toml --set mtbf=30d
    """
    import msgspec
    from rich.console import Console

    from cordee.core.errors import JobError
    from cordee.planner.simulator import simulate as run_simulation
    from cordee.simulating import find_scenario, render_outcomes, scenario_of_job, write_page

    if (scenario is None) == (job is None):
        raise JobError("say what to simulate: a scenario, or --job JOB.toml, and not both")
    if cluster is not None and job is None:
        raise JobError("--cluster belongs to --job; a scenario has its own links")
    overrides = settings or []
    chosen = find_scenario(scenario, overrides) if scenario else scenario_of_job(job or "", cluster, overrides)
    outcomes = run_simulation(chosen)
    if page is not None:
        write_page(page, chosen, outcomes)
    if as_json:
        _print(msgspec.json.format(msgspec.json.encode({"scenario": chosen, "outcomes": outcomes})).decode())
        return
    console = Console(highlight=False)
    with console.capture() as table:
        console.print(render_outcomes(chosen, outcomes))
        if page is not None:
            console.print(f"page: {page}", soft_wrap=True)
    _print(table.get().rstrip("\n"))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
)
def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(metavar="SCRIPT [ARGS]", help="A Python script.", show_default=False)],
    workers: Annotated[int, typer.Option("-n", "--workers", help="How many workers, on this host.", metavar="N")] = 1,
) -> None:
    """Start your own training script on N workers.

    The script uses `with cordee.join() as team`, or torch.distributed itself; it runs under `python` and
    `torchrun` as well. What follows the script's name goes to the script.

    For example:

        cordee run -n 2 examples/own_loop.py --epochs 3
    """
    from cordee.script_run import run_script

    if not run_script(script, context.args, workers):
        raise typer.Exit(INTERRUPTED)


@app.command()
def server(
    listen: Annotated[
        str | None,
        typer.Option(
            help="Where to listen, e.g. tcp://10.0.0.1:7000; else at a free port, of this host alone unless joining.",
            metavar="ADDRESS",
        ),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(help="End when so many workers have come and left; 0: serve until Ctrl-C.", metavar="N", min=0),
    ] = 0,
    servers: Annotated[int, typer.Option(help="How many servers the store has, this one included.", min=1)] = 1,
    join: Annotated[
        str | None, typer.Option(help="Be one more server of the store at this address.", metavar="ADDRESS")
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(help="Where the key is left, or with --join found; else in the cache folder.", metavar="FILE"),
    ] = None,
    updaters: Annotated[
        list[str] | None,
        typer.Option(help="A module with update functions that workers may choose (repeat for several).", metavar="M"),
    ] = None,
    failure_timeout: Annotated[str, typer.Option(help="A worker silent for so long is lost.", metavar="T")] = "30s",
    require_all: Annotated[
        bool, typer.Option("--require-all", help="End with an error if not all have come within the failure timeout.")
    ] = False,
) -> None:
    """Serve arrays to `cordee.KVStore`: the parameter server on its own.

    Says where it listens, where its key is and how to start workers. The key is needed by all who take part.

    For example:

        cordee server --workers 2

        cordee worker --servers tcp://127.0.0.1:PORT script.py
    """
    from cordee.store.serving import serve

    serve(
        listen=listen,
        num_workers=workers,
        num_servers=servers,
        join=join,
        key_file=key_file,
        updaters=updaters or [],
        failure_timeout=failure_timeout,
        must_complete=require_all,
        say=_print,
    )


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
)
def worker(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(metavar="SCRIPT [ARGS]", help="A Python script.", show_default=False)],
    servers: Annotated[
        str | None,
        typer.Option(help="The address that `cordee server` printed; else $CORDEE_STORE.", metavar="ADDRESS"),
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option(help="A copy of the store's key; else in the cache folder.", metavar="FILE")
    ] = None,
) -> None:
    """Start a script as a worker of a store: `cordee.KVStore()` in it joins the store.

    What follows the script's name goes to the script.
    """
    from cordee.core.env import enter_store
    from cordee.core.errors import JobError

    if not script.is_file():
        raise JobError(f"no script {str(script)!r}")
    enter_store(servers, key_file)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, str(script), *context.args])


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)],
    output: Annotated[
        list[Path] | None,
        typer.Option(
            "--output", "-o", help="File to write: .safetensors, .pt or .onnx (repeat for several).", metavar="FILE"
        ),
    ] = None,
    step: Annotated[int | None, typer.Option(help="The checkpoint to take; else the newest whole one.")] = None,
) -> None:
    """Write the trained weights of a run for use elsewhere.

    Without --output: model.safetensors in the run directory. A .pt file is a state dict for
    `torch.load(..., weights_only=True)`; ONNX takes any batch size.
    """
    from cordee.exporting import export_run

    for path in export_run(run, output or [run / "model.safetensors"], step=step):
        print(path)


@app.command()
def runs(
    folder: Annotated[
        Path | None, typer.Argument(help="Where runs are; else $CORDEE_RUNS or ./runs.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list instead of a table.")] = False,
) -> None:
    """List runs with their state, newest first."""
    import msgspec
    from rich.console import Console

    from cordee.core.env import runs_folder
    from cordee.monitoring import list_runs, render_runs

    found = list_runs(folder or runs_folder())
    if as_json:
        _print(msgspec.json.format(msgspec.json.encode(found, enc_hook=str)).decode())
    elif not found:
        _print(f"no runs in {folder or runs_folder()}: start one with `cordee train JOB.toml`")
    else:
        console = Console(highlight=False)
        with console.capture() as table:
            console.print(render_runs(found))
        _print(table.get().rstrip("\n"))


@app.command()
def scale(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's directory.", show_default=False)],
    workers: Annotated[int, typer.Argument(metavar="N", help="How many workers it is to have.", show_default=False)],
) -> None:
    """Change the number of workers of a run that is under way, up or down.

    Returns at once; workers join when they have loaded their data, and leave after a step.
    """
    from cordee.cluster.control import scale_run

    _print(scale_run(run, workers))


@app.command()
def chaos(
    job: Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job file.", show_default=False)],
    faults: Annotated[str, typer.Option(help="Which of kill, freeze, slow, full-disk, leave.")] = "kill,freeze",
    every: Annotated[str, typer.Option(help="Time between two faults.")] = "5s",
    duration: Annotated[str, typer.Option("--for", help="How long to train, from the first step on.")] = "1m",
    seed: Annotated[int, typer.Option(help="Chooses faults and workers.")] = 0,
    run_dir: Annotated[Path | None, typer.Option(help="Where the run goes.", show_default=False)] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="As in cordee train.", show_default=False)
    ] = None,
) -> None:
    """Train a job while real faults hit its workers, then check the run by its events.

    Exit code 1 if the run fails, hangs, or is not sound.
    """
    from cordee.auditing import VERDICTS
    from cordee.chaos import plan_faults, train_command, unleash
    from cordee.core import Job
    from cordee.core.durations import parse_duration
    from cordee.core.env import runs_folder
    from cordee.doctor import can_train, render_findings
    from cordee.monitoring import new_run_path

    loaded = Job.load(job, overrides=overrides or [])
    for_s = parse_duration(duration, "--for")
    plan = plan_faults(faults.split(","), every_s=parse_duration(every, "--every"), for_s=for_s, seed=seed)
    folder = run_dir or new_run_path(runs_folder(), f"{loaded.name}-chaos")
    outcome = unleash(train_command(job, folder, overrides or []), folder, plan, for_s=for_s, say=_print)
    _print(render_findings(outcome.findings, as_json=False, verdicts=VERDICTS))
    _print(
        f"{len(outcome.faults)} faults in {outcome.seconds:.0f} s, {outcome.recoveries} recoveries, the slowest in "
        f"{outcome.slowest_recovery_s:.2f} s, {outcome.steps_redone} steps redone, "
        f"{outcome.samples_per_second:,.0f} samples/s; the run is {folder}"
    )
    if not can_train(outcome.findings):
        raise typer.Exit(1)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list instead of lines.")] = False,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run", metavar="RUN", help="Check this run's events instead of the machine.", show_default=False
        ),
    ] = None,
) -> None:
    """Check this machine: Python, torch, devices, cores, memory, disk, ports, data; say what to mend.

    With --run, check a run from its own events: every sample counted once per epoch, generations that do not
    overlap, steps that only grow, members that agree on the weights. Exit code 1 if something is wrong.
    """
    from cordee.doctor import can_train, examine, render_findings

    if run is not None:
        from cordee.auditing import VERDICTS, audit_run

        findings = audit_run(run)
        _print(render_findings(findings, as_json=as_json, verdicts=VERDICTS))
    else:
        findings = examine()
        _print(render_findings(findings, as_json=as_json))
    if not can_train(findings):
        raise typer.Exit(1)


@app.command(cls=BenchCommand)
def bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which one of those below.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also write the raw figures to this JSON file.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds; the medians are compared.", min=1)] = 7,
) -> None:
    """Measure Cordée: against its peers, interleaved in one run, or against the goals of the shipped jobs."""
    from cordee.bench import run_benchmark

    run_benchmark(name, rounds=rounds, output=output)
