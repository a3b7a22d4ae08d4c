"""The all-reduce benchmark, at its smallest."""

from __future__ import annotations

import pytest

from cordee.bench.allreduce import repetitions, run
from cordee.core.errors import JobError


def test_rows_have_figures_and_ratios() -> None:
    outcome = run(rounds=1, sizes=[1024, 4096], processes=[2])
    assert [(row["processes"], row["bytes"]) for row in outcome["rows"]] == [(2, 1024), (2, 4096)]
    for row in outcome["rows"]:
        assert row["cordee_ms"] > 0
        assert row["times_gloo"] == pytest.approx(row["gloo_ms"] / row["cordee_ms"])
        assert row["share_of_limit"] > 0
    assert len(outcome["raw"]["gloo, 2 processes, 1024 bytes"]) == 1


def test_small_sizes_are_repeated_more_often() -> None:
    assert repetitions(1024) == 200
    assert 5 <= repetitions(1 << 26) < repetitions(1 << 20)


def test_no_rounds_is_an_error() -> None:
    with pytest.raises(JobError, match="rounds is 0"):
        run(rounds=0)
