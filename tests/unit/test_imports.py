"""Imports point one way, package by package; dotted names in strings count as imports."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src" / "cordee"

# Packages and modules of one rank do not import each other, but for the ones that a row names together.
RANKS: tuple[tuple[str, ...], ...] = (
    ("version",),
    ("core",),
    ("data", "models", "compute", "communication", "checkpoint", "monitoring"),
    ("cluster",),
    ("parameters",),
    ("strategies",),
    ("training", "trainer"),
    ("runs",),
    ("planner",),
    ("run", "launch"),
    ("loop", "horovod"),
    ("tools", "dashboard", "bench", "spark", "jax"),
    ("tuning",),
    ("cli",),
    ("__init__", "__main__"),
)
RANK_OF = {part: rank for rank, parts in enumerate(RANKS) for part in parts}
# Modules of the root that belong to what has their rank.
TOGETHER = {("training", "trainer"), ("trainer", "training"), ("launch", "run")}
# What the fork server imports before it forks, and the functions that processes start with, are named by strings.
PROCESS_NAMES = re.compile(r"^cordee(\.[a-z_]+)+(:[a-z_]+)?$")


def part_of(path: Path) -> str:
    return path.relative_to(SOURCES).parts[0].removesuffix(".py")


def imported_parts(path: Path) -> set[str]:
    """Return the parts of cordee that a file imports or names as modules of processes, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        modules: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            modules = [node.module]
            if node.module == "cordee":
                modules = [f"cordee.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and is_module(node.value):
            modules = [node.value.partition(":")[0]]
        found |= {module.split(".")[1] for module in modules if module.startswith("cordee.")}
    return found


def is_module(text: str) -> bool:
    """Whether a string is the dotted name of a file or folder of the package, maybe with a function behind it."""
    if not PROCESS_NAMES.match(text):
        return False
    path = SOURCES.parent.joinpath(*text.partition(":")[0].split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_every_file_has_a_rank() -> None:
    parts = {part_of(path) for path in SOURCES.rglob("*.py")}
    assert parts == RANK_OF.keys(), f"give these a rank, or take it away: {sorted(parts ^ RANK_OF.keys())}"


def test_the_root_has_few_modules() -> None:
    modules = [path.stem for path in SOURCES.glob("*.py") if not path.stem.startswith("__")]
    assert len(modules) <= 7, modules


@pytest.mark.parametrize("path", sorted(SOURCES.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCES)))
def test_imports_point_down(path: Path) -> None:
    part = part_of(path)
    upward = {
        other
        for other in imported_parts(path) - {part}
        if RANK_OF[other] >= RANK_OF[part] and part not in RANKS[-1] and (part, other) not in TOGETHER
    }
    assert not upward, f"{path.relative_to(SOURCES)} ({part}) must not import {sorted(upward)}"


def test_names_of_test_files_are_unique() -> None:
    names = [path.name for path in Path(__file__).parents[1].rglob("test_*.py")]
    assert sorted(names) == sorted(set(names)), "pytest imports tests by name: two of one name cannot run together"
