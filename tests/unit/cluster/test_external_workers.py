"""Workers that somebody else started, and what is said when too few are left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cordee.cluster.external_workers import ExternalWorkers, check_join_request
from cordee.cluster.shortage import Lack, Shortage
from cordee.communication.messages import JoinRequest
from cordee.communication.this_host import host_id
from cordee.core.errors import JobError
from cordee.core.settings import Cluster


def test_only_near_guests_are_watched_by_their_processes() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        external_workers = ExternalWorkers()
        external_workers.add(3, process.pid, 0.0, is_remote=False)
        external_workers.add(4, process.pid, 7.0, is_remote=True)
        assert external_workers.take_ended() == []
        process.kill()
        process.wait()
    assert external_workers.take_ended() == [3]
    assert 3 not in external_workers and 4 in external_workers, "a process of another host may have the same number"
    assert external_workers.far == {4: 7.0}


def test_a_number_that_is_used_again_is_the_new_guest_s() -> None:
    external_workers = ExternalWorkers()
    external_workers.add(2, 11, 1.0, is_remote=True)
    external_workers.add(2, 12, 2.0, is_remote=False)
    assert external_workers.near == [(2, 12)]
    external_workers.remove(2)
    external_workers.remove(2)
    assert 2 not in external_workers


def test_a_run_that_does_not_listen_takes_nobody_from_elsewhere() -> None:
    assert not check_join_request(JoinRequest(1, "here", host_id(), "", ""), public="")
    with pytest.raises(JobError, match=r"takes no workers of other hosts: set cluster\.address"):
        check_join_request(JoinRequest(1, "there", "another", "", ""), public="")


def test_a_shortage_says_what_is_missing_and_how_to_mend_it() -> None:
    cluster = Cluster(max_restarts=1, min_workers=2, wait_for_workers="1.5s")
    lack = Lack("worker 1 was killed", left=1, needed=2)
    assert lack.describe_wait(cluster, Path("a run")) == (
        "worker 1 was killed; 1 of at least 2 workers are left; waiting 1.5 s for others, who come with "
        "`cordee scale 'a run' 2` or `cordee join 'a run'`"
    )
    assert lack.describe_wait(Cluster(wait_for_workers=0), Path("a run")) == ""
    shortage = Shortage.begin(lack.verdict(cluster), cluster, now_s=10.0)
    assert shortage.verdict == (
        "worker 1 was killed; 1 of at least 2 workers are left, and all 1 replacements are used up "
        "(cluster.max_restarts)"
    )
    assert [shortage.is_past(now_s) for now_s in (11.4, 11.5)] == [False, True]
