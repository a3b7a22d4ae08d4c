"""The agents of a run: whom the launcher believes, where processes go, and what follows when one is lost."""

from __future__ import annotations

import msgspec
import pytest

from cordee.cluster.engine import Exited, ProcessSpec, Started, Working
from cordee.cluster.engines import ENGINES, find_engine, is_of_this_host
from cordee.cluster.engines.agent_messages import Activity, AgentOrder, AgentStatus, Enrol, Versions
from cordee.cluster.engines.agents import APART_S, MOST_FAILURES, Agents
from cordee.core.errors import JobError

TIMEOUT_S = 5.0


def order(number: int, ticket: str = "") -> AgentOrder:
    return AgentOrder(
        number=number,
        run="run",
        address="tcp://127.0.0.1:1",
        server_key="00",
        ticket=ticket or f"ticket {number}",
        failure_timeout_s=TIMEOUT_S,
    )


def enrol(number: int, host: str = "a", ticket: str = "", versions: Versions | None = None) -> Enrol:
    return Enrol(number, ticket or f"ticket {number}", 100 + number, host, host, versions or Versions.here())


def team(*hosts: str) -> Agents:
    """Agents that are there, one for each of these hosts."""
    agents = Agents(TIMEOUT_S)
    for number, host in enumerate(hosts):
        agents.order(order(number))
        assert agents.enrol(enrol(number, host), f"key {number}", 0.0) == ""
    return agents


def spec(index: int, incarnation: int = 1) -> ProcessSpec:
    return ProcessSpec(index=index, incarnation=incarnation, target="a:b", argument={})


def test_a_ticket_is_good_for_one_key() -> None:
    agents = Agents(TIMEOUT_S)
    agents.order(order(0))
    assert "not one of this run" in agents.enrol(enrol(0, ticket="another"), "key", 0.0)
    assert "not one of this run" in agents.enrol(enrol(1), "key", 0.0)
    assert agents.present == []
    assert agents.enrol(enrol(0), "key", 0.0) == "" == agents.enrol(enrol(0), "key", 1.0), "an answer may be lost"
    assert "used by another agent" in agents.enrol(enrol(0), "another key", 2.0)
    assert agents.of_key("key") is agents.records[0] and agents.of_key("another key") is None


def test_an_agent_of_another_version_is_refused_with_both() -> None:
    agents = Agents(TIMEOUT_S)
    agents.order(order(0))
    other = msgspec.structs.replace(Versions.here(), torch="1.0", python="2.7")
    problem = agents.enrol(enrol(0, "far", versions=other), "key", 0.0)
    assert "far has" in problem and "torch 1.0" in problem and "Python 2.7" in problem
    assert Versions.here().describe() in problem and "install the same versions" in problem


def test_orders_survive_being_copied_and_are_refused_when_cut() -> None:
    text = order(3).to_text()
    assert AgentOrder.from_text(f" {text}\n") == order(3)
    for damaged in ("", text[:-8], text[:20] + "!" + text[21:], "e30="):
        with pytest.raises(JobError, match="ticket is damaged"):
            AgentOrder.from_text(damaged)


def test_processes_go_to_agents_that_have_none_neighbours_first() -> None:
    agents = team("a", "b", "b")
    for index in range(4):
        agents.ask(spec(index), 0.0)
    placed = [(record.order.number, process.index) for record, process in agents.place(0.0)]
    assert placed == [(1, 0), (0, 1), (2, 2)] and list(agents.queue) == [3]
    assert agents.find_lacking(0.0) == 1, "one more agent is needed"
    agents.order(order(3))
    assert agents.find_lacking(0.0) == 0, "it is on its way"
    assert agents.enrol(enrol(3, "c"), "key 3", 0.0) == ""
    assert [(record.order.number, process.index) for record, process in agents.place(0.0)] == [(3, 3)]


def beside(index: int, apart: str = "") -> ProcessSpec:
    return msgspec.structs.replace(spec(index), place="beside", apart=apart)


def hosts_of(agents: Agents, now_s: float) -> dict[int, str]:
    return {process.index: record.host_id for record, process in agents.place(now_s)}


def test_processes_without_a_slot_are_spread_over_hosts_and_leave_slots_free() -> None:
    agents = team("a", "a", "b")
    for index in range(4):
        agents.ask(beside(index, f"server {index}"), 0.0)
    agents.ask(spec(4), 0.0)
    placed = hosts_of(agents, 0.0)
    assert sorted(placed[index] for index in range(4)) == ["a", "a", "b", "b"]
    on_a = [len(record.processes) for record in agents.present if record.host_id == "a"]
    assert placed[4] == "a" and sorted(on_a) == [1, 2], "one beside each, and the worker"
    assert agents.find_lacking(0.0) == 0
    for index in (5, 6):
        agents.ask(spec(index), 0.0)
    assert len(hosts_of(agents, 0.0)) == 2, "every slot takes a worker"


def test_processes_without_a_slot_wait_for_the_agents_of_the_start() -> None:
    agents = team("a")
    agents.order(order(1))
    agents.ask(beside(0), 0.0)
    assert hosts_of(agents, TIMEOUT_S - 0.1) == {} and agents.find_lacking(0.0) == 0
    assert hosts_of(agents, TIMEOUT_S) == {0: "a"}, "who has not come by now may never come"
    agents.ask(beside(1), TIMEOUT_S)
    assert hosts_of(agents, TIMEOUT_S) == {1: "a"}


def test_without_any_agent_one_is_asked_for_all_processes_without_a_slot() -> None:
    agents = Agents(TIMEOUT_S)
    for index in range(3):
        agents.ask(beside(index), 0.0)
    assert hosts_of(agents, 0.0) == {} and agents.find_lacking(0.0) == 1
    agents.order(order(0))
    assert agents.find_lacking(0.0) == 0, "it is on its way"


def test_replicas_are_kept_apart_as_long_as_another_host_may_come() -> None:
    agents = team("a", "b")
    for index in range(2):
        agents.ask(beside(index, "server 0"), 0.0)
    assert sorted(hosts_of(agents, 0.0).values()) == ["a", "b"]
    late_s = 2 * TIMEOUT_S
    lost = next(record for record in agents.present if record.host_id == "b")
    agents.lose(lost, "its host died", late_s)
    agents.ask(beside(2, "server 0"), late_s)
    assert hosts_of(agents, late_s) == {}, "a worker was lost as well: another host may be asked for at once"
    agents.order(order(2))
    assert hosts_of(agents, late_s + 10 * APART_S) == {}, "it is on its way"
    assert agents.enrol(enrol(2, "c"), "key 2", late_s + 20 * APART_S) == ""
    assert hosts_of(agents, late_s + 20 * APART_S) == {2: "c"}


def test_replicas_share_the_only_host() -> None:
    agents = team("a")
    for index in range(2):
        agents.ask(beside(index, "server 0"), 0.0)
    assert list(hosts_of(agents, 0.0)) == [0] and hosts_of(agents, APART_S) == {1: "a"}


def test_reports_of_what_an_agent_does_not_have_are_passed_over() -> None:
    agents = team("a", "b")
    agents.ask(spec(0), 0.0)
    ((record, _),) = agents.place(0.0)
    other = agents.records[1]
    assert agents.take(other, Exited(0, 1, 7, -9)) is None and agents.take(record, Exited(0, 2, 7, -9)) is None
    assert agents.take(record, Started(0, 1, 7, "a")) == Started(0, 1, 7, "a")
    assert agents.take(record, Exited(0, 1, 7, 3)) == Exited(0, 1, 7, 3) and not record.processes
    assert agents.take(record, Exited(0, 1, 7, 3)) is None


def test_signals_are_for_the_newest_process_of_an_index() -> None:
    """The end of the one before is heard of later, where its host is frozen."""
    agents = team("a", "b")
    for incarnation in (1, 2):
        agents.ask(spec(0, incarnation), 0.0)
        agents.place(0.0)
    assert agents.holder(0) is agents.records[1]
    agents.take(agents.records[0], Exited(0, 1, 7, -9))
    assert agents.holder(0) is agents.records[1] and agents.holder(1) is None


def test_the_processes_of_a_silent_agent_are_lost_with_it() -> None:
    agents = team("a", "b")
    agents.ask(spec(0), 0.0)
    agents.ask(spec(1), 0.0)
    placed = {process.index: record for record, process in agents.place(0.0)}
    placed[1].heard_s = 3.0
    assert agents.silent(TIMEOUT_S) == [] and agents.silent(TIMEOUT_S + 0.1) == [placed[0]]
    (lost,) = agents.lose(placed[0], "it is silent", 6.0)
    assert (lost.index, lost.status, lost.describe()) == (0, -9, "was lost with its agent: it is silent")
    assert lost.lost_with == f"agent {placed[0].order.number}"
    assert agents.lose(placed[0], "again", 7.0) == [] and agents.present == [placed[1]]
    assert "was given up: it is silent" in agents.enrol(enrol(placed[0].order.number), placed[0].key, 8.0)


def test_activity_tells_the_busy_from_the_stopped() -> None:
    agents = team("a")
    agents.ask(spec(0), 0.0)
    ((record, _),) = agents.place(0.0)

    def look(processor_s: float, is_stopped: bool = False) -> list[Working]:
        return agents.take_activity(record, AgentStatus(0, 1, (), (Activity(0, 1, processor_s, is_stopped),)))

    assert look(1.0) == [Working(0, 1, True, False)]
    assert look(1.0, True) == [Working(0, 1, False, True)]
    assert agents.take_activity(record, AgentStatus(0, 1, (), (Activity(9, 1, 1.0, False),))) == []


def test_agents_that_do_not_come_are_asked_for_ever_more_seldom() -> None:
    agents = Agents(TIMEOUT_S)
    agents.ask(spec(0), 0.0)
    now_s = 0.0
    for attempt in range(MOST_FAILURES):
        assert agents.find_lacking(now_s) == 1 and not agents.is_hopeless
        agents.order(order(attempt))
        agents.lose(agents.records[attempt], "no room", now_s)
        assert agents.find_lacking(now_s) == 0, "not at once"
        now_s += 2.0**attempt
    assert agents.is_hopeless, "nothing runs"
    agents.order(order(9))
    assert agents.enrol(enrol(9), "key", now_s) == "" and not agents.is_hopeless


def test_engines_by_name() -> None:
    assert is_of_this_host("local") and not is_of_this_host("agents")
    assert all(entry.summary for entry in ENGINES.values())
    with pytest.raises(JobError, match=r"there is no engine 'locl'.*'local'"):
        find_engine("locl")
    with pytest.raises(JobError, match=r"there is no engine 'Slurm': use the engine 'env'"):
        find_engine("Slurm")


def test_a_spare_takes_a_process_at_once_and_is_asked_for_again() -> None:
    agents = Agents(TIMEOUT_S, num_spares=1)
    for number in range(3):
        agents.order(order(number))
        assert agents.find_lacking(0.0) == 0, "those of the start are on their way"
    for number, host in enumerate("abc"):
        agents.enrol(enrol(number, host), f"key {number}", 0.0)
    for index in range(2):
        agents.ask(spec(index), 0.0)
    agents.place(0.0)
    assert agents.find_lacking(0.0) == 0
    agents.lose(agents.records[0], "its node died", 1.0)
    agents.ask(spec(0, 2), 1.0)
    ((record, _),) = agents.place(1.0)
    assert record.order.number == 2
    assert agents.find_lacking(1.0) == 1, "another spare"
    agents.order(order(3))
    assert agents.find_lacking(1.0) == 0 and agents.find_lacking(1e6) == 0, "it may never come"


def test_a_spare_that_does_not_come_holds_up_nobody() -> None:
    agents = Agents(TIMEOUT_S, num_spares=1)
    for number in range(2):
        agents.order(order(number))
    agents.enrol(enrol(0, "a"), "key 0", 0.0)
    for index in range(2):
        agents.ask(msgspec.structs.replace(spec(index), place="beside", apart="server"), 0.0)
    assert len(agents.place(0.0)) == 1, "the second waits for another host"
    assert len(agents.place(APART_S)) == 1, "not for ever"
