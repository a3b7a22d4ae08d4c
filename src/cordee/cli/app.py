"""All commands, and how errors leave the program: one clear message, exit code 2 or 1, no traceback."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from cordee.cli import checks, federation, look_up, planning, run_commands, scripts, training, tuning
from cordee.cli.output import end_interrupted, print_error
from cordee.core.env import wants_traceback
from cordee.core.errors import CordeeError, JobError
from cordee.version import __version__

# How `cordee --help` groups the commands.
SECTIONS = {
    "Train": ("train", "resume", "plan", "compare", "tune", "simulate", "run", "new"),
    "Runs": ("runs", "show", "watch", "dashboard", "logs", "timeline", "stop", "scale", "join", "export"),
    "Look up and check": ("list", "explain", "profile", "doctor", "chaos", "bench"),
    "Other hosts and servers": ("agent", "federation", "server", "worker"),
}


# Options of `cordee train` alone, which people try elsewhere too.
_KEYS = {"--workers": "strategy.workers", "--strategy": "strategy.name", "--engine": "cluster.engine"}
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # click's, whether typer has its own copy of click or not


@contextlib.contextmanager
def _in_one_form() -> Iterator[None]:
    """Inside, what is wrong with the command line becomes an error like all others."""
    try:
        yield
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        context: Any = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "cordee"
        said = str(error.format_message()).rstrip(".")  # type: ignore[attr-defined]
        key = _KEYS.get(getattr(error, "option_name", ""))
        if key is not None and context is not None and any("--set" in each.opts for each in context.command.params):
            raise JobError(f"{said}: write --set {key}=…") from None
        raise JobError(f"{said}{'' if said.endswith('?') else ':'} `{path} --help` says more") from None


class Commands(TyperGroup):
    """All commands. Ctrl-C and wrong options are reported here: typer has no message, or one of another form."""

    def make_context(self, *arguments: Any, **more: Any) -> Any:
        with _in_one_form():
            return super().make_context(*arguments, **more)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for section, names in SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(limit=200)) for name in names])

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            with _in_one_form():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            end_interrupted()


class Command(TyperCommand):
    """One command, whose usage line names its arguments as its help does, without typer's braces."""

    def get_short_help_str(self, limit: int = 45) -> str:
        return (self.help or "").split("\n\n")[0].replace("\n", " ")  # wrapped by the list, not cut

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options without the names of their Python types."""
        for kind in ("argument", "option"):
            found = [each.get_help_record(ctx) for each in self.get_params(ctx) if each.param_type_name == kind]
            records = [(_PYTHON_TYPE.sub(_in_plain_words, record[0]), record[1]) for record in found if record]
            if records:
                with formatter.section(f"{kind.capitalize()}s"):
                    formatter.write_dl(records)


_PYTHON_TYPE = re.compile(r"^(?P<name>.*) <(?P<type>[a-z]+)[^<>]*>$")


def _in_plain_words(found: re.Match[str]) -> str:
    if not found["name"].startswith("-"):
        return found["name"]  # an argument, which has a name in capitals
    return f"{found['name']} {_VALUES.get(found['type'], found['type'].upper())}"


_VALUES = {"int": "N", "str": "TEXT", "list": "TEXT"}


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
