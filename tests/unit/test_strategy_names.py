"""Nothing outside strategies/ names a strategy: what others need to know of one is in its entry in the table."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from cordee.core.mesh import AXES
from cordee.strategies.table import STRATEGIES, elastic_teams, quote_names, strategies_where, usual_strategy

SOURCES = Path(__file__).parents[2] / "src" / "cordee"
MAY_NAME = {"strategies", "bench"}  # benchmarks compare named strategies
TEMPLATES = {"tools/new.py": {"federated"}}  # names of templates of `cordee new`, which users type
NAMES = "|".join(STRATEGIES)
UNMISTAKABLE = "|".join(name for name in STRATEGIES if "_" in name)
# A text that is a name, has a quoted name in it, or one that can mean nothing else.
NAMING = re.compile(rf"^({NAMES})$|['\"`]({NAMES})['\"`]|\b({UNMISTAKABLE})\b")


def literals(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the strings of a module that are not docstrings, those inside f-strings included."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node


def named_in(source: str, allowed: Collection[str] = ()) -> list[str]:
    return [
        f"line {node.lineno}: {node.value!r}"
        for node in literals(ast.parse(source))
        if NAMING.search(node.value) and node.value not in allowed
    ]


FILES = [path for path in sorted(SOURCES.rglob("*.py")) if path.relative_to(SOURCES).parts[0] not in MAY_NAME]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCES)))
def test_no_strategy_is_named(path: Path) -> None:
    name = path.relative_to(SOURCES).as_posix()
    found = named_in(path.read_text(encoding="utf-8"), TEMPLATES.get(name, ()))
    assert not found, f"{path.relative_to(SOURCES)} names a strategy: ask its entry in strategies/table.py ({found})"


def test_names_are_found_and_other_words_are_not() -> None:
    for naming in ("x = 'pipeline'", "x = f\"use 'tensor' or {y}\"", "x = 'a data_parallel b'"):
        assert named_in(naming)
    assert not named_in('"""A `single` worker."""\nx = "a pipeline of a single tensor"\n')


def test_entries_say_what_is_asked_of_them() -> None:
    for entry in STRATEGIES.values():
        assert callable(entry.make)
        assert isinstance(entry.settings.__struct_fields__, tuple)
        assert entry.axis in ("", *AXES)
        assert not (entry.is_elastic and entry.splits_model), "a part of a model is not all that is needed to continue"
    assert usual_strategy(1) == "single" and usual_strategy(2) == "data_parallel"


def test_advice_is_made_from_the_table() -> None:
    assert elastic_teams() == "'data_parallel' or 'local_sgd'"
    assert elastic_teams(exchanging=True) == "'data_parallel'"
    able = strategies_where(lambda entry: entry.can_reproduce)
    assert quote_names(able, "and") == "'single', 'data_parallel' and 'parameter_server'"
