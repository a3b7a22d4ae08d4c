"""What several files of fault tests use."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from walking import Walked

from warm_launch import WarmServer


@pytest.fixture(scope="module", autouse=True)
def processes_of_tests(warm_processes: None) -> None:
    """They are forked from a warm process: starting from nothing is tested in `tests/e2e`."""


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Walked]:
    """Walks for the tests of a file, with the walker that its `make_walker` makes; says how much that was."""
    started_s = time.monotonic()
    with WarmServer() as server:
        walked = Walked(request.module.make_walker(server, tmp_path_factory.mktemp("walk")))
        yield walked
    writer = request.config.get_terminal_writer()
    writer.line(f"\n{len(walked.results)} faults at fault points in {time.monotonic() - started_s:.0f} s")


@pytest.fixture(scope="session")
def walk_seed(request: pytest.FixtureRequest) -> int:
    """Draws the trials of `make test-long`: another seed each time, printed, or that of CORDEE_WALK_SEED."""
    seed = int(os.environ.get("CORDEE_WALK_SEED", "0")) or time.time_ns() // 1_000_000_000
    writer = request.config.get_terminal_writer()
    writer.line(f"\nthe seed of the fault walks is {seed}: CORDEE_WALK_SEED={seed} repeats them")
    return seed
