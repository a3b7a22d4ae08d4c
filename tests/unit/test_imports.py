"""Imports point one way: core <- layers <- cluster <- strategies <- trainer <- launching <- cli."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src" / "cordee"

LAYERS = ("data", "models", "compute", "communication", "checkpoint", "monitoring")
RANKS: dict[str, int] = {
    "version": 0,
    "core": 1,
    **dict.fromkeys(LAYERS, 2),
    "cluster": 3,
    "store": 3,
    "strategies": 4,
    "arrivals": 5,
    "assembly": 5,
    "planner": 5,
    "profiling": 6,
    "overheads": 6,
    "profile_worker": 7,
    "crew": 8,
    "trials": 10,
    "trial_alone": 8,
    "planning": 11,
    "deciding": 12,
    "replanning": 13,
    "simulating": 12,
    "interrupts": 5,
    "run": 5,
    "progress": 5,
    "saving": 5,
    "resuming": 5,
    "meeting": 5,
    "trainer": 6,
    "session": 7,
    "worker": 8,
    "served": 8,
    "team_run": 9,
    "joining": 9,
    "launch": 14,
    "own_loop": 10,
    "script_run": 10,
    "script_worker": 11,
    "exporting": 10,
    "doctor": 10,
    "auditing": 11,
    "outage": 14,
    "chaos": 15,
    "bench": 15,
    "cli": 16,
    "__init__": 17,  # the public surface
    "__main__": 17,
}


def part_of(path: Path) -> str:
    return path.relative_to(SOURCES).parts[0].removesuffix(".py")


def imported_parts(path: Path) -> set[str]:
    """Return the parts of cordee that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            modules = [node.module]
            if node.module == "cordee":
                modules = [f"cordee.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            continue
        found |= {module.split(".")[1] for module in modules if module.startswith("cordee.")}
    return found


def test_every_file_has_a_rank() -> None:
    parts = {part_of(path) for path in SOURCES.rglob("*.py")}
    assert parts <= RANKS.keys(), f"give these a rank: {sorted(parts - RANKS.keys())}"


@pytest.mark.parametrize("path", sorted(SOURCES.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCES)))
def test_imports_point_down(path: Path) -> None:
    part = part_of(path)
    upward = {
        other
        for other in imported_parts(path) - {part}
        if RANKS[other] >= RANKS[part] and RANKS[part] < RANKS["__init__"]
    }
    assert not upward, f"{path.relative_to(SOURCES)} ({part}) must not import {sorted(upward)}"


def test_names_of_test_files_are_unique() -> None:
    names = [path.name for path in Path(__file__).parents[1].rglob("test_*.py")]
    assert sorted(names) == sorted(set(names)), "pytest imports tests by name: two of one name cannot run together"
