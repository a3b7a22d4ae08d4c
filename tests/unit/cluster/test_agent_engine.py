"""The engine of agents, with a source of agents that gives none."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from cordee.cluster.engine import Capacity, EngineWaits, ProcessSpec
from cordee.cluster.engines import agent_engine
from cordee.cluster.engines.agent_engine import AgentEngine
from cordee.cluster.engines.agent_messages import AGENT, LIMITS, AgentOrder, Enrol, Enrolled, Versions
from cordee.cluster.engines.agents import AgentEnded, AgentSource, EngineRequest
from cordee.communication.channel import ClientChannel
from cordee.communication.endpoint import Speaker
from cordee.communication.keys import ClientKeys
from cordee.communication.wire import Codec
from cordee.core import Job
from cordee.core.errors import JobError


class _Empty(AgentSource):
    """A cluster that may grow, and does not."""

    def describe(self) -> str:
        return "a cluster of nothing"

    def capacity(self) -> Capacity:
        return Capacity({}, may_grow=True, is_limit=True)

    num_looks = 0

    def start(self, order: AgentOrder) -> None:
        pass

    def look(self) -> None:
        self.num_looks += 1

    def ended(self) -> Sequence[AgentEnded]:
        return ()

    def stop(self, number: int) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[AgentEngine]:
    job = Job.coerce({"model": {"use": "mlp"}, "data": {"use": "iris"}})
    engine = AgentEngine(_Empty(), (), EngineRequest(job=job, num_slots=2))
    yield engine
    engine.close()


def test_that_nobody_gets_a_slot_is_said_once(engine: AgentEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_engine, "LONG_WAIT_S", 0.1)
    for index in range(2):
        engine.start(ProcessSpec.new(index, "a:b", {}))
    found = [report for _ in range(20) for report in engine.reports(0.05) if isinstance(report, EngineWaits)]
    assert [report.how for report in found] == ["2 processes have waited for a slot for 0.1 s (a cluster of nothing)"]
    for index in range(2):
        engine.signal(index, "kill")
    list(engine.reports())
    engine.start(ProcessSpec.new(0, "a:b", {}))
    found = [report for _ in range(20) for report in engine.reports(0.05) if isinstance(report, EngineWaits)]
    assert [report.how for report in found] == ["a process has waited for a slot for 0.1 s (a cluster of nothing)"]


def test_what_was_not_read_yet_is_not_silence(engine: AgentEngine) -> None:
    """As on a machine where the launcher itself gets no processor time."""
    agents, now_s = engine._agents, time.monotonic()
    ticket = agents.records[0].order.ticket
    with engine._lock:
        assert agents.enrol(Enrol(0, ticket, 7, "h", "h", Versions.here()), "key", now_s - 6.0) == ""
        engine._drained_s = now_s - 3.0
        engine._check_agents(now_s)
        assert agents.present, "it may have spoken"
        engine._drained_s = now_s
        engine._check_agents(now_s)
        assert not agents.present


def test_silence_is_seen_beside_many_agents_that_speak(engine: AgentEngine) -> None:
    """With some tens of them there is never a moment in which nothing comes."""

    class Busy:
        close = engine._channel.close
        num_lost = 0

        def receive(self, timeout_s: float) -> Any:
            if not timeout_s:
                return None  # all that has come is read
            time.sleep(0.01)
            return SimpleNamespace(envelope=SimpleNamespace(sender="one of many"), message=None)

        def reply(self, received: Any, message: Any) -> None:
            pass

    since_s = time.monotonic()
    engine._channel = Busy()  # type: ignore[assignment]
    while engine._drained_s <= since_s + 0.5:
        assert time.monotonic() < since_s + 10, "a silent agent would be given up after four timeouts only"
        time.sleep(0.01)


def test_a_connection_that_ends_has_the_source_look(engine: AgentEngine) -> None:
    """The cluster itself takes seconds to notice that a node is gone."""
    order, source = engine._agents.records[0].order, engine._source
    assert isinstance(source, _Empty)
    keys = ClientKeys.new(bytes.fromhex(order.server_key))
    speaker = Speaker(run=engine._run, name="agent-0", incarnation=1)
    channel = ClientChannel(engine._channel.address, speaker, Codec(AGENT, LIMITS), keys)
    enrol = Enrol(0, order.ticket, 7, "h", "h", Versions.here())
    assert isinstance(channel.request(enrol, timeout_s=10.0).message, Enrolled)
    before = source.num_looks
    channel.close()
    deadline_s = time.monotonic() + 10.0
    while source.num_looks == before:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert engine._agents.present, "the connection may come back"


def test_spares_are_asked_for_with_the_workers() -> None:
    job = Job.coerce({"model": {"use": "mlp"}, "data": {"use": "iris"}})
    engine = AgentEngine(_Empty(), (), EngineRequest(job=job, num_slots=2, num_spares=1))
    try:
        assert len(engine._agents.records) == 3
    finally:
        engine.close()


def test_spares_need_slots_too() -> None:
    class Small(_Empty):
        def capacity(self) -> Capacity:
            return Capacity({"a": 1, "b": 1}, is_limit=True)

    job = Job.coerce({"model": {"use": "mlp"}, "data": {"use": "iris"}})
    with pytest.raises(JobError, match=r"2 workers and 1 spares, .* 2 free slots .* at most 1, cluster.spares"):
        AgentEngine(Small(), (), EngineRequest(job=job, num_slots=2, num_spares=1))
