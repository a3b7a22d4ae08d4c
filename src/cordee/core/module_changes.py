"""What this program has changed of modules that workers import themselves: they would compute with what the files say.

A module that is imported here may have been given other values since (`helper.SCALE = 2`), and workers import the file
again. Looked for are constants: names of a module or class that its file sets once, to a literal, and that what a job
uses reads. Names that the module's own code changes (counters, caches) count only where the program calls that code.
"""

from __future__ import annotations

import ast
import contextlib
import sys
import sysconfig
import types
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from cordee.core.errors import JobError
from cordee.core.importing import ADVICE, globals_read

_NOTHING = object()
_INSTALLED = {"site-packages", "dist-packages"}
# What a file may write; not the numbers of an enumeration, which are of its own type.
_WRITTEN = (int, float, complex, bool, str, bytes, tuple, list, dict, set, types.NoneType)


def refuse_changed_modules(parts: Collection[str]) -> None:
    """Raise JobError if workers would find other values in the modules that `parts` ("module:name") are made of."""
    called = _called_by_program()
    for source, names in _reach(parts):
        if source.module.__name__ == "__main__":
            continue  # `refuse_what_workers_miss` looks at it
        for name, now, written in source.changes(names, called):
            if not _is_changed_by_others(name.rpartition(".")[2], source.module):
                raise JobError(
                    f"{source.file}: {name!r} is {now!r} in this program and {written!r} in the file, which workers "
                    f"import, and what the job uses reads it: {ADVICE}"
                )


@dataclass
class _Source:
    """A module of the user's, and what its file says."""

    module: types.ModuleType
    file: Path
    text: str
    read: set[str] = field(default_factory=set)  # names of it that what a job uses reads

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    def changes(self, names: Collection[str], called: Collection[str]) -> Iterator[tuple[str, Any, Any]]:
        """Yield (name, value now, value in the file) of constants among `names`, and of classes among them."""
        own = self._changed_by_itself(called)
        for name, written in _literals(self.tree.body):
            now = vars(self.module).get(name, _NOTHING)
            if name in names and name not in own and _differ(now, written):
                yield name, now, written
        for node in self.tree.body:
            made = vars(self.module).get(node.name) if isinstance(node, ast.ClassDef) else None
            if isinstance(node, ast.ClassDef) and isinstance(made, type) and node.name in names:
                for name, written in _literals(node.body):
                    now = vars(made).get(name, _NOTHING)
                    if name not in own and not name.startswith("__") and _differ(now, written):
                        yield f"{node.name}.{name}", now, written

    def _changed_by_itself(self, called: Collection[str]) -> set[str]:
        """Return names that code of the module changes, but for code that the program calls to change them."""
        found: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
                found |= {node.attr} if isinstance(node, ast.Attribute) else set()
                found |= _root(node)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                found |= _root(node.func)  # a method may change what it is called on
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name not in called:
                found |= {name for inner in ast.walk(node) if isinstance(inner, ast.Global) for name in inner.names}
        return found


def _literals(body: list[ast.stmt]) -> Iterator[tuple[str, Any]]:
    """Yield the names that statements set once, to a literal, and that literal; no empty list or dict to be filled."""
    stored = [
        node.id
        for statement in body
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del)
    ]
    for node in body:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if value is None or len(targets) != 1 or not isinstance(targets[0], ast.Name):
            continue
        if stored.count(targets[0].id) == 1:
            with contextlib.suppress(ValueError, TypeError):
                literal = ast.literal_eval(value)
                if literal or not isinstance(literal, list | dict | set):
                    yield targets[0].id, literal


def _differ(now: Any, written: Any) -> bool:
    """Whether a value is of a kind that a file may write, and not the one that it writes."""
    if type(now) not in _WRITTEN:
        return False
    try:
        return type(now) is not type(written) or bool(now != written)
    except Exception:  # noqa: BLE001 - of things in a list that do not compare
        return False


def _reach(parts: Collection[str]) -> list[tuple[_Source, set[str]]]:
    """Return the user's modules that parts of a job are made of, each with the names of it that they read."""
    sources: dict[str, _Source] = {}
    pending = [(module, name) for part in parts for module, name in [_find(part)] if module is not None]
    while pending:
        module, name = pending.pop()
        source = sources.get(module.__name__) or _open(module)
        if source is None:
            continue
        sources[module.__name__] = source
        new = globals_read(source.text, [name]) - source.read
        source.read |= new
        for one in new:
            value = vars(module).get(one)
            if isinstance(value, types.ModuleType):
                # Which of its names are read, by whom, would take more to find out: those that are anywhere.
                attributes = {n.attr for n in ast.walk(source.tree) if isinstance(n, ast.Attribute) and one in _root(n)}
                pending += [(value, attribute) for attribute in attributes]
            elif isinstance(value, type | types.FunctionType) and value.__module__ != module.__name__:
                origin = sys.modules.get(value.__module__)
                pending += [(origin, value.__qualname__)] if origin is not None else []
    return [(source, source.read) for source in sources.values()]


def _find(part: str) -> tuple[types.ModuleType | None, str]:
    """Return the module that "module:name" or "file.py:name" names, if it is imported here."""
    where, _, name = part.rpartition(":")
    if not where.endswith(".py"):
        return sys.modules.get(where), name
    with contextlib.suppress(OSError):
        path = Path(where).resolve()
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None)
            if file and Path(file).name == path.name and Path(file).resolve() == path:
                return module, name
    return None, name


def _open(module: types.ModuleType) -> _Source | None:
    """Return a module with the text of its file; None if it is not the user's."""
    file = getattr(module, "__file__", None)
    if not file or not file.endswith(".py") or module.__name__.partition(".")[0] == "cordee":
        return None
    installed = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    path = Path(file).resolve()
    is_installed = any(path.is_relative_to(Path(folder).resolve()) for folder in installed)
    if is_installed or not _INSTALLED.isdisjoint(path.parts):  # of this environment, or of another on the path
        return None
    try:
        source = _Source(module, path, path.read_text(encoding="utf-8"))
        return source if source.tree else None
    except (OSError, SyntaxError, ValueError):
        return None


def _is_changed_by_others(attribute: str, changed: types.ModuleType) -> bool:
    """Whether another module of the user's sets an attribute of this name: workers import that one, too."""
    for module in list(sys.modules.values()):
        if module is not changed and getattr(module, "__name__", "__main__") != "__main__":
            source = _open(module)
            if source is not None and any(
                isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == attribute
                for node in ast.walk(source.tree)
            ):
                return True
    return False


def _called_by_program() -> set[str]:
    """Return the names of functions and methods that the program's own file calls."""
    program = sys.modules.get("__main__")
    source = _open(program) if program is not None else None
    if source is None:
        return set()
    called = [node.func for node in ast.walk(source.tree) if isinstance(node, ast.Call)]
    return {f.attr if isinstance(f, ast.Attribute) else f.id for f in called if isinstance(f, ast.Attribute | ast.Name)}


def _root(node: ast.expr) -> set[str]:
    """Return the name that attributes and items are taken of: `helper` of `helper.K[0]`."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return {node.id} if isinstance(node, ast.Name) else set()
