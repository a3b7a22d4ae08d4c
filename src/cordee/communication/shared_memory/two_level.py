"""Collectives across hosts: shared memory inside each host, gloo between one member of each.

Fewer bytes cross the network than in a flat group: what the members of a host have to say is added up before it
leaves, and what comes in is handed out in shared memory. As in `collectives`, functions return steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import (
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    ProcessGroupGloo,
)

from cordee.communication.shared_memory import collectives
from cordee.communication.shared_memory.collectives import Host, Reduction, as_bytes
from cordee.communication.shared_memory.rounds import Steps
from cordee.core.errors import CommunicationError

_LEADER = 0  # the member of each host that talks to the other hosts

_GLOO_OPS = {
    Reduction.SUM: ReduceOp.SUM,
    Reduction.AVG: ReduceOp.SUM,  # divided afterwards: gloo has no average
    Reduction.PRODUCT: ReduceOp.PRODUCT,
    Reduction.MIN: ReduceOp.MIN,
    Reduction.MAX: ReduceOp.MAX,
    Reduction.BAND: ReduceOp.BAND,
    Reduction.BOR: ReduceOp.BOR,
    Reduction.BXOR: ReduceOp.BXOR,
}


@dataclass(frozen=True)
class TwoLevel:
    """A group that spans several hosts, as one of its members sees it."""

    host: Host
    hosts: Sequence[Sequence[int]]  # group ranks of each host
    host_index: int
    leaders: ProcessGroupGloo | None  # the group of the leaders, on a leader

    @property
    def num_ranks(self) -> int:
        return sum(len(ranks) for ranks in self.hosts)

    def barrier(self) -> Steps:
        yield from collectives.barrier(self.host)
        if self.leaders is not None:
            _wait(self.leaders.barrier(BarrierOptions()))  # type: ignore[attr-defined]
        yield from collectives.barrier(self.host)

    def all_reduce(self, data: Tensor, reduction: Reduction) -> Steps:
        """Replace `data` by its reduction over all ranks; the same bits everywhere."""
        inside = Reduction.SUM if reduction is Reduction.AVG else reduction
        yield from collectives.reduce(self.host, data, inside, _LEADER)
        if self.leaders is not None:
            options: Any = AllreduceOptions()
            options.reduceOp = _GLOO_OPS[reduction]
            _wait(self.leaders.allreduce([data], options))  # type: ignore[attr-defined]
            if reduction is Reduction.AVG:
                data.div_(self.num_ranks)
        yield from collectives.broadcast(self.host, as_bytes(data), _LEADER)

    def broadcast(self, data: Tensor, root: int) -> Steps:
        """Replace `data` (bytes) by that of the group rank `root`."""
        root_host = next(index for index, ranks in enumerate(self.hosts) if root in ranks)
        if self.host_index == root_host:
            yield from collectives.broadcast(self.host, data, self.hosts[root_host].index(root))
        if self.leaders is not None and data.numel():
            options = BroadcastOptions()
            options.rootRank = root_host
            options.rootTensor = 0
            _wait(self.leaders.broadcast([data], options))  # type: ignore[attr-defined]
        if self.host_index != root_host:
            yield from collectives.broadcast(self.host, data, _LEADER)


def leaders_of(hosts: Sequence[Sequence[int]]) -> list[int]:
    """Return the group rank of each host that talks to the other hosts."""
    return [ranks[_LEADER] for ranks in hosts]


def _wait(work: Any) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise CommunicationError(f"the exchange with the other hosts failed: {error}") from error
