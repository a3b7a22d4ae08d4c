"""Crews of real processes, shared by the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from crew import Crew


def _crew(size: int) -> Iterator[Crew]:
    crew = Crew(size)
    crew.start()  # so that its processes are there before the first test begins
    yield crew
    crew.close()


@pytest.fixture(scope="module")
def two() -> Iterator[Crew]:
    yield from _crew(2)


@pytest.fixture(scope="module")
def three() -> Iterator[Crew]:
    yield from _crew(3)


@pytest.fixture(scope="module")
def four() -> Iterator[Crew]:
    yield from _crew(4)


@pytest.fixture(scope="module")
def eight() -> Iterator[Crew]:
    yield from _crew(8)
