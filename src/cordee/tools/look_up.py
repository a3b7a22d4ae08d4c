"""What there is to name in a job file, with a line about each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from cordee.cluster.engines import ENGINES
from cordee.core.errors import JobError, nearest
from cordee.strategies.table import STRATEGIES


def list_models() -> dict[str, str]:
    from cordee.models.builtin import BUILTIN_MODELS

    return {name: _first_line(builder) + _arguments(builder) for name, builder in BUILTIN_MODELS.items()}


def list_data() -> dict[str, str]:
    from cordee.data.load import BUILTIN_DATA

    return {name: _first_line(source) for name, source in BUILTIN_DATA.items()}


def list_strategies() -> dict[str, str]:
    made = {name: _first_line(entry.make) for name, entry in STRATEGIES.items()}
    return {"auto": "What the planner predicts to be the fastest; see `cordee plan`.", **made}


def list_engines() -> dict[str, str]:
    return {name: f"{entry.summary[:1].upper()}{entry.summary[1:]}." for name, entry in ENGINES.items()}


KINDS: Mapping[str, Callable[[], dict[str, str]]] = {
    "models": list_models,
    "data": list_data,
    "strategies": list_strategies,
    "engines": list_engines,
}


def look_up(kind: str) -> dict[str, str]:
    """Return the names of a kind and what each is. Raises JobError for a kind that is none."""
    if kind not in KINDS:
        raise JobError(f"there is no list of {kind!r}{nearest(kind, KINDS)}: it is one of {', '.join(KINDS)}")
    return KINDS[kind]()


def _first_line(documented: Any) -> str:
    return (inspect.getdoc(documented) or "").split("\n\n")[0].replace("\n", " ")


def _arguments(builder: Callable[..., Any]) -> str:
    """Return the arguments of a model that a job file can set, with their defaults."""
    from_data = ("input_shape", "num_classes")
    own = [p for p in inspect.signature(builder).parameters.values() if p.name not in from_data]
    shown = [p.name if p.default is p.empty else f"{p.name} = {p.default!r}" for p in own if p.kind != p.VAR_KEYWORD]
    return f" Arguments: {', '.join(shown)}." if shown else ""
