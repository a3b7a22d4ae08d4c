"""What the keys of a job file mean: read from the structs that hold them, where each field has its comment."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args, get_origin

import msgspec

from cordee.core.errors import JobError, nearest
from cordee.core.job import SECTIONS, Job
from cordee.core.settings import Data, Strategy
from cordee.strategies.table import STRATEGIES

# Sections that name a part of the user's choice: their other keys are arguments of that part.
_NAMED = {
    "model": "the model: a built-in name (`cordee list models`), or 'module:callable'",
    "data": "the data set: a built-in name (`cordee list data`), or 'module:callable'",
    "loss": "the loss: a name of torch.nn.functional, or 'module:callable'",
    "optimizer": "the optimizer: any name of torch.optim, or 'module:callable'",
    "schedule": "how the learning rate changes from step to step: a built-in name, or 'module:callable'",
}
# Sections whose keys are names of the user's choice.
_LISTED = {
    "metrics": "what is measured on the test set: accuracy, f1, mae, … (docs/reference/job-file.md), torchmetrics.… or "
    "'module:callable', or a table with use, arguments and better = 'higher' or 'lower'",
    "callbacks": "an object that is called while the run trains: 'module:callable', or a table with use and arguments",
}
_TOP = {
    "name": "names the run directory; else the name of the job file",
    "seed": "from which all random numbers of a run follow",
}
_PLAIN = {
    "int": "whole number",
    "float": "number",
    "str": "text",
    "bool": "true or false",
    "None": "not set",
    "Any": "text",  # or, from Python, a live object
}


class Key(NamedTuple):
    """A key of the job file."""

    name: str
    values: str  # which it takes
    default: str
    meaning: str
    owner: str = ""  # the strategy whose key it is


def explain_key(name: str) -> list[Key]:
    """Return what is known of a key, or of all keys of a section. Raises JobError for a name that is none.

    A key of [strategy] may belong to several strategies, and mean something else to each.
    """
    keys = list(all_keys())
    found = [key for key in keys if key.name == name] or [key for key in keys if key.name.startswith(f"{name}.")]
    if not found:
        found = [key for key in keys if key.name.rpartition(".")[2] == name]
    if not found:
        names = [key.name for key in keys]
        close = nearest(name, names) or nearest(name, [each.rpartition(".")[2] for each in names])
        sections = sorted({each.partition(".")[0] for each in names if "." in each})
        raise JobError(f"there is no key {name!r}{close} (sections: {', '.join(sections)})")
    return found


def all_keys() -> Iterator[Key]:
    """Yield every key that Cordée itself reads, section by section."""
    for name, kind, default, meaning in field_docs(Job):
        if "." not in name and name in (*_TOP, "python_path"):
            yield Key(name, kind, default, _TOP.get(name, meaning))
    for section, meaning in _NAMED.items():
        yield Key(f"{section}.use", "text", "required" if section in ("model", "data") else "", meaning)
        if section == "data":
            yield from _section("data", Data, leaving_out=("use", "args"))
    for section, meaning in _LISTED.items():
        yield Key(f"{section}.NAME", "text or table", "", meaning)
    yield from _section("strategy", Strategy, leaving_out=("settings",))
    for strategy, entry in STRATEGIES.items():
        for key in _section("strategy", entry.settings):
            yield key._replace(owner=strategy)
    for section, struct in SECTIONS.items():
        yield from _section(section, struct)


def _section(section: str, struct: type[Any], leaving_out: tuple[str, ...] = ()) -> Iterator[Key]:
    for name, kind, default, meaning in field_docs(struct):
        if name not in leaving_out:
            yield Key(f"{section}.{name}", kind, default, meaning)


class FieldDoc(NamedTuple):
    """A field of a struct as its source shows it."""

    name: str
    values: str
    default: str
    meaning: str


def field_docs(struct: type[Any]) -> list[FieldDoc]:
    """Return the fields of a struct, its own and those it inherits, with the comments behind or above them."""
    found: dict[str, FieldDoc] = {}
    for kind in reversed(struct.__mro__):
        if issubclass(kind, msgspec.Struct) and kind is not msgspec.Struct:
            found.update({each.name: each for each in _own_fields(kind)})
    return list(found.values())


def _own_fields(struct: type[Any]) -> Iterator[FieldDoc]:
    source = textwrap.dedent(inspect.getsource(struct))
    lines = source.splitlines()
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    names = vars(sys.modules[struct.__module__])
    defaults = {field.name: field.default for field in msgspec.structs.fields(struct)}
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            assert node.end_lineno is not None
            yield FieldDoc(
                node.target.id,
                describe_type(node.annotation, names),
                _default(node.value, defaults[node.target.id]),
                _comment(lines, node.lineno - 1, node.end_lineno),
            )


def _comment(lines: list[str], first: int, end: int) -> str:
    """Return the comment in the lines of a field, or else those right above it."""
    for line in lines[first:end]:
        _, mark, text = line.partition("  # ")
        if mark:
            return text.strip()
    above: list[str] = []
    while first > 0 and lines[first - 1].strip().startswith("#"):
        first -= 1
        above.insert(0, lines[first].strip().lstrip("# "))
    return " ".join(above)


def _default(value: ast.expr | None, plain: Any) -> str:
    if value is None:
        return "required"
    if (factory := _factory(value)) in ("dict", "list"):
        return "empty"
    if factory:
        return ast.unparse(value)
    # A default may be a constant of the module, or be computed: its value is what counts.
    if plain is None:
        return "not set"
    if isinstance(plain, bool):
        return str(plain).lower()
    return repr(plain) if isinstance(plain, str) else str(plain) if plain != () else "empty"


def _factory(value: ast.expr) -> str:
    keywords = value.keywords if isinstance(value, ast.Call) else []
    return next((ast.unparse(each.value) for each in keywords if each.arg == "default_factory"), "")


def describe_type(annotation: ast.expr, names: dict[str, Any]) -> str:
    """Return an annotation in words: "fp32 or bf16", "whole number, or not set". `names` has what it refers to."""
    if isinstance(annotation, ast.BinOp):
        return f"{describe_type(annotation.left, names)}, or {describe_type(annotation.right, names)}"
    if isinstance(annotation, ast.Subscript):
        outer = ast.unparse(annotation.value)
        if outer == "Literal":
            inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
            return _choice([ast.unparse(each) for each in inner])
        if outer in ("tuple", "list", "Sequence"):
            of = annotation.slice.elts[0] if isinstance(annotation.slice, ast.Tuple) else annotation.slice
            return f"list of: {describe_type(of, names)}"
        if outer in ("dict", "Mapping"):
            return "table"
    text = ast.unparse(annotation)
    if get_origin(names.get(text)) is Literal:
        return _choice([repr(each) for each in get_args(names[text])])
    return _PLAIN.get(text, text)


def _choice(values: list[str]) -> str:
    *before, last = values
    return f"{', '.join(before)} or {last}" if before else last
