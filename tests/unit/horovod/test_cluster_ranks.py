"""Processes that Ray or Spark has started as ranks, without either."""

from __future__ import annotations

import os
import threading

import pytest
import torch.distributed as dist

from cordee.core.env import Place
from cordee.core.errors import CommunicationError, JobError, TrainingError
from cordee.horovod import world
from cordee.horovod.cluster_ranks import (
    LOOPBACK,
    Meeting,
    Outcome,
    number_ranks,
    report_failure,
    results_of,
    taking_part,
)
from cordee.horovod.ray import RayExecutor


@pytest.mark.parametrize(
    ("hosts", "places"),
    [
        (["a"], [(0, 1, 0, 1)]),
        (["a", "a"], [(0, 2, 0, 2), (1, 2, 1, 2)]),
        (["b", "a", "b"], [(0, 3, 0, 2), (2, 3, 0, 1), (1, 3, 1, 2)]),
        (["a", "b", "b", "a", "c"], [(0, 5, 0, 2), (2, 5, 0, 2), (3, 5, 1, 2), (1, 5, 1, 2), (4, 5, 0, 1)]),
    ],
)
def test_ranks_go_host_by_host(hosts: list[str], places: list[tuple[int, ...]]) -> None:
    assert number_ranks(hosts) == [Place(*place) for place in places]


def test_a_process_is_afterwards_what_it_was() -> None:
    meeting = Meeting(LOOPBACK)
    before = dict(os.environ)
    try:
        with taking_part(Place(0, 1, 0, 1), meeting.address, meeting.port, {"TOLD": "so"}):
            assert os.environ["TOLD"] == "so" and os.environ["MASTER_PORT"] == str(meeting.port)
            world.init()
            assert world.size() == 1
        assert dict(os.environ) == before and not world.is_initialized()
        with pytest.raises(ValueError), taking_part(Place(0, 1, 0, 1), meeting.address, meeting.port, {}):
            world.init()
            raise ValueError
        assert dict(os.environ) == before and not world.is_initialized()
    finally:
        meeting.close()


@pytest.mark.timeout(60)
def test_nobody_waits_for_a_rank_that_has_failed() -> None:
    meeting = Meeting(LOOPBACK)
    waiting = dist.TCPStore(meeting.address, meeting.port, is_master=False, wait_for_workers=False)
    report_failure(meeting.address, meeting.port)
    with pytest.raises(dist.DistError):
        waiting.get("what the lost rank would have said")  # 5 minutes otherwise
    report_failure(meeting.address, meeting.port)  # a second one finds it over
    meeting.close()


@pytest.mark.timeout(60)
def test_a_rank_that_comes_after_a_failure_is_told_so() -> None:
    meeting = Meeting(LOOPBACK)
    meeting.close()
    with (
        pytest.raises(CommunicationError, match=r"hvd.init: the store of this launch, 127.0.0.1:\d+, has ended"),
        taking_part(Place(0, 2, 0, 2), meeting.address, meeting.port, {}),
    ):
        world.init()


@pytest.mark.timeout(60)
def test_a_process_can_be_a_rank_again_after_it_has_waited_for_one_that_failed() -> None:
    meeting = Meeting(LOOPBACK)
    failing = threading.Timer(0.5, report_failure, (meeting.address, meeting.port))
    failing.start()
    with pytest.raises(dist.DistError), taking_part(Place(0, 2, 0, 2), meeting.address, meeting.port, {}):
        world.init()
    failing.join()
    meeting.close()
    # By this number the next group is looked for; another process has made no attempt.
    assert dist.distributed_c10d._world.group_count == 0


def test_the_cause_is_told_from_its_consequences() -> None:
    fine = Outcome(0, "result")
    lost = Outcome.of_error(1, CommunicationError("rank 2 is gone"))
    store = Outcome.of_error(3, dist.DistNetworkError("connection closed"))
    cause = Outcome.of_error(2, ValueError("no luck"))
    assert results_of([Outcome(1, "b"), Outcome(0, "a")], "here") == ["a", "b"]
    with pytest.raises(TrainingError, match="here: rank 2 failed: ValueError: no luck"):
        results_of([fine, lost, store, cause], "here")
    with pytest.raises(TrainingError, match=r"here: rank 1 failed: .*rank 2 is gone"):
        results_of([fine, lost, store], "here")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give either num_workers, or num_hosts"),
        ({"num_workers": 2, "num_hosts": 2}, "give either num_workers, or num_hosts"),
        ({"num_workers": 0}, "num_workers=0"),
        ({"num_hosts": 2, "num_workers_per_host": 0}, "num_workers_per_host=0"),
        ({"num_workers": 2, "gpus_per_worker": 1}, "use_gpu is False"),
    ],
)
def test_wrong_numbers_of_workers_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RayExecutor(**options)  # type: ignore[arg-type]


def test_what_ray_executors_do_not_do_is_refused() -> None:
    with pytest.raises(JobError, match=r"min_workers=….*is not possible"):
        RayExecutor(num_workers=2, min_workers=1)
    with pytest.raises(JobError, match="ssh_identity_file"):
        RayExecutor.create_settings(ssh_identity_file="~/.ssh/id_rsa")
    with pytest.raises(JobError, match=r"call start\(\) before"):
        RayExecutor(num_workers=2).run(print)
    RayExecutor(num_workers=2).shutdown()  # nothing to end
