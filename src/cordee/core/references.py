"""Parts of a job that are named by the user: `use = "a built-in name"`, "module:callable" or a live object.

The other keys of such a section are arguments of what it names. They are checked against the signature
before anything is called, so that a misspelt key is a message and not a traceback.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from cordee.core.errors import CordeeError, JobError, nearest
from cordee.core.importing import execute_until_stopped, import_until_stopped, last_line_of, stopped_at
from cordee.core.seeds import derive_seed

LIVE_PREFIX = "live:"


class Use:
    """A part of a job: what to use, and the arguments for it.

    `Use("resnet", depth=20)` and `Use(MyNet, hidden=64)` are the Python form of a section of the job file.
    """

    __slots__ = ("args", "use")

    def __init__(self, use: Any, /, **args: Any) -> None:
        self.use = use
        self.args: Mapping[str, Any] = types.MappingProxyType(dict(args))

    def __repr__(self) -> str:
        return f"Use({', '.join([repr(self.use), *(f'{key}={value!r}' for key, value in self.args.items())])})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Use) and (self.use, dict(self.args)) == (other.use, dict(other.args))

    def __hash__(self) -> int:
        return hash((Use, str(self.use)))

    @classmethod
    def coerce(cls, section: str, value: Any, default: Use | None = None) -> Use:
        """Return `value` as a `Use`: it may be one, a table with the key 'use', a name, or a live object.

        A table without it changes the arguments of `default`, where there is one.
        """
        if isinstance(value, Use):
            return value
        if isinstance(value, Mapping):
            if "use" not in value and default is not None:
                return cls(default.use, **{**default.args, **value})
            if "use" not in value:
                raise JobError(f"[{section}] needs the key 'use': a built-in name or 'module:callable'")
            return cls(value["use"], **{key: argument for key, argument in value.items() if key != "use"})
        return cls(value)

    def to_dict(self) -> dict[str, Any]:
        """Return the section of the job file; a live object becomes the name it can be imported by."""
        return {"use": name_of(self.use), **self.args}


def name_of(live: Any) -> str:
    """Return "module:callable" for a live callable that can be imported again, else a "live:" description.

    A name is returned as it is.
    """
    if isinstance(live, str):
        return live
    module, qualname = getattr(live, "__module__", None), getattr(live, "__qualname__", None)
    if module and qualname and _is_found_at(live, module, qualname):
        if module != "__main__":
            return f"{module}:{qualname}"
        script = getattr(sys.modules["__main__"], "__file__", None)
        if script and Path(script).suffix == ".py":
            return f"{Path(script).resolve()}:{qualname}"
    return f"{LIVE_PREFIX}{module or ''}.{qualname}" if qualname else f"{LIVE_PREFIX}{type(live).__qualname__}"


def texts_in(table: Any) -> Iterator[str]:
    """Yield the texts among the values of a table of plain values, at any depth."""
    if isinstance(table, str):
        yield table
    elif isinstance(table, Mapping | list | tuple):
        for value in table.values() if isinstance(table, Mapping) else table:
            yield from texts_in(value)


def program_folders() -> list[str]:
    """Return where this program finds its own modules, so that others find them from elsewhere."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folders = [Path(script).parent, Path.cwd()] if script else [Path.cwd()]
    return [str(folder.resolve()) for folder in folders]


def _is_found_at(live: Any, module: str, qualname: str) -> bool:
    """Return whether the name leads to this very object; it does not for local ones and methods of an instance."""
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found is live or (inspect.ismethod(live) and bool(found == live))


def resolve(
    section: str, use: Any, builtins: Mapping[str, Callable[..., Any]], *, python_path: Sequence[str] = ()
) -> Callable[..., Any]:
    """Return the callable that `use` names; live callables are returned as they are.

    Raises JobError for a name that is not known, a module that cannot be imported and an attribute that is
    not there. `python_path` is searched first. It then stays on `sys.path`, but last: what the module imports
    later is found, and a file called like a standard module does not hide it from others.
    """
    if not isinstance(use, str):
        if callable(use):
            return typing.cast("Callable[..., Any]", use)
        raise JobError(f"{section}: {use!r} cannot be called; give a name, 'module:callable' or a callable")
    if use in builtins:
        return builtins[use]
    if use.startswith(LIVE_PREFIX):
        raise JobError(
            f"{section}.use = {use!r}: this job was made in Python from an object that has no importable name; "
            "run it again from that program, or name the part as 'module:callable'"
        )
    module_name, separator, attribute = use.rpartition(":")
    if not separator:
        raise JobError(
            f"{section}.use = {use!r} is not known{nearest(use, builtins)} "
            f"(known: {', '.join(sorted(builtins))}, or any 'module:callable')"
        )
    found: Any = _import(section, use, module_name, python_path)
    for part in attribute.split("."):
        if not hasattr(found, part):
            if (where := stopped_at(found)) is not None:
                raise JobError(
                    f"{section}.use = {use!r}: {part!r} is not defined before {where}, where a worker's import "
                    f"ends: put the call under if __name__ == '__main__':, or define {part!r} above it"
                )
            raise JobError(f"{section}.use = {use!r}: {module_name!r} has no {part!r}{nearest(part, _public(found))}")
        found = getattr(found, part)
    if not callable(found):
        raise JobError(f"{section}.use = {use!r} names a {type(found).__name__}, which cannot be called")
    return typing.cast("Callable[..., Any]", found)


def bind(
    section: str,
    target: Callable[..., Any],
    args: Mapping[str, Any],
    provided: Mapping[str, Any] | None = None,
) -> functools.partial[Any]:
    """Return `target` with `args` bound by name, each checked against the signature and its annotation.

    `provided` are values that Cordée can give (the input shape, say): each is passed when the signature has
    a parameter of that name and the user did not set it. Positional parameters without a default that
    nobody gives are an error, except the first ones of an optimizer or loss, which the caller binds itself
    by listing them in `provided` with `inspect.Parameter.empty`.
    """
    provided = provided or {}
    parameters = _parameters(target)
    if parameters is None:  # a builtin without a signature: nothing can be checked
        return functools.partial(target, **args)
    named = {p.name: p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    settable = [name for name, p in named.items() if p.kind is not p.POSITIONAL_ONLY and name not in provided]
    hints = _annotations(target)

    bound = {}
    for key, value in args.items():
        if isinstance(value, str) and value.startswith(LIVE_PREFIX):
            raise JobError(
                f"{section}.{key} = {value!r}: this job was made in Python from an object that a file cannot hold; "
                "run it again from that program"
            )
        if key in named and named[key].kind is not inspect.Parameter.POSITIONAL_ONLY:
            bound[key] = _converted(f"{section}.{key}", value, hints.get(key))
        elif open_ended:
            bound[key] = value
        else:
            takes = f"it takes: {', '.join(settable)}" if settable else "it takes no settings"
            raise JobError(f"{section} has no setting '{key}'{nearest(key, settable)} ({takes})")
    for name, value in provided.items():
        if name in named and name not in bound and value is not inspect.Parameter.empty:
            bound[name] = value
    missing = [
        p.name for p in named.values() if p.default is p.empty and p.name not in bound and p.name not in provided
    ]
    if missing:
        raise JobError(f"{section} needs {', '.join(repr(name) for name in missing)}: set {section}.{missing[0]}")
    return functools.partial(target, **bound)


def construct(section: str, use: Any, build: Callable[[], Any]) -> Any:
    """Call `build`, which is a part's callable with its settings bound; what it raises becomes a JobError."""
    try:
        return build()
    except CordeeError:
        raise
    except Exception as error:
        raise JobError(
            f"{section}.use = {name_of(use)!r} raised {type(error).__name__}: {error}{last_line_of(error)}"
        ) from error


def first_parameters(target: Callable[..., Any], count: int) -> dict[str, Any]:
    """Return the first parameters of a callable, marked for `bind` as given by the caller. None of a builtin's."""
    return dict.fromkeys([p.name for p in _parameters(target) or ()][:count], inspect.Parameter.empty)


def _parameters(target: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        return None


def _annotations(target: Callable[..., Any]) -> dict[str, Any]:
    function = target.__init__ if inspect.isclass(target) else target
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError):  # an annotation only a type checker understands
        return {}


def _converted(key: str, value: Any, annotation: Any) -> Any:
    """Return `value` as its annotation wants it (a list as a tuple, an int as a float), or raise JobError."""
    if annotation is None or not _is_plain(annotation):
        return value
    try:
        return msgspec.convert(value, annotation, strict=True)
    except msgspec.ValidationError as error:
        raise JobError(f"{key} = {value!r} does not fit: {describe(error)}") from None
    except TypeError:  # an annotation msgspec cannot check, such as list[int] | tuple[int, ...]
        return value


_PLAIN = (int, float, str, bool, type(None))


def _is_plain(annotation: Any) -> bool:
    origin = typing.get_origin(annotation)
    if origin is None:
        return annotation in _PLAIN or annotation is Ellipsis
    if origin is typing.Literal:
        return True
    return origin in (tuple, list, typing.Union, types.UnionType) and all(
        _is_plain(argument) for argument in typing.get_args(annotation)
    )


def describe(error: msgspec.ValidationError) -> str:
    """Return msgspec's complaint in this project's words, without its path notation."""
    text = str(error).split(" - at `$")[0]
    text = text.replace(" | null", "")  # TOML has no such value
    return text.replace("`", "'").replace("Expected", "expected").replace("Invalid enum value", "unknown value")


def _import(section: str, use: str, module_name: str, python_path: Sequence[str]) -> types.ModuleType:
    try:
        if module_name.endswith(".py"):
            return _import_file(module_name, python_path)
        with _searched_first(python_path):
            return import_until_stopped(module_name)
    except JobError as error:
        raise JobError(f"{section}.use = {use!r}: {error}") from error.__cause__
    except (Exception, SystemExit) as error:  # a script without a main guard may end the program
        if isinstance(error, ModuleNotFoundError) and _is_within(error.name, module_name):
            searched = ", ".join([*python_path, "the Python path"])
            raise JobError(f"{section}.use = {use!r}: no module {error.name!r} (searched: {searched})") from None
        raise JobError(
            f"{section}.use = {use!r}: importing {module_name!r} raised {type(error).__name__}: {error}"
            f"{last_line_of(error)}"
        ) from error


def _is_within(missing: str | None, module_name: str) -> bool:
    """Return whether the module that is missing is the named one or a package it should be in."""
    return missing is not None and f"{module_name}.".startswith(f"{missing}.")


@contextlib.contextmanager
def _searched_first(folders: Sequence[str]) -> Iterator[None]:
    added = [folder for folder in dict.fromkeys(folders) if folder not in sys.path]
    importlib.invalidate_caches()  # the file may have been written a moment ago, by a notebook say
    sys.path[:0] = added
    try:
        yield
    finally:
        for folder in added:
            with contextlib.suppress(ValueError):
                sys.path.remove(folder)
                sys.path.append(folder)


def _import_file(file_name: str, python_path: Sequence[str]) -> types.ModuleType:
    candidates = [Path(file_name), *(Path(folder) / file_name for folder in python_path)]
    path = next((candidate.resolve() for candidate in candidates if candidate.is_file()), None)
    if path is None:
        raise JobError(f"no file {file_name!r} (searched: {', '.join(str(c) for c in candidates)})")
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(path) and module.__name__ != "__main__":
            return module
    # A file called random.py must not hide the module of that name, nor one called my-net.py go without a name.
    is_free = path.stem.isidentifier() and path.stem not in sys.modules and not _is_importable_elsewhere(path)
    name = path.stem if is_free else f"{path.stem}_{derive_seed(str(path)):x}"
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None
    with _searched_first([str(path.parent)]):
        return execute_until_stopped(specification)


def _is_importable_elsewhere(path: Path) -> bool:
    found = importlib.util.find_spec(path.stem)
    return found is not None and found.origin != str(path)


def _public(module: Any) -> Iterable[str]:
    return [name for name in dir(module) if not name.startswith("_")]
