"""The registry of members, and what is said when too few are left."""

from __future__ import annotations

from pathlib import Path

import pytest

from cordee.cluster.engine import Exited, Started
from cordee.cluster.members import MOST_RETURNS, MemberRecord, Members, check_join_request, incarnation_of
from cordee.cluster.policies import RemainingWorkers, Shortage
from cordee.communication.messages import JoinRequest
from cordee.communication.this_host import host_id
from cordee.core.errors import JobError, StorageError
from cordee.core.settings import Cluster


def registry(*records: MemberRecord) -> Members:
    members = Members(failure_timeout_s=5.0)
    for record in records:
        members.expect(record, 0.0)
    return members


def test_only_external_workers_of_this_host_are_watched_by_their_processes() -> None:
    here, there = MemberRecord(index=3, pid=11), MemberRecord(index=4, pid=11, is_remote=True)
    started = MemberRecord(index=5, number=5, started=1, pid=12)
    members, alive = registry(here, there, started), {11}
    assert members.take_ended(alive.__contains__) == []
    alive.clear()
    assert members.take_ended(alive.__contains__) == [here], "not of another host, nor one that the engine reports"
    assert members.take_ended(alive.__contains__) == [], "once"
    assert (here.local_pid, there.local_pid, started.local_pid) == (0, 0, 12)


def test_a_name_that_is_used_again_is_the_new_process_s_and_nobody_else_speaks_for_it() -> None:
    members = registry(MemberRecord(index=2, pid=11, is_remote=True, step=7))
    earlier = members.records["worker-2"]
    members.join(earlier, 40, 1.0)
    assert earlier.may_send and not earlier.may_join
    later = members.expect(MemberRecord(index=2, pid=12), 2.0)
    assert members.records["worker-2"] is later and later.may_join and not later.may_send
    own = incarnation_of(later.serial, 0)
    assert (later.fenced, later.step, later.heard_s) == (own - 1, 7, 2.0) and later.serial > earlier.serial
    # The process before it may live where nobody can end it, and come back as often as it likes.
    assert incarnation_of(earlier.serial, MOST_RETURNS - 1) <= later.fenced
    members.join(later, own, 3.0)
    assert later.may_send and later.fenced == own - 1


def test_who_was_given_up_may_come_back_as_another_incarnation() -> None:
    members = registry(MemberRecord(index=0, number=1))
    record, fenced = members.records["worker-0"], dict[str, int]()
    members.join(record, 40, 1.0)
    record.num_acknowledged, record.loss_reason = 9, "is frozen"
    members.lose(record, is_away=True)
    assert record.may_join and not record.may_send and members.staying_workers == []
    members.resume(7.0, fenced.__setitem__)
    assert fenced == {"worker-0": 40} and record.heard_s == 7.0
    members.join(record, 50, 8.0)
    assert record.may_send and not record.may_join and (record.num_acknowledged, record.loss_reason) == (0, "")
    members.lose(record)
    assert not record.may_join, "another has its place, or the process is dead"


def test_reports_of_a_process_that_was_replaced_are_passed_over() -> None:
    record = MemberRecord(index=0, number=0, started=2)
    members = registry(record)
    assert members.take(Started(0, 1, 11), 0.0) is None and members.take(Exited(0, 1, 11, -9), 0.0) is None
    assert members.take(Started(0, 2, 12), 0.0) is None and record.local_pid == 12
    record.is_away = True
    assert members.take(Exited(0, 2, 12, -9), 0.0) is record and members.started == []
    assert not record.is_away, "what is dead does not come back"
    assert members.take(Exited(0, 2, 12, -9), 0.0) is None, "told once more to a coordinator that came back"


def test_names() -> None:
    names = [MemberRecord(role="server", index=1, replica=replica).name for replica in (0, 2)]
    assert names == ["server-1", "server-1.2"]


@pytest.mark.parametrize(
    ("silent_s", "has_joined", "is_working", "is_stopped", "loss_reason"),
    [
        (5.0, True, False, True, ""),
        (5.1, True, True, False, ""),
        (5.1, True, False, False, "is frozen: no sign of life for 5.1 s"),
        (5.1, False, False, False, ""),
        (5.1, False, True, True, "is frozen: no sign of life for 5.1 s"),
        (120.0, False, False, False, ""),
        (120.1, False, True, False, "did not start for 120.1 s"),
    ],
)
def test_what_silence_means(
    silent_s: float, has_joined: bool, is_working: bool, is_stopped: bool, loss_reason: str
) -> None:
    record = MemberRecord(role="server", index=0, number=1)
    members = registry(record)
    if has_joined:
        members.join(record, 1, 0.0)
    looks = {"is_working": lambda pid: is_working, "is_stopped": lambda pid: is_stopped}
    assert members.check_silence(silent_s, **looks) == ([record] if loss_reason else [])
    assert record.loss_reason == loss_reason
    assert (record.heard_s > 0) == (has_joined and is_working), "it has as much time again"
    assert members.check_silence(1000.0, **looks) == [] or not loss_reason, "said once"


def test_silence_of_another_host_is_that_it_cannot_be_reached() -> None:
    record = MemberRecord(index=0, pid=11, is_remote=True)
    members = registry(record)
    members.join(record, 1, 0.0)
    assert members.check_silence(6.0, is_working=lambda pid: pid == 11) == [record], "its number is of another host"
    assert record.loss_reason == "is out of reach: no sign of life for 6.0 s"


def test_a_run_that_does_not_listen_takes_nobody_from_elsewhere() -> None:
    assert not check_join_request(JoinRequest(1, "here", host_id(), "", ""), public="")
    with pytest.raises(JobError, match=r"takes no workers of other hosts: set cluster\.address"):
        check_join_request(JoinRequest(1, "there", "another", "", ""), public="")


def test_a_shortage_says_what_is_missing_and_how_to_mend_it() -> None:
    cluster = Cluster(max_restarts=1, min_workers=2, wait_for_workers="1.5s")
    remaining = RemainingWorkers("worker 1 was killed", left=1, needed=2)
    assert remaining.describe_wait(cluster, Path("a run")) == (
        "worker 1 was killed; 1 of at least 2 workers are left; waiting 1.5 s for others, who come with "
        "`cordee scale 'a run' 2` or `cordee join 'a run'`"
    )
    assert remaining.describe_wait(Cluster(wait_for_workers=0), Path("a run")) == ""
    shortage = Shortage.begin(remaining.describe_end(cluster), cluster, now_s=10.0)
    assert shortage.end_reason == (
        "worker 1 was killed; 1 of at least 2 workers are left, and all 1 replacements are used up "
        "(cluster.max_restarts)"
    )
    assert [shortage.is_past(now_s) for now_s in (11.4, 11.5)] == [False, True]


def test_all_members_that_cannot_read_the_storage_are_named_once_all_have_joined() -> None:
    records = [MemberRecord(index=index, number=index + 1, host=f"node{index}") for index in range(3)]
    members = registry(*records)
    for record in records[:2]:
        members.join(record, 1, 0.0)
    records[1].storage_problem = "/mnt/x/run/run.json is not there"
    members.check_storage("/mnt/x")  # the third may not read it either
    members.join(records[2], 1, 0.0)
    records[2].storage_problem = "permission denied"
    with pytest.raises(StorageError) as caught:
        members.check_storage("/mnt/x")
    assert "checkpoint.storage = '/mnt/x'" in str(caught.value) and "2 of 3 cannot read it" in str(caught.value)
    assert "worker-1 on host node1: /mnt/x/run/run.json is not there; worker-2 on host node2: perm" in str(caught.value)
    assert "worker-0" not in str(caught.value)


def test_a_run_that_has_begun_is_not_ended_for_a_member_that_cannot_read_the_storage() -> None:
    first, external = MemberRecord(index=0, number=1), MemberRecord(index=1)
    external.storage_problem = "not shared"
    members = registry(first, external)
    for record in (first, external):
        members.join(record, 1, 0.0)
    members.check_storage("/mnt/x")
    assert members.is_staffed, "somebody else's worker is that user's to look after"
    first.storage_problem = "not shared"
    members.check_storage("/mnt/x")
