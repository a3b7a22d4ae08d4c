"""The engine `agents`: hosts on which somebody runs `cordee agent`. The run prints the command for each agent."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cordee.cluster.engine import Capacity
from cordee.cluster.engines.agent_messages import AgentOrder
from cordee.cluster.engines.agents import AgentEnded, AgentSource, EngineRequest
from cordee.core.errors import JobError


def make_source(request: EngineRequest) -> ByHand:
    """Raises JobError if the run has no address at which agents can reach it."""
    address = request.job.cluster.address
    if not address:
        raise JobError(
            "cluster.engine = 'agents' needs cluster.address: the address of this host at which the hosts with agents "
            "can reach it (127.0.0.1 for agents on this host)"
        )
    return ByHand(address)


class ByHand(AgentSource):
    """Agents that somebody starts. Their end is noticed by their silence."""

    name = "agents"

    def __init__(self, address: str) -> None:
        self._address = address

    def describe(self) -> str:
        return f"agents that are started by hand, at {self._address}"

    def capacity(self) -> Capacity:
        return Capacity({}, may_grow=True, is_limit=True, address=self._address)

    def start(self, order: AgentOrder) -> None:
        """Print the command. Not recorded anywhere: whoever has the ticket can take part."""
        place = order.address.removeprefix("tcp://")
        sys.stderr.write(f"start agent {order.number} on a host:\n  cordee agent {place} --ticket {order.to_text()}\n")

    def ended(self) -> Sequence[AgentEnded]:
        return ()

    def stop(self, number: int) -> None:
        """An agent that is not needed is told so when it connects."""

    def close(self) -> None:
        """Agents end by themselves when the launcher is gone."""
