"""Commands that teach: what there is to name in a job, what a key means, a first job to change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cordee.cli.output import print_json, print_text, wrapped


def complete_kinds(incomplete: str) -> list[str]:
    """Return the kinds of names that begin so, for the shell."""
    from cordee.tools.look_up import KINDS

    return [kind for kind in KINDS if kind.startswith(incomplete)]


def complete_keys(incomplete: str) -> list[str]:
    """Return the keys and sections of a job file that begin so, for the shell."""
    from cordee.tools.explain import all_keys

    names = [key.name for key in all_keys()]
    sections = [name.partition(".")[0] for name in names]
    return [name for name in dict.fromkeys([*sections, *names]) if name.startswith(incomplete)]


def complete_templates(incomplete: str) -> list[str]:
    """Return the templates whose name begins so, for the shell."""
    from cordee.tools.new import TEMPLATES

    return [name for name in TEMPLATES if name.startswith(incomplete)]


def list_names(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="models|data|strategies|engines",
            help="What to list.",
            show_default=False,
            autocompletion=complete_kinds,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
) -> None:
    """List the models, data sets, strategies or engines that a job can name."""
    from cordee.tools.look_up import look_up

    listed = look_up(kind)
    if as_json:
        print_json(listed)
        return
    widest = max(len(name) for name in listed)
    for name, text in listed.items():
        print_text(wrapped(f"{name:<{widest}}  ", text))


def explain(
    key: Annotated[
        str,
        typer.Argument(
            metavar="KEY",
            help="A key or a section: training.lr_scale, stop.",
            show_default=False,
            autocompletion=complete_keys,
        ),
    ],
) -> None:
    """Say what a key of the job file means, which values it takes, and its default.

    For example:

        cordee explain training.lr_scale

        cordee explain checkpoint
    """
    from cordee.tools.explain import explain_key

    for each in explain_key(key):
        default = f"; default: {each.default}" if each.default else ""
        owner = f"  (of the strategy {each.owner})" if each.owner else ""
        print_text(f"{each.name}{owner}")
        print_text(wrapped("    ", f"{each.values}{default}"))
        if each.meaning:
            print_text(wrapped("    ", each.meaning))


def new(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write; made if need be.")] = Path(),
    template: Annotated[
        str,
        typer.Option(
            "--template",
            "-t",
            help="What to begin with; `cordee new --list` shows all.",
            metavar="T",
            autocompletion=complete_templates,
        ),
    ] = "digits",
    list_all: Annotated[bool, typer.Option("--list", help="List the templates.")] = False,
) -> None:
    """Write a first job to change: a job file or a script that runs as it is.

    Files that exist are never overwritten.
    """
    from cordee.tools.new import TEMPLATES, write_template

    if list_all:
        widest = max(len(name) for name in TEMPLATES)
        print_text("\n".join(f"{name:<{widest}}  {each.summary}" for name, each in TEMPLATES.items()))
        return
    made = write_template(template, folder)
    print_text("\n".join([*(f"wrote {path}" for path in made.files), "next", f"  {made.command}"]))
