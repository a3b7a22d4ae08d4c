"""Forming the process groups of the `cordee` backend: on one host, and across hosts."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import (
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
)

from cordee.communication.shared_memory import collectives
from cordee.communication.shared_memory.collectives import Host, Reduction, as_bytes
from cordee.communication.shared_memory.execution import CollectiveExecutor
from cordee.communication.shared_memory.gloo_sockets import recording_gloo_sockets
from cordee.communication.shared_memory.liveness import FAILED, HEARTBEAT, Identity, PeerWatch
from cordee.communication.shared_memory.mailbox import Mailbox
from cordee.communication.shared_memory.process_group import CordeeProcessGroup
from cordee.communication.shared_memory.registration import BackendSettings
from cordee.communication.shared_memory.rounds import Rounds, Steps
from cordee.communication.shared_memory.segment import (
    STATE,
    Address,
    Layout,
    Segment,
    Slots,
    attach_segment,
    choose_slot_bytes,
    create_segment,
)
from cordee.communication.this_host import own_host_id
from cordee.core.errors import CommunicationError
from cordee.core.fault_points import reach

_inherited = BackendSettings()


def create_group(options: Any, settings: BackendSettings | None) -> CordeeProcessGroup:
    """Form a process group. Collective over its members; torch calls it.

    Members on one host share memory. With several hosts, one member of each forms a gloo group with the others.
    Raises CommunicationError when shared memory can not be had, on every member of that host.
    """
    global _inherited
    if settings is None:
        settings = _inherited
    elif not isinstance(settings, BackendSettings):
        raise CommunicationError(
            f"pg_options of the cordee backend is a BackendSettings, not {type(settings).__name__}"
        )
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    job_ranks = options.global_ranks_in_group or list(range(size))
    if not dist.is_initialized():  # the first group: those made later take after it
        _inherited = settings
    store = PrefixStore("cordee", options.store)

    identity = Identity.own(job_ranks[rank])
    num_cores = len(os.sched_getaffinity(0))
    record = MemberRecord(own_host_id(settings, identity.rank), identity, settings.slot_bytes, num_cores)
    records = exchange_records(store, rank, size, record)
    hosts = group_by_host([other.host_id for other in records])
    wide = _form_wide(PrefixStore("gloo", store), rank, size, timeout, settings) if len(hosts) > 1 else None

    def gloo() -> ProcessGroupGloo:
        return wide if wide is not None else _form_near(PrefixStore("gloo", store), rank, size, timeout)

    if len(hosts) == size and not (size == 1 and settings.shared_memory):
        return CordeeProcessGroup(rank, size, gloo, None, None, None, None)

    host_index = next(index for index, ranks in enumerate(hosts) if rank in ranks)
    team = form_host_team(store, rank, hosts[host_index], records, settings)
    executor = CollectiveExecutor(team.host.rounds, timeout.total_seconds(), settings.patience_s, options.group_id)
    if len(hosts) > 1:
        leaders = _form_leaders(PrefixStore("leaders", store), hosts, rank, timeout, settings)
        two_level = TwoLevel(team.host, hosts, host_index, leaders)
        return CordeeProcessGroup(rank, size, gloo, team, executor, None, two_level)
    ranks = tuple(range(size))
    mailbox = Mailbox(team.segment, team.layout, team.host.member, team.watch, ranks, timeout.total_seconds())
    return CordeeProcessGroup(rank, size, gloo, team, executor, mailbox, None)


def _form_leaders(
    store: Any, hosts: Sequence[Sequence[int]], rank: int, timeout: timedelta, settings: BackendSettings
) -> ProcessGroupGloo | None:
    """Collective over the leaders: return their gloo group; None on the other ranks, which need not call."""
    leading = [ranks[_LEADER] for ranks in hosts]
    if rank not in leading:
        return None
    return _form_wide(store, leading.index(rank), len(leading), timeout, settings)


def _form_wide(store: Any, rank: int, size: int, timeout: timedelta, settings: BackendSettings) -> ProcessGroupGloo:
    """Form a gloo group across hosts."""
    connecting = timedelta(seconds=settings.meeting_timeout_s) if settings.meeting_timeout_s else timeout
    with recording_gloo_sockets(settings.address):
        if settings.address is None:
            group = ProcessGroupGloo(store, rank, size, timeout=connecting)
        else:
            device = ProcessGroupGloo.create_device(hostname=settings.address)
            group = ProcessGroupGloo(store, rank, size, _gloo_options(device, connecting))
    group.set_timeout(timeout)
    return group


def _form_near(store: Any, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
    # Inside a host gloo needs no address of the outside, which it can fail to find. It connects when it is first used:
    # connecting at once to a peer that has just been frozen does not end, not even after the timeout.
    device = ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=True)
    return ProcessGroupGloo(store, rank, size, _gloo_options(device, timeout))


def _gloo_options(device: Any, timeout: timedelta) -> Any:
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [device]
    options._timeout = timeout
    return options


# Which members of a group share a host, and forming their shared memory through the group's store.

_SEAL_BYTES = 64


@dataclass(frozen=True)
class MemberRecord:
    """What a member reports of itself to the others when a group is formed."""

    host_id: str
    identity: Identity
    slot_bytes: int | None
    num_cores: int


def group_by_host(host_ids: Sequence[str]) -> list[list[int]]:
    """Return the group ranks of each host, hosts in the order of their first rank."""
    hosts: dict[str, list[int]] = {}
    for rank, one in enumerate(host_ids):
        hosts.setdefault(one, []).append(rank)
    return list(hosts.values())


class HostTeam:
    """The members of a group on this host: their shared memory, and the means to end it."""

    def __init__(self, segment: Segment, layout: Layout, member: int, identities: list[Identity], timeout_s: float):
        words = segment.words()
        self.segment = segment
        self.layout = layout
        self.watch = PeerWatch(words, layout, member, identities, timeout_s)
        rounds = Rounds(segment, layout, member, self.watch, group_key=identities[0].pid)
        self.host = Host(rounds, Slots(segment, layout), member, layout.num_members)
        self._beat = HEARTBEAT.add(words, self.watch.life_word, min(timeout_s / 5, 1.0))

    def close(self) -> None:
        """Announce to the others that this member has left, and stop watching them."""
        HEARTBEAT.remove(self._beat)
        self.watch.close()


def exchange_records(store: Store, rank: int, size: int, record: MemberRecord) -> list[MemberRecord]:
    """Collective over the group: return what each rank says of itself."""
    store.set(f"member/{rank}", msgspec.json.encode(record).decode())
    reach("segment.introduced")
    return [msgspec.json.decode(store.get(f"member/{other}"), type=MemberRecord) for other in range(size)]


def form_host_team(
    store: Store, rank: int, ranks: Sequence[int], records: Sequence[MemberRecord], settings: BackendSettings
) -> HostTeam:
    """Collective over the group ranks of one host: make the segment and map it everywhere.

    The segment never has a name; its owner keeps the file open until everybody has said how attaching went.
    Raises CommunicationError on every rank if one of them can not make or map it.
    """
    owner = ranks[0]
    slot_bytes = records[owner].slot_bytes or choose_slot_bytes(len(ranks), records[owner].num_cores)
    layout = Layout(num_members=len(ranks), slot_bytes=slot_bytes)
    # At the end of the segment: whose it is. An address in the store may be anybody's, but nobody else can make a
    # segment of this user, and each member sees that this one was made for itself and those it has met.
    seal = hashlib.sha256(msgspec.json.encode(records)).digest()
    num_bytes = layout.total_bytes + _SEAL_BYTES
    segment: Segment | None = None
    fd = -1
    problem = ""
    try:
        if rank == owner:
            segment, fd = create_segment(num_bytes, f"a group of {len(ranks)} workers on this host")
            segment.bytes_at(layout.total_bytes, len(seal))[:] = seal
            reach("segment.made")
            store.set(f"segment/{owner}", Address(os.getpid(), fd, num_bytes).encode())
        else:
            address = store.get(f"segment/{owner}").decode()
            reach("segment.found")
            if address.startswith("!"):
                raise CommunicationError(address[1:])
            segment = attach_segment(Address.decode(address))
            if bytes(segment.bytes_at(layout.total_bytes, len(seal))) != seal:
                raise CommunicationError(
                    "the shared memory at the address in the store is that of other workers: somebody else writes to "
                    "the store where the group meets"
                )
        reach("segment.mapped")
    except CommunicationError as error:
        problem = str(error)
        if rank == owner:
            store.set(f"segment/{owner}", f"!{problem}")
    store.set(f"attached/{rank}", problem or "yes")
    try:
        reach("segment.answered")
        answers = {other: store.get(f"attached/{other}").decode() for other in ranks}
    except BaseException:
        if segment is not None:  # the others may have heard enough to begin: they are not to wait for this one
            segment.words()[layout.member_word(list(ranks).index(rank)) + STATE] = FAILED
        raise
    finally:
        if fd >= 0:
            os.close(fd)
    for other, answer in answers.items():
        if answer != "yes":
            name = records[other].identity
            raise CommunicationError(answer if problem else f"{name} has no shared memory: {answer}")
    assert segment is not None
    identities = [records[other].identity for other in ranks]
    return HostTeam(segment, layout, list(ranks).index(rank), identities, settings.failure_timeout_s)


# Collectives across hosts: shared memory inside each host, gloo between one member of each.
#
# Fewer bytes cross the network than in a flat group: what the members of a host have to say is added up before it
# leaves, and what comes in is handed out in shared memory. As in `collectives`, functions return steps.

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


def _wait(work: Any) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise CommunicationError(f"the exchange with the other hosts failed: {error}") from error
