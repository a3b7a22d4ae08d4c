"""What is read from the environment, and that it is read nowhere else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from cordee.core import env

SOURCES = Path(__file__).parents[3] / "src" / "cordee"


def test_data_folders() -> None:
    assert env.data_folders({}) == []
    assert env.data_folders({"CORDEE_DATA": "/a::/b"}) == [Path("/a"), Path("/b")]
    assert env.data_folders({"CORDEE_DATA": "~/d"}) == [Path.home() / "d"]


def test_cache_folder() -> None:
    assert env.cache_folder({}) == Path.home() / ".cache" / "cordee"
    assert env.cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/cordee")
    assert env.cache_folder({"XDG_CACHE_HOME": "/x", "CORDEE_CACHE": "/c"}) == Path("/c")


def test_runs_folder() -> None:
    assert env.runs_folder({}) == Path("runs")
    assert env.runs_folder({"CORDEE_RUNS": "/r"}) == Path("/r")


def test_tracebacks_are_for_those_who_ask() -> None:
    assert not env.wants_traceback({})
    assert env.wants_traceback({"CORDEE_TRACEBACK": "1"})


def test_colour() -> None:
    assert env.wants_colour({"TERM": "xterm"})
    assert not env.wants_colour({"NO_COLOR": "1"})
    assert not env.wants_colour({"TERM": "dumb"})


@pytest.mark.parametrize("path", sorted(SOURCES.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCES)))
def test_no_other_file_reads_the_environment(path: Path) -> None:
    if path == SOURCES / "core" / "env.py":
        return
    names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    assert not names & {"environ", "getenv", "environb"}
