"""Pools of real processes, shared by the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from process_pool import ProcessPool


@pytest.fixture(scope="module", autouse=True)
def processes_of_tests(warm_processes: None) -> None:
    """They are forked from a warm process: starting from nothing is tested in `tests/e2e`."""


def _pool(size: int) -> Iterator[ProcessPool]:
    pool = ProcessPool(size)
    pool.start()  # so that its processes are there before the first test begins
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def two() -> Iterator[ProcessPool]:
    yield from _pool(2)


@pytest.fixture(scope="module")
def three() -> Iterator[ProcessPool]:
    yield from _pool(3)


@pytest.fixture(scope="module")
def four() -> Iterator[ProcessPool]:
    yield from _pool(4)


@pytest.fixture(scope="module")
def eight() -> Iterator[ProcessPool]:
    yield from _pool(8)
