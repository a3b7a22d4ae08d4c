"""Recoveries of a team, and what its coordinator writes down."""

from __future__ import annotations

import msgspec

from cordee.cluster.coordinator import Addresses
from cordee.cluster.members import MemberRecord
from cordee.cluster.policies import FailureReport, Restarts, Shortage
from cordee.communication.messages import Directive
from cordee.runs.team.membership import Membership
from cordee.runs.team.recoveries import Recovered, Recoveries
from cordee.runs.team.state import LossState, RecoveryState, TeamState, WorkersState


def recoveries(trained: list[int]) -> Recoveries:
    return Recoveries(RecoveryState(restarts=Restarts(max_restarts=9), trained=trained))


def test_losses_before_the_next_step_are_one_recovery() -> None:
    found = recoveries([0, 1, 2])
    found.take(FailureReport(1, 4, "was killed", at_s=10.0), is_external=False)
    assert found.begin(MemberRecord(index=0, ready_step=4, has_dropped=True), "", 5, now_s=11.0) is None
    found.take(FailureReport(2, 4, "was killed", at_s=12.0), is_external=False)
    assert found.begin(MemberRecord(index=0, ready_step=3), "", 5, now_s=13.0) is None
    assert found.is_under_way and found.last_loss is None
    assert found.complete(4, [0], now_s=15.0) == Recovered(lost=[1, 2], seconds=5.0, steps_redone=2)
    assert found.complete(5, [0], now_s=16.0) is None, "it is complete"
    assert found.trained == [0]


def test_a_guest_that_never_took_part_leaves_nothing_to_recover_from() -> None:
    found = recoveries([0, 1])
    found.take(FailureReport(2, 0, "ended without notice"), is_external=True)
    assert found.last_loss is None
    found.take(FailureReport(1, 0, "ended without notice"), is_external=True)
    assert found.last_loss is not None and found.last_loss.worker_index == 1


def test_a_team_that_is_lost_in_the_same_step_again_and_again_gives_up() -> None:
    found = recoveries([0, 1])
    problems = []
    for at_s in (1.0, 2.0, 3.0):
        found.take(FailureReport(1, 4, "was killed by SIGKILL", at_s=at_s), is_external=False)
        problems.append(found.begin(MemberRecord(index=0, ready_step=4), "", 4, now_s=at_s))
    assert problems == [
        None, None, "a worker was lost in each of 3 attempts at step 5; last worker 1 was killed by SIGKILL"
    ]  # fmt: skip


def test_what_a_coordinator_knows_survives_being_written_down() -> None:
    membership = Membership(
        num_workers=2, failure_timeout_s=5.0, is_elastic=True, failures=[FailureReport(0, 4, "raised")]
    )
    answer = Directive("new_generation", generation=1, answers=1)
    for record in (
        MemberRecord(index=0, number=0, started=7, pid=10, phase="member", incarnation=9, fenced=8, answer=answer),
        MemberRecord(index=2, pid=12, is_remote=True, is_away=True, phase="gone", loss_reason="is out of reach"),
    ):
        membership.expect(record, 3.5)
    workers = WorkersState(threads=2)
    state = TeamState(
        addresses=Addresses("tcp://127.0.0.1:1"),
        membership=membership,
        workers=workers,
        recoveries=RecoveryState(restarts=Restarts(3, num_restarts=1), lost=[FailureReport(1, 4, "was killed")]),
        losses=LossState(shortage=Shortage("too few", 12.5)),
    )
    Recoveries(state.recoveries).begin(MemberRecord(index=0, ready_step=4), "", 4, now_s=1.0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=TeamState) == state
