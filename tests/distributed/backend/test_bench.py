"""The all-reduce benchmark, at its smallest."""

from __future__ import annotations

from multiprocessing import forkserver

import pytest

from cordee.bench.allreduce import measure, repetitions
from cordee.core.errors import JobError


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    """It outlives what it forks, and serves the tests after this one."""
    forkserver.ensure_running()


def test_rows_have_figures_and_ratios() -> None:
    report = measure(rounds=1, say=lambda line: None, sizes=[1024, 4096], processes=[2])
    assert [(row["processes"], row["bytes"]) for row in report.rows] == [(2, 1024), (2, 4096)]
    for row in report.rows:
        assert row["cordee_ms"] > 0
        assert row["times_gloo"] == pytest.approx(row["gloo_ms"] / row["cordee_ms"])
        assert row["share_of_limit"] > 0
    assert len(report.raw["gloo, 2 processes, 1024 bytes"]) == 1


def test_small_sizes_are_repeated_more_often() -> None:
    assert repetitions(1024) == 200
    assert 5 <= repetitions(1 << 26) < repetitions(1 << 20)


def test_no_rounds_is_an_error() -> None:
    with pytest.raises(JobError, match="rounds is 0"):
        measure(rounds=0, say=lambda line: None)
