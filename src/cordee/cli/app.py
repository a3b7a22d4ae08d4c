"""All commands, and how errors leave the program: one clear message, exit code 2 or 1, no traceback."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from cordee.cli import checks, federation, look_up, planning, run_commands, scripts, training, tuning
from cordee.cli.output import end_interrupted, print_error
from cordee.core.env import wants_traceback
from cordee.core.errors import CordeeError
from cordee.version import __version__

# How `cordee --help` groups the commands.
SECTIONS = {
    "Train": ("train", "resume", "plan", "compare", "tune", "simulate", "run", "new"),
    "Runs": ("runs", "show", "watch", "dashboard", "logs", "timeline", "stop", "scale", "join", "export"),
    "Look up and check": ("list", "explain", "profile", "doctor", "chaos", "bench"),
    "Other hosts and servers": ("agent", "federation", "server", "worker"),
}


class Commands(TyperGroup):
    """All commands. Ctrl-C is reported here: typer would end the program without a message."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for section, names in SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl([(name, self.commands[name].get_short_help_str()) for name in names])

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            end_interrupted()


class Command(TyperCommand):
    """One command, whose usage line names its arguments as its help does, without typer's braces."""

    def get_short_help_str(self, limit: int = 45) -> str:
        return (self.help or "").split("\n\n")[0].replace("\n", " ")  # wrapped by the list, not cut

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]


class BenchCommand(Command):
    """Lists the benchmarks below its options. They are looked up only then: they import rich."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        from cordee.bench import BENCHMARKS

        with formatter.section("Benchmarks"):
            formatter.write_dl(list(BENCHMARKS.items()))


app = typer.Typer(
    name="cordee",
    cls=Commands,
    help="Train one PyTorch model with many workers: one job, every method.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def run_command() -> None:
    """Run what the command line says; exit with 2 or 1 if it cannot be done."""
    try:
        app()
    except CordeeError as error:
        print_error(str(error))
        if wants_traceback():
            raise
        sys.exit(error.exit_code)


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


# What follows a script's name belongs to the script.
_WITH_A_SCRIPT = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}

app.command(cls=Command)(training.train)
app.command(cls=Command)(run_commands.resume)
app.command(cls=Command)(planning.plan)
app.command(cls=Command)(planning.compare)
app.command(cls=Command)(tuning.tune)
app.command(cls=Command)(planning.simulate)
app.command(cls=Command, context_settings=_WITH_A_SCRIPT)(scripts.run)
app.command(cls=Command)(look_up.new)
app.command(cls=Command)(run_commands.runs)
app.command(cls=Command)(run_commands.show)
app.command(cls=Command)(run_commands.watch)
app.command(cls=Command)(run_commands.dashboard)
app.command(cls=Command)(run_commands.logs)
app.command(cls=Command)(run_commands.timeline)
app.command(cls=Command)(run_commands.stop)
app.command(cls=Command)(run_commands.scale)
app.command(cls=Command)(training.join)
app.command(cls=Command)(run_commands.export)
app.command("list", cls=Command)(look_up.list_names)
app.command(cls=Command)(look_up.explain)
app.command(cls=Command)(checks.profile)
app.command(cls=Command)(checks.doctor)
app.command(cls=Command)(checks.chaos)
app.command(cls=BenchCommand)(checks.bench)
app.command(cls=Command)(training.agent)
sites = typer.Typer(
    name="federation",
    help="Federated learning between real sites: serve, invite, join, status, revoke.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for site_command in (federation.serve, federation.invite, federation.join, federation.status, federation.revoke):
    sites.command(cls=Command)(site_command)
app.add_typer(sites)
app.command(cls=Command)(scripts.server)
app.command(cls=Command, context_settings=_WITH_A_SCRIPT)(scripts.worker)
