"""The collectives' steps among members in one process; slots of one page make every size travel in chunks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from segment_members import make_teams, run_members

from cordee.communication.shared_memory import collectives
from cordee.communication.shared_memory.backend import HostTeam
from cordee.communication.shared_memory.collectives import Reduction
from cordee.communication.shared_memory.execution import CollectiveExecutor
from cordee.core.errors import CommunicationError


@pytest.fixture(params=[1, 2, 3, 5])
def teams(request: pytest.FixtureRequest) -> Iterator[list[HostTeam]]:
    made = make_teams(request.param)
    yield made
    for team in made:
        team.close()


def conduct(team: HostTeam) -> CollectiveExecutor:
    return CollectiveExecutor(team.host.rounds, timeout_s=20, patience_s=0.01, name="test")


@pytest.mark.parametrize("count", [0, 1, 1000, 1024, 1025, 50_000])
def test_all_reduce_in_chunks(teams: list[HostTeam], count: int) -> None:
    def work(team: HostTeam) -> torch.Tensor:
        data = torch.arange(count, dtype=torch.float32) * (team.host.member + 1)
        plan = collectives.plan_all_reduce(team.host, data.dtype, count, Reduction.SUM)
        conduct(team).run(collectives.all_reduce(team.host, data, plan))
        return data

    factor = sum(range(1, len(teams) + 1))
    for result in run_members(teams, work):
        assert torch.equal(result, torch.arange(count, dtype=torch.float32) * factor)


def test_operations_follow_each_other_in_any_mixture(teams: list[HostTeam]) -> None:
    num_members = len(teams)

    def work(team: HostTeam) -> None:
        host, executor = team.host, conduct(team)
        for turn in range(30):
            root = turn % num_members
            data = torch.full((5000,), host.member + turn, dtype=torch.uint8)
            executor.run(collectives.broadcast(host, data, root))
            assert data.eq(root + turn).all()
            mine = torch.full((3000,), host.member, dtype=torch.uint8)
            outputs = [torch.zeros(3000, dtype=torch.uint8) for _ in range(num_members)]
            executor.run(collectives.all_gather(host, outputs, mine))
            assert all(output.eq(member).all() for member, output in enumerate(outputs))
            total = torch.full((2000,), float(host.member))
            executor.run(collectives.reduce(host, total, Reduction.SUM, root))
            if host.member == root:
                assert total.eq(sum(range(num_members))).all()
            parts = [torch.full((900,), float(member)) for member in range(num_members)]
            share = torch.zeros(900)
            executor.run(collectives.reduce_scatter(host, share, parts, Reduction.MAX))
            assert share.eq(host.member).all()
            executor.run(collectives.barrier(host))

    run_members(teams, work)


def test_all_to_all_with_sizes_that_only_pairs_know(teams: list[HostTeam]) -> None:
    num_members = len(teams)

    def work(team: HostTeam) -> None:
        me = team.host.member
        parts = [torch.full((700 * (me + 2 * other),), me, dtype=torch.uint8) for other in range(num_members)]
        outputs = [torch.zeros(700 * (other + 2 * me), dtype=torch.uint8) for other in range(num_members)]
        conduct(team).run(collectives.all_to_all(team.host, outputs, parts))
        assert all(output.eq(other).all() for other, output in enumerate(outputs))

    run_members(teams, work)


def test_scatter_and_gather(teams: list[HostTeam]) -> None:
    num_members = len(teams)

    def work(team: HostTeam) -> None:
        me, executor = team.host.member, conduct(team)
        parts = [torch.full((9000,), other, dtype=torch.uint8) for other in range(num_members)] if me == 0 else []
        output = torch.zeros(9000, dtype=torch.uint8)
        executor.run(collectives.scatter(team.host, output, parts, 0))
        assert output.eq(me).all()
        outputs = [torch.zeros(9000, dtype=torch.uint8) for _ in range(num_members)] if me == 0 else []
        executor.run(collectives.gather(team.host, outputs, output, 0))
        assert all(kept.eq(other).all() for other, kept in enumerate(outputs))

    run_members(teams, work)


def test_members_that_disagree_are_told_what_each_is_doing() -> None:
    teams = make_teams(2)

    def work(team: HostTeam) -> str:
        count = 10 + team.host.member
        data = torch.ones(count)
        plan = collectives.plan_all_reduce(team.host, data.dtype, count, Reduction.SUM)
        with pytest.raises(CommunicationError) as caught:
            conduct(team).run(collectives.all_reduce(team.host, data, plan))
        return str(caught.value)

    messages = run_members(teams, work)
    assert any(
        "all_reduce(11 × float32, sum) while this rank is in all_reduce(10 × float32, sum)" in m for m in messages
    )
    for team in teams:
        team.close()


def test_a_group_that_failed_refuses_further_calls() -> None:
    teams = make_teams(2)
    executor = conduct(teams[0])
    with pytest.raises(CommunicationError, match=r"rank 1 did not come to barrier within the timeout of 0\.05 s"):
        executor.run(collectives.barrier(teams[0].host), timeout_s=0.05)
    with pytest.raises(CommunicationError, match="can not be used any more after: rank 1 did not come"):
        executor.run(collectives.barrier(teams[0].host))
    for team in teams:
        team.close()


def test_a_member_that_left_is_named() -> None:
    teams = make_teams(2)
    teams[1].close()
    with pytest.raises(CommunicationError, match=r"rank 1 \(process \d+\) has left this process group"):
        conduct(teams[0]).run(collectives.barrier(teams[0].host))
    teams[0].close()


def test_an_asynchronous_operation_is_taken_over_by_a_thread() -> None:
    teams = make_teams(2)
    conductors = [conduct(team) for team in teams]
    work = conductors[0].start(collectives.barrier(teams[0].host), ["result"])
    assert not work.is_completed()
    second = conductors[0].start(collectives.barrier(teams[0].host), [])
    future = work.get_future()
    conductors[1].run(collectives.barrier(teams[1].host))
    assert work.wait()
    assert future.wait() == ["result"]
    assert not second.is_completed()
    conductors[1].run(collectives.barrier(teams[1].host))
    assert second.wait()
    assert second.is_success()
    for team, executor in zip(teams, conductors, strict=True):
        executor.close()
        team.close()
