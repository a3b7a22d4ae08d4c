"""Workers that somebody else started, and what is said when too few are left."""

from __future__ import annotations

from pathlib import Path

import pytest

from cordee.cluster.engine import Exited, Started
from cordee.cluster.members import Process, Roster, check_join_request, judge_silence
from cordee.cluster.policies import Lack, Shortage
from cordee.communication.messages import JoinRequest
from cordee.communication.this_host import host_id
from cordee.core.errors import JobError
from cordee.core.settings import Cluster


def external(index: int, pid: int, *, is_remote: bool = False) -> Process:
    return Process(role="worker", index=index, pid=pid, is_remote=is_remote)


def test_only_external_workers_of_this_host_are_watched_by_their_processes() -> None:
    roster, alive = Roster(), {11}
    roster.add(external(3, 11))
    roster.add(external(4, 11, is_remote=True))
    roster.add(Process(role="worker", index=5, number=5, pid=12))
    assert roster.take_ended(alive.__contains__) == []
    alive.clear()
    assert [process.name for process in roster.take_ended(alive.__contains__)] == ["worker-3"]
    assert list(roster.processes) == ["worker-4", "worker-5"], "of another host, and one that the engine reports"
    assert [process.name for process in roster.remote_workers] == ["worker-4"]
    assert roster.pid_of("worker-4") == 0 and roster.pid_of("worker-5") == 12 and roster.pid_of("worker-9") == 0


def test_a_name_that_is_used_again_is_the_new_worker_s() -> None:
    roster = Roster()
    roster.add(external(2, 11, is_remote=True))
    roster.add(external(2, 12))
    assert [process.pid for process in roster.local_workers] == [12] and roster.remote_workers == []
    roster.remove("worker-2")
    roster.remove("worker-2")
    assert not roster.is_external("worker-2")


def test_reports_of_a_process_that_was_replaced_are_passed_over() -> None:
    roster = Roster()
    roster.add(Process(role="worker", index=0, number=0, incarnation=2))
    assert roster.take(Started(0, 1, 11)) is None and roster.take(Exited(0, 1, 11, -9)) is None
    assert roster.take(Started(0, 2, 12)) is None and roster.pid_of("worker-0") == 12
    ended = roster.take(Exited(0, 2, 12, -9))
    assert ended is not None and ended.name == "worker-0" and roster.processes == {}
    assert roster.take(Exited(0, 2, 12, -9)) is None, "told once more to a coordinator that came back"


def test_names() -> None:
    assert [Process(role="server", index=1, replica=replica).name for replica in (0, 2)] == ["server-1", "server-1.2"]


@pytest.mark.parametrize(
    ("silent_s", "has_joined", "is_working", "is_stopped", "silence"),
    [
        (5.0, True, False, True, "none"),
        (5.1, True, True, False, "busy"),
        (5.1, True, False, False, "frozen"),
        (5.1, False, False, False, "none"),
        (5.1, False, True, True, "frozen"),
        (120.0, False, False, False, "none"),
        (120.1, False, True, False, "late"),
    ],
)
def test_what_silence_means(
    silent_s: float, has_joined: bool, is_working: bool, is_stopped: bool, silence: str
) -> None:
    found = judge_silence(
        silent_s, (5.0, 120.0), has_joined=has_joined, is_working=lambda: is_working, is_stopped=lambda: is_stopped
    )
    assert found == silence


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
