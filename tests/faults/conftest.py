"""What several files of fault tests use."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from walking import Walked

from warm_launch import WarmServer


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Walked]:
    """Walks for the tests of a file, with the walker that its `make_walker` makes; says how much that was."""
    started_s = time.monotonic()
    with WarmServer() as server:
        walked = Walked(request.module.make_walker(server, tmp_path_factory.mktemp("walk")))
        yield walked
    writer = request.config.get_terminal_writer()
    writer.line(f"\n{len(walked.results)} faults at fault points in {time.monotonic() - started_s:.0f} s")
