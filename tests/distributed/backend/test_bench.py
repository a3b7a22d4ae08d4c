"""The benchmarks of all-reduce and of two hosts, at their smallest."""

from __future__ import annotations

import os
from functools import partial
from multiprocessing import forkserver

import pytest

from cordee.bench import hosts
from cordee.bench.allreduce import measure, repetitions
from cordee.bench.loops import synthetic_images
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


@pytest.mark.timeout(150)
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_two_hosts_reduce_and_train_plain_encrypted_and_on_gloo() -> None:
    training = hosts.Training("lenet", partial(synthetic_images, 1, 28, size=256, test_size=0), 3, 2)
    report = hosts.measure(rounds=1, say=lambda line: None, cases=["100mbit"], sizes=[1024], trainings=[training])
    assert [(row["case"], row["work"]) for row in report.rows] == [
        ("100mbit/all-reduce", "1024 bytes"),
        ("100mbit/lenet", "training step"),
    ]
    for row in report.rows:
        assert row["plain_times_gloo"] == pytest.approx(row["gloo_ms"] / row["plain_ms"])
        assert row["encrypted_times_plain"] == pytest.approx(row["plain_ms"] / row["encrypted_ms"])
        is_training = row["work"].startswith("training")
        assert (row["plain_busy_ms"] is None, bool(row["outcome"])) == (is_training, is_training)
    limited = report.rows[-1]  # 250 KB of gradients at 100 Mbit/s
    assert min(limited["plain_ms"], limited["encrypted_ms"], limited["gloo_ms"]) > 10
