"""Who is to blame: decided from what is heard, in whatever order it is heard."""

from __future__ import annotations

import itertools

import pytest

from cordee.cluster.membership import SETTLING_S, Membership, Trouble

TIMEOUT_S = 5.0
LOST = "raised CommunicationError: rank 1 died"


def team(num_workers: int = 3, *, is_joined: bool = True) -> Membership:
    membership = Membership(num_workers, TIMEOUT_S, startup_timeout_s=60.0, started_s=0.0)
    for index in range(num_workers if is_joined else 0):
        membership.register(index, 0.0)
    return membership


def account(index: int, reason: str = "raised ValueError: x", *, lost: bool = False, step: int = 7, at_s: float = 1.0):
    return Trouble(index, step, reason, "Traceback …", is_consequence=lost, at_s=at_s)


# Joining and ending -----------------------------------------------------------------------------------------


def test_complete_when_all_have_registered() -> None:
    membership = team(2, is_joined=False)
    membership.register(0, 1.0)
    assert not membership.is_complete
    membership.register(1, 2.0)
    assert membership.is_complete and not membership.is_over


def test_over_when_all_have_said_goodbye() -> None:
    membership = team(2)
    membership.finish(0)
    assert not membership.is_over
    membership.finish(1)
    assert membership.is_over
    for index, code in ((0, 0), (1, 1)):  # how the processes then end is of no interest
        membership.exit(index, f"exited with code {code}", 3.0)
    assert membership.is_over and membership.culprit(100.0) is None


def test_a_run_whose_workers_are_all_gone_is_not_over_but_failed() -> None:
    membership = team(2)
    for index in range(2):
        membership.exit(index, "exited with code 0", 1.0)
    assert not membership.is_over
    assert membership.culprit(1.0 + 2 * SETTLING_S) is not None


# Causes and consequences ------------------------------------------------------------------------------------


def test_an_account_of_a_cause_is_reported_at_once() -> None:
    membership = team()
    membership.report(account(1))
    found = membership.culprit(1.0)
    assert found is not None and found.describe() == "worker 1 raised ValueError: x (in step 8)"


def test_the_earliest_cause_is_reported() -> None:
    membership = team()
    membership.report(account(2, at_s=1.2))
    membership.report(account(0, at_s=1.1))
    found = membership.culprit(2.0)
    assert found is not None and found.worker_index == 0


def test_consequences_wait_for_their_cause() -> None:
    membership = team()
    membership.report(account(0, LOST, lost=True, at_s=1.0))
    membership.report(account(2, LOST, lost=True, at_s=1.1))
    assert membership.culprit(1.2) is None
    membership.exit(1, "was killed by SIGKILL", 1.3, is_killed=True)
    found = membership.culprit(1.3)
    assert found is not None and found.worker_index == 1


def test_a_consequence_is_reported_when_no_cause_is_ever_heard_of() -> None:
    membership = team()
    membership.report(account(0, LOST, lost=True, at_s=1.0))
    assert membership.culprit(1.0 + TIMEOUT_S) is None
    found = membership.culprit(1.0 + TIMEOUT_S + 2 * SETTLING_S)
    assert found is not None and found.reason == LOST


def test_with_nobody_left_there_is_no_use_in_waiting_for_a_cause() -> None:
    """Every worker failed to form the group, say: what they all say is the reason."""
    membership = team(2)
    for index in range(2):
        membership.report(account(index, "raised CommunicationError: /dev/shm is too small", lost=True, at_s=1.0))
        membership.exit(index, "exited with code 1", 1.1)
    found = membership.culprit(1.0 + 2 * SETTLING_S)
    assert found is not None and "too small" in found.reason


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_a_killed_worker_is_blamed_in_whatever_order_things_are_heard(order: tuple[int, ...]) -> None:
    """Two others lose it and exit; their exits may be noticed before their accounts arrive."""
    membership = team()
    news = [
        lambda: membership.exit(1, "was killed by SIGKILL", 2.0, is_killed=True),
        lambda: membership.report(account(0, LOST, lost=True, step=9, at_s=2.0)),
        lambda: membership.report(account(2, LOST, lost=True, step=9, at_s=2.0)),
        lambda: membership.exit(0, "exited with code 1", 2.0),
    ]
    for at in order:
        news[at]()
        found = membership.culprit(2.0)
        assert found is None or found.worker_index == 1
    assert found is not None
    assert found.reason == "was killed by SIGKILL"
    assert found.step == 9, "those who lost it know the step"


def test_an_exit_waits_for_the_workers_own_account() -> None:
    membership = team()
    membership.exit(1, "exited with code 1", 1.0)
    assert membership.culprit(1.1) is None
    membership.report(account(1, at_s=1.2))
    found = membership.culprit(1.2)
    assert found is not None and found.reason == "raised ValueError: x"


def test_an_exit_without_an_account_is_reported_as_such() -> None:
    membership = team()
    membership.exit(1, "exited with code 3", 1.0)
    found = membership.culprit(1.0 + 2 * SETTLING_S)
    assert found is not None and found.describe().startswith("worker 1 exited with code 3")


def test_the_first_account_of_a_worker_counts() -> None:
    membership = team()
    membership.report(account(1, "raised ValueError: first"))
    membership.report(account(1, "raised ValueError: second"))
    membership.exit(1, "was killed by SIGTERM", 1.5, is_killed=True)
    found = membership.culprit(2.0)
    assert found is not None and "first" in found.reason


# Silence ----------------------------------------------------------------------------------------------------


def test_a_silent_member_is_called_frozen_after_the_failure_timeout() -> None:
    membership = team(2)
    membership.hear(0, 4.0)
    assert membership.check_silence(TIMEOUT_S) == []
    assert membership.check_silence(TIMEOUT_S + 0.1) == [1]
    found = membership.culprit(TIMEOUT_S + 2 * SETTLING_S)
    assert found is not None and "worker 1 is frozen: no sign of life for 5.1 s" in found.describe()


def test_a_member_that_is_computing_has_as_much_time_again() -> None:
    membership = team(1)
    assert membership.check_silence(6.0, is_working=lambda index: True) == []
    assert membership.check_silence(10.0, is_working=lambda index: False) == []
    assert membership.check_silence(11.1, is_working=lambda index: False) == [0]


def test_a_worker_that_starts_has_more_time() -> None:
    membership = team(1, is_joined=False)
    assert membership.check_silence(59.0) == []
    assert membership.check_silence(61.0) == [0]
    found = membership.culprit(62.0)
    assert found is not None and "did not start" in found.reason


def test_who_has_ended_may_be_silent() -> None:
    membership = team(2)
    membership.finish(0)
    membership.exit(1, "was killed by SIGKILL", 1.0, is_killed=True)
    assert membership.check_silence(1000.0) == []


def test_a_late_heartbeat_does_not_turn_the_steps_back() -> None:
    membership = team(1)
    membership.hear(0, 1.0, step=9)
    membership.hear(0, 2.0, step=8)
    assert membership.records[0].step == 9
