from __future__ import annotations

from multiprocessing import forkserver

import backend_pool  # noqa: F401 - says what the fork server shall import before it starts
import pytest


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    """Started before the first test, which would otherwise be said to leave it behind."""
    forkserver.ensure_running()
