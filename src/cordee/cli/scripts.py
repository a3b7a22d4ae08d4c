"""Commands that start the user's own scripts, and the servers they talk to."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from cordee.cli.output import print_text
from cordee.core.interrupts import INTERRUPTED


def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(metavar="SCRIPT [ARGS]", help="A Python script.", show_default=False)],
    workers: Annotated[int, typer.Option("-n", "--workers", help="How many workers, on this host.", metavar="N")] = 1,
    elastic: Annotated[
        bool, typer.Option("--elastic", help="Continue the script's loop when workers die or join: see above.")
    ] = False,
    run_dir: Annotated[
        Path | None, typer.Option(help="With --elastic: the run directory; else a new one in runs/.", metavar="D")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="With --elastic: continue the run in --run-dir from its last checkpoint.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="With --elastic: a setting of the section cluster, e.g. failure_timeout=2s (repeat for several).",
            metavar="K=V",
        ),
    ] = None,
    replace_gloo: Annotated[
        bool,
        typer.Option(
            "--replace-gloo", help="Give a script that asks torch.distributed for gloo the backend `cordee` instead."
        ),
    ] = False,
    as_horovod: Annotated[
        bool, typer.Option("--as-horovod", help="Let `import horovod.torch` in the script import cordee.horovod.torch.")
    ] = False,
) -> None:
    """Start your own training script on N workers.

    The script uses `with cordee.join() as team`, or torch.distributed itself; it runs under `python` and
    `torchrun` as well. What follows the script's name goes to the script.

    With --elastic the loop is a function with the decorator @team.elastic that calls team.commit() after each step. A
    worker that is killed or frozen is replaced, and the others continue from the last commit. `cordee scale RUN N`,
    `cordee join RUN` and Ctrl-C work as for a job. Events, logs, checkpoints and summary are in the run directory.

    A program that asks for gloo by name (Accelerate, Lightning, the Hugging Face Trainer) needs no edit with
    --replace-gloo; under torchrun set CORDEE_REPLACE_GLOO=1.

    For example:

        cordee run -n 2 examples/own_loop.py --epochs 3

        cordee run --elastic -n 2 examples/elastic_loop.py

        cordee run --replace-gloo -n 2 train.py

        cordee run --as-horovod -n 2 horovod_script.py

        cordee run --elastic --as-horovod -n 2 elastic_horovod_script.py
    """
    from cordee.core.env import gloo_replacement_environment, horovod_alias_environment
    from cordee.core.errors import JobError
    from cordee.core.job import apply_override

    if not elastic:
        given = {"--run-dir": run_dir is not None, "--resume": resume, "--set": bool(settings)}
        if named := [option for option, is_given in given.items() if is_given]:
            raise JobError(f"{', '.join(named)}: only a run with --elastic has that")
        from cordee.tools.script_launcher import run_script

        extra = gloo_replacement_environment() if replace_gloo else {}
        if as_horovod:
            extra |= horovod_alias_environment()
        if not run_script(script, context.args, workers, extra):
            raise typer.Exit(INTERRUPTED)
        return
    if replace_gloo:
        raise JobError("--elastic is for loops of cordee.join and of hvd.elastic: leave out --replace-gloo")
    from cordee.tools.script_run import run_elastic

    table: dict[str, Any] = {}
    for setting in settings or []:
        apply_override(table, setting if setting.startswith("cluster.") else f"cluster.{setting}")
    summary = run_elastic(
        script,
        context.args,
        workers,
        run_dir=run_dir,
        resume=resume,
        cluster=table.get("cluster", {}),
        as_horovod=as_horovod,
    )
    if summary.status == "interrupted":
        raise typer.Exit(INTERRUPTED)


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
        typer.Option(help="End when N workers have joined and left; 0: serve until Ctrl-C.", metavar="N", min=0),
    ] = 0,
    servers: Annotated[int, typer.Option(help="How many servers the store has, this one included.", min=1)] = 1,
    replicas: Annotated[
        int,
        typer.Option(
            help="Processes of each server; 2: one may be killed and nothing is lost. This one has the directory then.",
            min=1,
            max=2,
        ),
    ] = 1,
    join: Annotated[
        str | None, typer.Option(help="Be one more server of the store at this address.", metavar="ADDRESS")
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(help="Where the key is written, or with --join read; else in the cache folder.", metavar="FILE"),
    ] = None,
    updaters: Annotated[
        list[str] | None,
        typer.Option(help="A module with update functions that workers may choose (repeat for several).", metavar="M"),
    ] = None,
    failure_timeout: Annotated[
        str, typer.Option(help="A worker without a heartbeat for so long is lost.", metavar="T")
    ] = "30s",
    require_all: Annotated[
        bool, typer.Option("--require-all", help="End with an error if not all have joined within the failure timeout.")
    ] = False,
) -> None:
    """Serve arrays to `cordee.KVStore`: the parameter server on its own.

    Says where it listens, where its key is and how to start workers. The key is needed by all who take part.

    For example:

        cordee server --workers 2

        cordee worker --servers tcp://127.0.0.1:PORT script.py
    """
    from cordee.parameters.serving import serve

    _check_address("--listen", listen)
    serve(
        listen=listen,
        num_workers=workers,
        num_servers=servers,
        replicas=replicas,
        join=join,
        key_file=key_file,
        updaters=updaters or [],
        failure_timeout=failure_timeout,
        must_complete=require_all,
        say=print_text,
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
    _check_address("--servers", servers)
    enter_store(servers, key_file)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, str(script), *context.args])


def _check_address(option: str, address: str | None) -> None:
    """Raise JobError if an option is given and is no address of a store."""
    from cordee.communication.sockets import check_address
    from cordee.core.errors import CommunicationError, JobError

    if address is None:
        return
    try:
        check_address(address, is_encrypted=True)
    except CommunicationError as error:
        raise JobError(f"{option}: {error}") from error
