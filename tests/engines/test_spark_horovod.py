"""`horovod.spark` on a real standalone Spark: a master and two workers. Run by `make test-spark`."""

from __future__ import annotations

from collections.abc import Iterator

import engine_runs as runs
import pytest

pytest.importorskip("pyspark")

from cordee.bench.clusters import SparkCluster

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def said() -> Iterator[list[runs.Said]]:
    cluster = SparkCluster(num_nodes=2)
    try:
        yield runs.drive_horovod("spark", cluster, {})
    finally:
        cluster.close()


def test_without_a_session_the_message_says_what_to_do(said: list[runs.Said]) -> None:
    assert said[0]["kind"] == "JobError" and "no Spark session" in said[0]["error"]


def test_functions_run_as_ranks(said: list[runs.Said]) -> None:
    runs.assert_horovod_holds(said[1:])


def test_a_lost_rank_is_reported_and_nothing_is_begun_again(said: list[runs.Said]) -> None:
    lost = said[7]
    assert lost["kind"] == "TrainingError" and "was lost with its Spark executor" in lost["error"]


def test_too_many_ranks_are_refused_in_time(said: list[runs.Said]) -> None:
    assert said[9]["kind"] == "JobError" and "2 free, and num_proc=3" in said[9]["error"]
