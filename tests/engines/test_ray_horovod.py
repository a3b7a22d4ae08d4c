"""`horovod.ray` on a real Ray of two nodes. Run by `make test-ray`."""

from __future__ import annotations

from collections.abc import Iterator

import engine_runs as runs
import pytest

pytest.importorskip("ray")

from cordee.bench.clusters import RayCluster

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def said() -> Iterator[list[runs.Said]]:
    cluster = RayCluster(num_nodes=2)
    try:
        yield runs.drive_horovod("ray", cluster, {"RAY_ADDRESS": cluster.connect})
    finally:
        cluster.close()


def test_functions_run_as_ranks(said: list[runs.Said]) -> None:
    runs.assert_horovod_holds(said)


def test_a_lost_rank_is_named(said: list[runs.Said]) -> None:
    lost = said[6]
    assert lost["kind"] == "TrainingError" and "rank 1 failed: ray.exceptions.ActorDiedError" in lost["error"]


def test_an_executable_lives_from_call_to_call(said: list[runs.Said]) -> None:
    assert [one["result"] for one in said[8:11]] == [[15, 16], [20, 21], 20]
    assert [one["rank"] for one in said[11]["result"]] == [0, 1]


def test_ranks_are_spread_over_hosts(said: list[runs.Said]) -> None:
    assert said[12]["result"] == ["0", "1"]


def test_too_many_workers_are_refused_in_time(said: list[runs.Said]) -> None:
    assert said[13]["kind"] == "JobError" and "no room for 3 × {'CPU': 1} within 2 s" in said[13]["error"]
