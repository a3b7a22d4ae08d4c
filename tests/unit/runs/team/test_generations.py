"""What workers of a team are told, decided from what is known of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cordee.cluster.members import MemberRecord
from cordee.cluster.policies import Restarts
from cordee.cluster.rendezvous import COULD_NOT_FORM
from cordee.monitoring.events import Generation
from cordee.runs.team.generations import Generations
from cordee.runs.team.membership import Membership
from cordee.runs.team.recoveries import Recoveries
from cordee.runs.team.state import DirectiveState, RecoveryState


@pytest.mark.parametrize(("hosts", "left"), [("abb", [1, 2]), ("abc", [1, 2]), ("aab", [2])])
def test_hosts_that_cannot_connect_to_each_other_leave_and_one_goes_on(hosts: str, left: list[int]) -> None:
    membership = Membership(num_workers=1, failure_timeout_s=5.0, is_elastic=True)
    for index, host in enumerate(hosts):
        record = membership.expect(MemberRecord(index=index, host=host, host_id=host), 0.0)
        membership.join(record, 1, 0.0)
        membership.form([index])
    for index in range(len(hosts)):
        membership.wait(index, 7, has_dropped=False, reason=f"generation-2 {COULD_NOT_FORM}")
    told: list[Any] = []
    generations = Generations(
        SimpleNamespace(emit=lambda event: None, should_stop=lambda: False),  # type: ignore[arg-type]
        SimpleNamespace(members=membership, direct=lambda *directive: told.append(directive)),  # type: ignore[arg-type]
        SimpleNamespace(is_reform_wanted=False),  # type: ignore[arg-type]
        SimpleNamespace(check_shortage=lambda: None, end_reason=None),  # type: ignore[arg-type]
        Recoveries(RecoveryState(restarts=Restarts(3))),
        DirectiveState(),
    )
    assert not generations.direct()
    stays = [index for index in range(len(hosts)) if index not in left]
    assert membership.active == stays and membership.next_members() == stays
    assert [directive[:2] for directive in told if directive[0] == "leave"] == [("leave", left)]


@pytest.mark.parametrize(("is_elastic", "step"), [(True, 7), (False, None)])
def test_a_team_whose_model_is_split_loads_what_was_saved(is_elastic: bool, step: int | None) -> None:
    """After an error that nobody was lost over: its workers have parts that are of no use in another team."""
    membership = Membership(num_workers=2, failure_timeout_s=5.0, is_elastic=is_elastic)
    for index in range(2):
        membership.join(membership.expect(MemberRecord(index=index, host_id="a"), 0.0), 1, 0.0)
    membership.form([0, 1])
    for index in range(2):
        membership.wait(index, 7, has_dropped=True, reason="a connection broke")
    emitted: list[Any] = []
    generations = Generations(
        SimpleNamespace(emit=emitted.append, should_stop=lambda: False),  # type: ignore[arg-type]
        SimpleNamespace(  # type: ignore[arg-type]
            members=membership, direct=lambda *directive: None, form=lambda members, threads: membership.form(members)
        ),
        SimpleNamespace(is_reform_wanted=False, threads=0, record_formed=lambda: None),  # type: ignore[arg-type]
        SimpleNamespace(check_shortage=lambda: None, end_reason=None),  # type: ignore[arg-type]
        Recoveries(RecoveryState(restarts=Restarts(3))),
        DirectiveState(),
    )
    assert generations.direct()
    assert [event.step for event in emitted if isinstance(event, Generation)] == [step]


def test_who_says_again_that_it_leaves_stays_until_the_others_have_saved() -> None:
    """A worker that was told to leave says so with each heartbeat, also while the run is ending for that reason."""
    membership = Membership(num_workers=2, failure_timeout_s=5.0, is_elastic=False)
    for index in range(2):
        membership.join(membership.expect(MemberRecord(index=index, host_id="a"), 0.0), 1, 0.0)
    membership.form([0, 1])
    told: list[Any] = []
    ends: list[str] = []
    losses = SimpleNamespace(check_shortage=lambda: None, end_reason=None, end_early=ends.append)
    generations = Generations(
        SimpleNamespace(emit=lambda event: None, should_stop=lambda: False),  # type: ignore[arg-type]
        SimpleNamespace(  # type: ignore[arg-type]
            members=membership,
            direct=lambda *directive: told.append(directive[:2]),
            form=lambda members, threads: membership.form(members),
        ),
        SimpleNamespace(is_reform_wanted=False, threads=0, record_formed=lambda: None),  # type: ignore[arg-type]
        losses,  # type: ignore[arg-type]
        Recoveries(RecoveryState(restarts=Restarts(3))),
        DirectiveState(),
    )

    def halt(step: int) -> None:
        membership.of(1).is_leaving = True
        for index in range(2):
            membership.wait(index, step, has_dropped=False)

    halt(11)
    assert generations.direct(), "they continue, to be told to stop"
    assert len(ends) == 1
    losses.end_reason = ends[0]
    generations.direct()
    assert told == [("stop", [0, 1])]
    halt(12)
    generations.direct()
    assert told == [("stop", [0, 1]), ("finish", [0, 1])]
