"""The page docs/reference/python.md, made of signatures and docstrings. Run as a script, it writes the page."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cordee
from cordee.loop import LoopTeam

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "python.md"
BEGIN, END = "<!-- made by tests/unit/python_page.py -->\n", "<!-- end of what is made -->\n"
FUNCTIONS = ("train", "plan", "join")
CLASSES = {
    "Run": cordee.Run, "Plan": cordee.Plan, "Job": cordee.Job, "Use": cordee.Use, "Splits": cordee.Splits,
    "Callback": cordee.Callback, "LoopTeam": LoopTeam, "KVStore": cordee.KVStore,
}  # fmt: skip
# The others are for the loop's own machinery.
OF_A_LOOP = ("backward", "commit", "elastic", "gather", "is_first", "prepare", "print", "state", "sum")
SECTIONS = ("Data", "Training", "Strategy", "Evaluation", "Stop", "Checkpoint", "Monitoring", "Cluster")


def render() -> str:
    """Return what is made of the code."""
    parts = ["## Functions\n"]
    for name in FUNCTIONS:
        function = getattr(cordee, name)
        parts.append(f"### cordee.{name}\n\n{_signature(f'cordee.{name}', function)}\n{_doc(function)}\n")
    parts.append("## Classes\n")
    for name, kind in CLASSES.items():
        parts.append(f"### {'' if kind is LoopTeam else 'cordee.'}{name}\n\n{_doc(kind)}\n")
        rows = [f"| `{call}` | {doc} |" for call, doc in _members(kind)]
        if rows:
            parts.append("\n".join(["| | |", "|---|---|", *rows]) + "\n")
    parts.append("## Sections of a job\n\nThe keys are those of [the job file](job-file.md).\n")
    sections = [f"| `cordee.{name}` | {_first(getattr(cordee, name))} |" for name in SECTIONS]
    parts.append("\n".join(["| | |", "|---|---|", *sections]) + "\n")
    return "\n".join(parts)


def with_made(page: str) -> str:
    """Return the page with what is made as it has to be."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + render() + END + after


def _signature(name: str, function: Callable[..., Any]) -> str:
    return f"```text\n{name}{_arguments(function)}\n```\n"


def _arguments(function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    kept = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
        if parameter.name not in ("self", "cls")
    ]
    defaults = [
        parameter.replace(default=Ellipsis) if " at 0x" in repr(parameter.default) else parameter for parameter in kept
    ]
    return str(inspect.Signature(defaults)).replace("Ellipsis", "…")


def _members(kind: type) -> Iterator[tuple[str, str]]:
    for name, member in inspect.getmembers_static(kind):
        if name.startswith("_") or (kind is LoopTeam and name not in OF_A_LOOP):
            continue
        function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        if isinstance(member, property) and inspect.getdoc(member):
            yield name, _first(member)
        elif inspect.isfunction(function) and inspect.getdoc(function):
            yield f"{name}{_arguments(function)}".replace("|", "\\|"), _first(function)


def _doc(thing: object) -> str:
    return (inspect.getdoc(thing) or "").replace("<", "&lt;") + "\n"


def _first(thing: object) -> str:
    """Return the first paragraph of a docstring in one line."""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(with_made(PAGE.read_text()))
