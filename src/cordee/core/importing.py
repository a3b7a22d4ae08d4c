"""Modules of the user's, imported as far as they go without training.

A worker imports the user's script to get at its classes. A script that trains without asking
`if __name__ == "__main__"` would train again in every worker, whose workers would do so as well. So the import
ends at the script's first call of Cordée that starts something, with all that was defined before.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.machinery
import importlib.util
import symtable
import sys
import threading
import types
from collections.abc import Collection, Iterator
from pathlib import Path

from cordee.core.errors import JobError

_importing = threading.local()
_stopped: dict[str, str] = {}  # names of modules whose import was stopped, and where
_calls: list[int] = []  # lines of the program's own file at which it has called Cordée, in their order
_first_values: dict[str, str] = {}  # of the user's modules and classes, at the first of these calls


class ImportStopped(BaseException):
    """The import of a script ends here. Not an Exception: a script that reports its errors must not report this."""

    def __init__(self, call: str) -> None:
        super().__init__(f"{call}() while a job's parts are being imported")
        self.call = call


def stop_import(call: str) -> None:
    """Raise ImportStopped if this thread is importing parts of a job; `call` is what the script has called."""
    if getattr(_importing, "depth", 0):
        raise ImportStopped(call)
    line = _line_of_program()
    if line is not None:
        if not _calls:
            _first_values.update(_plain_values())
        _calls.append(line)


def stopped_at(module: object) -> str | None:
    """Return where the import of a module was stopped; None if it came to its end."""
    return _stopped.get(getattr(module, "__name__", ""))


def import_until_stopped(name: str) -> types.ModuleType:
    """Import a module by name; what it calls of Cordée, and what follows, is left out."""
    if name in sys.modules:
        return sys.modules[name]
    if not name:
        raise ValueError("Empty module name")
    specification = importlib.util.find_spec(name)  # imports the packages that it is in
    if specification is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    module = execute_until_stopped(specification)
    package, _, own_name = name.rpartition(".")
    if package:
        setattr(sys.modules[package], own_name, module)
    return module


def execute_until_stopped(specification: importlib.machinery.ModuleSpec) -> types.ModuleType:
    """Make a module and run it, to its end or to where it is stopped; it stays in `sys.modules` unless it raises."""
    if specification.loader is None:  # a folder without __init__.py
        return importlib.import_module(specification.name)
    name, module = specification.name, importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    _importing.depth = getattr(_importing, "depth", 0) + 1
    try:
        specification.loader.exec_module(module)
    except ImportStopped as stop:
        # What the job's parts need was defined before: the program that made the job had come no further.
        _stopped[name] = f"{stop.call}(){last_line_of(stop, module.__file__)}"
    except BaseException:
        del sys.modules[name]  # or a second try would find half a module
        raise
    finally:
        _importing.depth -= 1
    return module


def last_line_of(error: BaseException, file: str | None = None) -> str:
    """Return the last line, of one file or of any that is the user's, that an error went through."""
    traceback = error.__traceback__
    line = ""
    while traceback is not None:
        file_name = traceback.tb_frame.f_code.co_filename
        is_users = not file_name.startswith("<") and "importlib" not in file_name and file_name not in _OWN_FILES
        if file_name == file or (file is None and is_users):
            line = f" (at {file_name}:{traceback.tb_lineno})"
        traceback = traceback.tb_next
    return line


_OWN_FILES = (__file__, str(Path(__file__).with_name("references.py")))


def refuse_what_workers_miss(used: Collection[str]) -> None:
    """Raise JobError if workers would see other values than this program. `used` are names of it that a job uses.

    Workers import its file only up to its first call of Cordée, and nothing under `if __name__ == "__main__"`.
    `stop_import` has recorded the calls, the present one last.
    """
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if file is None or not _calls:
        return
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        source = Path(file).read_text()
        if (found := find_missed(source, _calls)) is not None:
            first, line, name = found
            raise JobError(
                f"{file}: line {line} uses {name!r}, which functions or classes above use as well, and workers import "
                f"the script only up to its first call of cordee, at line {first}: {ADVICE}; if "
                "nothing changes, put the calls under if __name__ == '__main__':"
            )
        if (guarded := find_guarded(source, used)) is not None:
            line, name = guarded
            raise JobError(
                f"{file}: line {line} changes {name!r} under if __name__ == '__main__':, which workers do not execute, "
                f"and what the job uses reads {name!r}: {ADVICE}"
            )
        read = globals_read(source, used)
        for name, value in _plain_values().items():
            before = _first_values.get(name, value)
            if before != value and name.partition(".")[0] in read:
                raise JobError(
                    f"{file}: {name!r} was {before} at the first call of cordee and is {value} now, and workers "
                    f"import the script as it was then: {ADVICE}"
                )


ADVICE = (
    "give what changes between the calls as a setting, cordee.Use(Model, name=value), since workers do not see a "
    "changed global"
)


def _plain_values() -> dict[str, str]:
    """Return the numbers, texts and tuples of them of the program's own file, and of the classes defined in it."""
    program = sys.modules["__main__"]
    found = {name: repr(value) for name, value in list(vars(program).items()) if _is_plain(value)}
    for one in [value for value in list(vars(program).values()) if isinstance(value, type)]:
        if one.__module__ == "__main__":
            own = {name: value for name, value in vars(one).items() if not name.startswith("__") and _is_plain(value)}
            found |= {f"{one.__qualname__}.{name}": repr(value) for name, value in own.items()}
    return found


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return type(value) in (int, float, bool, str, type(None))


def find_guarded(source: str, used: Collection[str]) -> tuple[int, str] | None:
    """Return (line, name) of a global that is set outside of `if __name__ == ...` and again inside, and is read by what
    is `used`: definitions of this file by name, and those that they use themselves.
    """
    statements = ast.parse(source).body
    guards = [node for node in statements if isinstance(node, ast.If) and "__name__" in _names(node.test)]
    outside = {name for node in statements if node not in guards for name, _ in _stored(node)}
    setters = {table.get_name(): _globals_set(table) for table in symtable.symtable(source, "", "exec").get_children()}
    inside = [(line, name) for guard in guards for name, line in _stored(guard)]
    for node in (node for guard in guards for node in ast.walk(guard)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            inside += [(node.lineno, name) for name in setters.get(node.func.id, ())]
    read = globals_read(source, used) & outside
    return next(((line, name) for line, name in sorted(inside) if name in read), None)


def _stored(tree: ast.stmt) -> Iterator[tuple[str, int]]:
    """Yield the names that a statement of a module sets, without what functions and classes set inside of them."""
    if isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno


def globals_read(source: str, used: Collection[str]) -> set[str]:
    """Return `used`, definitions of a file by name, and the globals that they, and definitions among those, read."""
    tables = {table.get_name(): table for table in symtable.symtable(source, "", "exec").get_children()}
    read = {name.partition(".")[0] for name in used}
    pending = list(read)
    while pending:
        table = tables.get(pending.pop())
        new = set(_free_names(table)) - read if table is not None else set()
        read |= new
        pending += new
    return read


def _globals_set(table: symtable.SymbolTable) -> list[str]:
    """Return the globals that a function sets."""
    return [symbol.get_name() for symbol in table.get_symbols() if symbol.is_declared_global() and symbol.is_assigned()]


def _free_names(table: symtable.SymbolTable) -> Iterator[str]:
    yield from (symbol.get_name() for symbol in table.get_symbols() if symbol.is_global())
    for child in table.get_children():
        yield from _free_names(child)


def find_missed(source: str, calls: list[int]) -> tuple[int, int, str] | None:
    """Return (line of the first call, line, name) if a name is used between the calls and by what is defined above.

    Names of modules, functions and classes do not count, nor calls under `if __name__ == ...`.
    """
    statements = ast.parse(source).body
    guards = [node for node in statements if isinstance(node, ast.If) and "__name__" in _names(node.test)]
    open_calls = [line for line in calls if not any(g.lineno <= line <= (g.end_lineno or 0) for g in guards)]
    first = open_calls[0] if open_calls else 0
    if not open_calls or len(calls) == calls.index(first) + 1:
        return None
    above = [node for node in statements if (node.end_lineno or 0) < first]
    definitions = [node for node in above if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    fixed = {node.name for node in definitions}
    for node in above:
        if isinstance(node, ast.Import | ast.ImportFrom):
            fixed |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    reached = {name for node in definitions for name in _names(node)}
    used = reached - fixed
    for node in statements:
        is_loop = isinstance(node, ast.For | ast.While)  # has come around since the first call
        if (node.end_lineno or 0) >= first and node.lineno < calls[-1] + is_loop:
            for name in sorted((_names(node) & used) | (_changed(node) & reached)):
                return first, node.lineno, name
    return None


def _changed(tree: ast.AST) -> set[str]:
    """Return the names of which an attribute or an item is set: `helper` of `helper.K = 2`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            root: ast.expr = node
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            found |= {root.id} if isinstance(root, ast.Name) else set()
    return found


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _line_of_program() -> int | None:
    """Return the line at which the program's own file is being executed; None inside of an interactive one."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            return frame.f_lineno
        frame = frame.f_back
    return None
