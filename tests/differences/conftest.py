"""One process that has torch imported, from which the runs of a whole session are forked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from differences.running import Runner, WarmServer


@pytest.fixture(scope="session")
def server() -> Iterator[WarmServer]:
    with WarmServer() as server:
        yield server


@pytest.fixture(scope="session")
def runner(server: WarmServer, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return Runner(server, tmp_path_factory.mktemp("differences"))
