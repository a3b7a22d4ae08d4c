"""Who is to blame: decided from what is heard, in whatever order it is heard."""

from __future__ import annotations

from collections.abc import Callable

from cordee.cluster.members import MemberRecord
from cordee.cluster.policies import FailureReport, Restarts
from cordee.runs.team.membership import CAUSE_WAIT_S, Membership

TIMEOUT_S = 5.0
LOST = "raised CommunicationError: rank 1 died"


def team(num_workers: int = 3, *, is_joined: bool = True) -> Membership:
    membership = Membership(num_workers=num_workers, failure_timeout_s=TIMEOUT_S, startup_timeout_s=60.0)
    for index in range(num_workers):
        expect(membership, index, 0.0)
        if is_joined:
            join(membership, index, 0.0)
    return membership


def expect(membership: Membership, index: int, now_s: float) -> None:
    """Ask for a process for a worker."""
    membership.expect(MemberRecord(index=index, number=index), now_s)


def join(membership: Membership, index: int, now_s: float) -> None:
    membership.join(membership.of(index), 1, now_s)


def account(index: int, reason: str = "raised ValueError: x", *, lost: bool = False, step: int = 7, at_s: float = 1.0):
    return FailureReport(index, step, reason, "Traceback …", is_consequence=lost, at_s=at_s)


def silent(membership: Membership, now_s: float, **looks: Callable[[int], bool]) -> list[int]:
    return [record.index for record in membership.check_silence(now_s, **looks)]


# Joining and ending -----------------------------------------------------------------------------------------


def test_the_first_generation_waits_for_all() -> None:
    membership = team(2, is_joined=False)
    join(membership, 0, 1.0)
    membership.wait(0, -1, has_dropped=False)
    assert membership.next_members() is None
    join(membership, 1, 2.0)
    assert membership.next_members() is None
    membership.wait(1, -1, has_dropped=False)
    assert membership.next_members() == [0, 1]
    membership.form([0, 1])
    assert membership.generation == 1 and membership.is_complete and not membership.is_over
    assert membership.next_members() is None


def test_over_when_all_have_said_goodbye() -> None:
    membership = team(2)
    membership.finish(0)
    assert not membership.is_over
    membership.finish(1)
    assert membership.is_over
    for index, code in ((0, 0), (1, 1)):  # how the processes then end is of no interest
        membership.exit(index, f"exited with code {code}", 3.0)
    assert membership.is_over and membership.first_failure(100.0) is None


def test_a_run_whose_workers_are_all_gone_is_not_over_but_failed() -> None:
    membership = team(2)
    for index in range(2):
        membership.exit(index, "exited with code 0", 1.0)
    assert not membership.is_over
    assert membership.first_failure(1.0 + 2 * CAUSE_WAIT_S) is not None


# Causes and consequences ------------------------------------------------------------------------------------


def test_an_account_of_a_cause_is_reported_at_once() -> None:
    membership = team()
    membership.report(account(1))
    found = membership.first_failure(1.0)
    assert found is not None and found.describe() == "worker 1 raised ValueError: x (in step 8)"


def test_the_earliest_cause_is_reported() -> None:
    membership = team()
    membership.report(account(2, at_s=1.2))
    membership.report(account(0, at_s=1.1))
    found = membership.first_failure(2.0)
    assert found is not None and found.worker_index == 0


def test_consequences_wait_for_their_cause() -> None:
    membership = team()
    membership.report(account(0, LOST, lost=True, at_s=1.0))
    membership.report(account(2, LOST, lost=True, at_s=1.1))
    assert membership.first_failure(1.2) is None
    membership.report(account(1, at_s=1.3))
    found = membership.first_failure(1.3)
    assert found is not None and found.worker_index == 1


def test_a_consequence_is_reported_when_no_cause_is_ever_heard_of() -> None:
    membership = team()
    membership.report(account(0, LOST, lost=True, at_s=1.0))
    assert membership.first_failure(1.0 + TIMEOUT_S) is None
    found = membership.first_failure(1.0 + TIMEOUT_S + 2 * CAUSE_WAIT_S)
    assert found is not None and found.reason == LOST


def test_with_nobody_left_there_is_no_use_in_waiting_for_a_cause() -> None:
    """Every worker failed to form the group, say: what they all say is the reason."""
    membership = team(2)
    for index in range(2):
        membership.report(account(index, "raised CommunicationError: /dev/shm is too small", lost=True, at_s=1.0))
        membership.exit(index, "exited with code 1", 1.1)
    found = membership.first_failure(1.0 + 2 * CAUSE_WAIT_S)
    assert found is not None and "too small" in found.reason


def test_an_exit_waits_for_the_workers_own_account() -> None:
    membership = team()
    membership.exit(1, "exited with code 1", 1.0)
    assert membership.first_failure(1.1) is None
    membership.report(account(1, at_s=1.2))
    found = membership.first_failure(1.2)
    assert found is not None and found.reason == "raised ValueError: x"


def test_an_exit_without_an_account_is_reported_as_such() -> None:
    membership = team()
    membership.exit(1, "exited with code 3", 1.0)
    found = membership.first_failure(1.0 + 2 * CAUSE_WAIT_S)
    assert found is not None and found.describe().startswith("worker 1 exited with code 3")


def test_the_first_account_of_a_worker_counts() -> None:
    membership = team()
    membership.report(account(1, "raised ValueError: first"))
    membership.report(account(1, "raised ValueError: second"))
    membership.exit(1, "was killed by SIGTERM", 1.5, is_killed=True)
    found = membership.first_failure(2.0)
    assert found is not None and "first" in found.reason


# Generations --------------------------------------------------------------------------------------------------


def trained(num_workers: int = 3, *, is_elastic: bool = True, **settings: int) -> Membership:
    """A team in its first generation."""
    membership = team(num_workers)
    membership.is_elastic = is_elastic
    for key, value in settings.items():
        setattr(membership, key, value)
    for index in range(num_workers):
        membership.wait(index, -1, has_dropped=False)
    membership.form(list(range(num_workers)))
    return membership


def test_survivors_go_on_without_the_lost_one_and_the_furthest_leads() -> None:
    membership = trained(3)
    membership.exit(0, "was killed by SIGKILL", 2.0, is_killed=True)
    membership.wait(1, 7, has_dropped=True)
    assert membership.next_members() is None, "one is still in the step"
    membership.wait(2, 8, has_dropped=False)
    assert membership.next_members() == [2, 1]
    (loss,) = membership.take_losses()
    assert loss.worker_index == 0 and membership.take_losses() == []
    assert membership.first_failure(100.0) is None, "a loss is not a failure"


def test_a_replacement_joins_when_it_is_ready_and_not_before() -> None:
    membership = trained(2)
    membership.exit(0, "was killed by SIGKILL", 2.0, is_killed=True)
    expect(membership, 0, 2.0)
    membership.wait(1, 7, has_dropped=True)
    assert membership.next_members() == [1], "it is not waited for"
    membership.form([1])
    join(membership, 0, 3.0)
    assert not membership.needs_pause
    membership.wait(0, -1, has_dropped=False)
    assert membership.needs_pause and membership.next_members() is None
    membership.wait(1, 9, has_dropped=False)
    assert membership.next_members() == [1, 0]


def test_without_a_survivor_all_are_waited_for() -> None:
    membership = trained(2)
    for index in range(2):
        membership.exit(index, "was killed by SIGKILL", 2.0, is_killed=True)
        expect(membership, index, 2.0)
    join(membership, 0, 3.0)
    membership.wait(0, -1, has_dropped=False)
    assert membership.next_members() is None
    join(membership, 1, 3.0)
    membership.wait(1, -1, has_dropped=False)
    assert membership.next_members() == [0, 1]


def test_strategies_that_need_everybody_wait_for_everybody() -> None:
    membership = trained(2, is_elastic=False)
    membership.exit(0, "was killed by SIGKILL", 2.0, is_killed=True)
    membership.wait(1, 7, has_dropped=True)
    assert membership.next_members() is None and membership.is_too_small


def test_too_few_do_not_go_on() -> None:
    membership = trained(3, min_workers=3)
    membership.exit(0, "was killed by SIGKILL", 2.0, is_killed=True)
    for index in (1, 2):
        membership.wait(index, 7, has_dropped=True)
    assert membership.next_members() is None and membership.is_too_small


def test_workers_of_other_hosts_go_on_when_none_of_the_runs_own_is_left() -> None:
    membership = team(2)
    membership.is_elastic = True
    membership.expect(MemberRecord(index=2, is_remote=True, host_id="another"), 0.0)
    join(membership, 2, 0.0)
    membership.form([0, 1, 2])
    for index in (0, 1):
        membership.exit(index, "was killed by SIGKILL", 1.0, is_killed=True)
    assert [loss.worker_index for loss in membership.take_losses()] == [0, 1] and not membership.is_too_small
    membership.wait(2, 7, has_dropped=True)
    assert membership.next_members() == [2]
    membership.form([2])
    membership.exit(2, "is out of reach", 2.0, is_killed=True)
    assert membership.is_too_small and membership.next_members() is None


def test_a_worker_of_the_runs_own_host_leads_one_of_another_that_is_further() -> None:
    membership = team(1)
    membership.is_elastic = True
    membership.expect(MemberRecord(index=1, is_remote=True, host_id="another"), 0.0)
    join(membership, 1, 0.0)
    membership.wait(0, 6, has_dropped=False)
    membership.wait(1, 7, has_dropped=False)
    assert membership.next_members() == [0, 1]


def test_members_of_one_host_are_side_by_side() -> None:
    membership = team(5)
    for index, host in enumerate("abbac"):
        membership.of(index).host_id = host
        membership.wait(index, 7 if index == 3 else 6, has_dropped=False)
    assert membership.next_members() == [3, 0, 1, 2, 4]
    assert membership.has_other_hosts(4) and not team(2).has_other_hosts(0)


def test_too_few_of_other_hosts_do_not_go_on() -> None:
    membership = team(1)
    membership.is_elastic, membership.min_workers = True, 2
    membership.expect(MemberRecord(index=1, is_remote=True, host_id="another"), 0.0)
    join(membership, 1, 0.0)
    membership.form([0, 1])
    membership.exit(0, "was killed by SIGKILL", 1.0, is_killed=True)
    membership.wait(1, 7, has_dropped=True)
    assert membership.is_too_small and membership.next_members() is None
    membership.min_workers = 1  # those that are left are to save and end
    assert membership.next_members() == [1]


def test_who_wants_to_leave_pauses_the_others_and_is_left_out() -> None:
    membership = trained(3)
    membership.of(1).is_leaving = True
    assert membership.needs_pause
    for index in range(3):
        membership.wait(index, 5, has_dropped=False)
    assert membership.next_members() == [0, 2]
    membership.finish(1)
    membership.exit(1, "exited with code 0", 3.0)
    assert membership.first_failure(100.0) is None and membership.take_losses() == []


def test_who_alone_has_the_weights_leaves_when_another_has_them() -> None:
    membership = trained(2)
    membership.exit(1, "was killed by SIGKILL", 2.0, is_killed=True)
    expect(membership, 1, 2.0)
    membership.wait(0, 5, has_dropped=True, reason="worker 1 died")
    membership.of(0).is_leaving = True
    assert membership.dispensable == [] and membership.next_members() == [0]
    membership.form([0])
    assert not membership.needs_pause, "its heir is on the way: it trains on"
    join(membership, 1, 3.0)
    membership.wait(1, -1, has_dropped=False)
    assert membership.needs_pause
    membership.wait(0, 9, has_dropped=False)
    assert membership.dispensable == [] and membership.next_members() == [0, 1]
    membership.form([0, 1])
    assert membership.needs_pause
    for index in (0, 1):
        membership.wait(index, 10, has_dropped=False)
    assert membership.dispensable == [0] and membership.next_members() == [1]


def test_one_that_is_a_step_ahead_leaves_when_the_others_have_taken_it() -> None:
    membership = trained(3)
    membership.exit(2, "was killed by SIGKILL", 2.0, is_killed=True)
    membership.of(0).is_leaving = True
    for index, step in ((0, 8), (1, 7)):
        membership.wait(index, step, has_dropped=index == 1, reason="worker 2 died")
    assert membership.dispensable == [] and membership.next_members() == [0, 1]


def test_a_generation_that_lost_a_member_is_broken_until_the_next() -> None:
    membership = trained(3)
    assert membership.why_broken == ""
    membership.exit(2, "was killed by SIGKILL", 2.0, is_killed=True)
    assert membership.why_broken == "worker 2 was killed by SIGKILL"
    for index in (0, 1):
        membership.wait(index, 5, has_dropped=True, reason="worker 2 died")
    membership.form([0, 1])
    assert membership.why_broken == ""
    membership.wait(1, 5, has_dropped=False, reason="no shared memory")
    assert membership.why_broken == "worker 1: no shared memory"


def test_a_death_after_the_last_step_of_all_is_no_loss() -> None:
    membership = trained(2)
    membership.finish(0)
    membership.exit(1, "was killed by SIGKILL", 2.0, is_killed=True)
    assert membership.take_losses() == [] and membership.is_over


def test_who_comes_when_the_run_is_over_is_sent_home() -> None:
    membership = trained(2)
    expect(membership, 2, 1.0)
    assert membership.drop_late() == []
    membership.finish(0)
    assert membership.drop_late() == [2] and not membership.is_over
    membership.finish(1)
    assert membership.is_over


# Restarts ---------------------------------------------------------------------------------------------------


def test_replacements_are_counted() -> None:
    restarts = Restarts(max_restarts=2)
    assert [restarts.may_replace() for _ in range(3)] == [True, True, False]


def test_a_step_that_is_lost_again_and_again_ends_the_run() -> None:
    restarts = Restarts(max_restarts=100)
    loss = FailureReport(1, 4, "was killed by SIGSEGV")
    assert [restarts.recover(step, [loss]) for step in (3, 4, 4)] == [None, None, None]
    assert restarts.recover(4, [loss]) == (
        "a worker was lost in each of 3 attempts at step 5; last worker 1 was killed by SIGSEGV"
    )
    assert restarts.recover(5, [loss]) is None, "it went on after all"


def test_a_team_that_never_meets_ends_the_run() -> None:
    restarts = Restarts(max_restarts=100)
    assert [restarts.recover(-1, [], "no memory") for _ in range(2)] == [None, None]
    assert restarts.recover(-1, [], "no memory") == "the team could not take step 1 in 3 attempts: no memory"


# Silence ----------------------------------------------------------------------------------------------------


def test_a_silent_member_is_called_frozen_after_the_failure_timeout() -> None:
    membership = team(2)
    membership.record_heartbeat(0, 4.0)
    assert silent(membership, TIMEOUT_S) == []
    assert silent(membership, TIMEOUT_S + 0.1) == [1]
    assert silent(membership, TIMEOUT_S + 0.2) == []  # it is being killed
    membership.exit(1, "was killed by SIGKILL", TIMEOUT_S + 0.3, is_killed=True)
    (loss,) = membership.take_losses()
    assert "worker 1 is frozen: no sign of life for 5.1 s" in loss.describe()


def test_a_member_that_is_computing_has_as_much_time_again() -> None:
    membership = team(1)
    assert silent(membership, 6.0, is_working=lambda pid: True) == []
    assert silent(membership, 10.0, is_working=lambda pid: False) == []
    assert silent(membership, 11.1, is_working=lambda pid: False) == [0]


def test_a_worker_that_starts_has_more_time() -> None:
    membership = team(1, is_joined=False)
    assert silent(membership, 59.0) == []
    assert silent(membership, 61.0) == [0]
    assert "did not start" in membership.of(0).loss_reason


def test_a_process_that_is_stopped_while_it_starts_is_not_waited_for() -> None:
    membership = team(2, is_joined=False)
    for pid, record in enumerate(membership.records.values()):
        record.pid = pid
    assert silent(membership, 4.0, is_stopped=lambda pid: True) == []
    assert silent(membership, 6.0, is_stopped=lambda pid: pid == 1) == [1]
    assert membership.of(1).loss_reason == "is frozen: no sign of life for 6.0 s"


def test_who_has_ended_may_be_silent() -> None:
    membership = team(2)
    membership.finish(0)
    membership.exit(1, "was killed by SIGKILL", 1.0, is_killed=True)
    assert silent(membership, 1000.0) == []


def test_a_late_heartbeat_does_not_turn_the_steps_back() -> None:
    membership = team(1)
    membership.record_heartbeat(0, 1.0, step=9)
    membership.record_heartbeat(0, 2.0, step=8)
    assert membership.of(0).step == 9
