"""Where the engine `ray` asks for agents, with a Ray that is made up. On a real one: `make test-ray`."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from cordee.cluster.engines.agent_messages import AgentOrder
from cordee.cluster.engines.ray import RaySource


class _Ray:
    """Nodes that a Ray takes for alive, and what actors were asked for with."""

    def __init__(self, **ports: int) -> None:
        self.ports = ports
        self.asked: list[dict[str, Any]] = []
        self.placed_on = ""
        self.exceptions = self
        self.RayError = KeyError

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {
                "NodeID": name,
                "Alive": True,
                "Resources": {"CPU": 4.0, "GPU": 1.0},
                "NodeManagerAddress": "127.0.0.1",
                "NodeManagerPort": port,
                "NodeManagerHostname": name,
            }
            for name, port in self.ports.items()
        ]

    def remote(self, *args: Any, **options: Any) -> Any:
        if options:
            self.asked.append(options)
        return self

    @property
    def node(self) -> Any:
        return self

    run = leave = node

    def wait(self, references: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return references, []

    def get(self, _: Any) -> str:
        return self.placed_on

    def kill(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any) -> Any:
        return self


def order(number: int) -> AgentOrder:
    return AgentOrder(number=number, run="r", address="tcp://h:1", server_key="", ticket="t", failure_timeout_s=5.0)


@pytest.fixture
def port() -> Iterator[int]:
    """One at which something listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def dead_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found: int = listener.getsockname()[1]
    return found


def test_a_node_that_lost_an_agent_is_avoided_while_it_does_not_answer(port: int, dead_port: int) -> None:
    ray = _Ray(a=port, b=dead_port)
    source = RaySource(ray, num_gpus=0, is_ours=False, is_new=False)
    for number, node in enumerate("ab"):
        ray.placed_on = node
        source.start(order(number))
        source._find_nodes()
        source.stop(number)  # nothing was heard of the agent for long
    assert [options.get("label_selector") for options in ray.asked] == [None, None]
    source.start(order(2))
    assert ray.asked[-1]["label_selector"] == {"ray.io/node-id": "!in(b)"}, "that a answers is no reason to avoid it"
    ray.ports["b"] = port
    source.start(order(3))
    assert "label_selector" not in ray.asked[-1], "b is back"


def test_a_cluster_without_another_node_is_asked_all_the_same(dead_port: int) -> None:
    ray = _Ray(a=dead_port)
    source = RaySource(ray, num_gpus=0, is_ours=False, is_new=False)
    ray.placed_on = "a"
    source.start(order(0))
    source._find_nodes()
    source.stop(0)
    source.start(order(1))
    assert "label_selector" not in ray.asked[-1]


def test_slots_are_cpus_and_gpus_where_the_job_needs_them() -> None:
    free = {"CPU": 4.0, "GPU": 1.0}
    assert RaySource(_Ray(), num_gpus=0, is_ours=False, is_new=False)._slots_in(free) == 4
    assert RaySource(_Ray(), num_gpus=1, is_ours=False, is_new=False)._slots_in(free) == 1
    assert RaySource(_Ray(), num_gpus=1, is_ours=False, is_new=False)._slots_in({"CPU": 4.0}) == 0


def test_a_node_whose_daemon_is_gone_is_lost_when_a_connection_ends(
    port: int, dead_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = _Ray(a=port, b=dead_port)
    source = RaySource(ray, num_gpus=0, is_ours=False, is_new=False)
    for number, node in enumerate("ab"):
        ray.placed_on = node
        source.start(order(number))
        source._find_nodes()
    monkeypatch.setattr(ray, "wait", lambda references, **_: ([], references))  # Ray says nothing yet
    assert source.ended() == [], "Ray is believed as long as nothing speaks against it"
    source.look()
    (ended,) = source.ended()
    assert (ended.number, ended.how) == (1, "its Ray node b (b) does not answer")
    source.look()
    assert source.ended() == [], "an agent ends once"
    source.start(order(2))
    assert ray.asked[-1]["label_selector"] == {"ray.io/node-id": "!in(b)"}
