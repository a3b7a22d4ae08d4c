"""Commands of federated learning between real sites."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from cordee.cli.output import print_text
from cordee.core.interrupts import INTERRUPTED

RunDir = Annotated[Path, typer.Option("--run-dir", help="The run directory of the federation.", metavar="D")]


def serve(
    job: Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job file.", show_default=False)],
    listen: Annotated[
        str, typer.Option(help="Where clients reach this server.", metavar="HOST:PORT", show_default=False)
    ],
    clients: Annotated[
        int, typer.Option(help="Clients that must be there before the first round.", metavar="N", min=1)
    ] = 2,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where the run is written; else a new folder in ./runs.", metavar="D")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the federation in --run-dir.")] = False,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Override one key.", metavar="K=V")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
) -> None:
    """Lead a federation: keep the parameters, ask clients, sum their updates.

    The run directory is an ordinary one: `cordee show`, `logs` and `dashboard` work. A server that was killed continues
    with the very round: `--resume --run-dir D`.
    """
    from cordee.tools.federation import serve as lead

    summary = lead(
        job,
        listen,
        num_clients=clients,
        run_dir=run_dir,
        resume=resume,
        overrides=list(settings or []),
        quiet=quiet,
        say=(lambda text: None) if quiet else print_text,
    )
    if not quiet:
        accuracy = "" if summary.test_accuracy is None else f", test accuracy {summary.test_accuracy:.2%}"
        print_text(f"{summary.status}: {summary.steps} rounds{accuracy}, weights {(summary.weights_sha256 or '')[:12]}")
    if summary.status == "interrupted":
        raise typer.Exit(INTERRUPTED)


def invite(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the client is called.", show_default=False)],
    run_dir: RunDir,
    address: Annotated[
        str, typer.Option(help="Where the client reaches the server, if not where it listens.", metavar="HOST:PORT")
    ] = "",
) -> None:
    """Print a token for one client. The first client that uses it pins its key: nobody else can use it again."""
    from cordee.runs.federation.invitations import invite as make

    invitation = make(run_dir, name, address)
    print_text(f"cordee federation join {invitation.address} --token {invitation.to_text()}")


def join(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the server is.", show_default=False)],
    token: Annotated[
        str | None, typer.Option(help="What `invite` printed; - reads it. Not needed again later.", metavar="T")
    ] = None,
    data: Annotated[
        str, typer.Option(help="This client's data, instead of the job's data.use.", metavar="USE", show_default=False)
    ] = "",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Set one key of [data], e.g. data.path=mine.csv.", metavar="K=V")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Where the client keeps its keys and state.", metavar="D", show_default=False)
    ] = None,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Run code that the server's job names (module:callable).")
    ] = False,
    patience: Annotated[
        str, typer.Option(help="How long to look for a server that is gone, e.g. 10m.", metavar="TIME")
    ] = "1h",
    workers: Annotated[
        int, typer.Option(help="Workers of this host that train together as this client.", metavar="N", min=1)
    ] = 1,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Train once, say what would be sent, send nothing.")
    ] = False,
) -> None:
    """Take part in a federation with data that stays here. Only updates of the model are sent.

    Ctrl-C leaves after the task; joining again with the same folder continues.
    """
    import msgspec

    from cordee.core.durations import parse_duration
    from cordee.core.errors import JobError
    from cordee.runs.federation.messages import Invitation
    from cordee.tools.federation import JoinOptions
    from cordee.tools.federation import join as take_part

    invitation = None
    if token is not None:
        invitation = Invitation.from_text(sys.stdin.readline() if token == "-" else token)
        invitation = msgspec.structs.replace(invitation, address=address)
    place = folder or Path("federation") / (invitation.name if invitation is not None else address.replace(":", "-"))
    options = JoinOptions(place, data, tuple(settings or ()), allow_code, parse_duration(patience, "--patience"))
    if workers == 1:
        print_text(f"ended: {take_part(invitation, options, dry_run=dry_run, say=print_text)}")
        return
    if dry_run:
        raise JobError("--dry-run trains with one worker, and sends nothing: leave --workers out")
    from cordee.tools.federation_team import join_as_team

    if join_as_team(invitation, options, workers, say=print_text).status == "interrupted":
        raise typer.Exit(INTERRUPTED)


def status(run_dir: RunDir) -> None:
    """Say where a federation is, and who its clients are."""
    from cordee.runs.federation.invitations import describe_federation

    print_text(describe_federation(run_dir))


def revoke(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A client that was invited.", show_default=False)],
    run_dir: RunDir,
) -> None:
    """Refuse whatever a client says from now on. What was counted before stays counted."""
    from cordee.runs.federation.invitations import revoke as refuse

    refuse(run_dir, name)
    print_text(f"{name} is revoked")
