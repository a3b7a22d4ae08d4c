"""Commands that start the user's own scripts, and the servers they talk to."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from cordee.cli.output import print_text
from cordee.core.interrupts import INTERRUPTED


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
    from cordee.tools.script_launcher import run_script

    if not run_script(script, context.args, workers):
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
