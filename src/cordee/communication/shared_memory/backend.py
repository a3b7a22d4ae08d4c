"""Forming the process groups of the `cordee` backend: on one host, and across hosts."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from cordee.communication.shared_memory.collectives import Host
from cordee.communication.shared_memory.execution import CollectiveExecutor
from cordee.communication.shared_memory.gloo_sockets import recording_gloo_sockets
from cordee.communication.shared_memory.gpus import NCCL, choose_backend, form_nccl, own_gpu
from cordee.communication.shared_memory.handshake import LinkSettings
from cordee.communication.shared_memory.links import Links
from cordee.communication.shared_memory.liveness import FAILED, HEARTBEAT, Identity, PeerWatch, counter
from cordee.communication.shared_memory.mailbox import Mailbox
from cordee.communication.shared_memory.process_group import CordeeProcessGroup, Membership
from cordee.communication.shared_memory.registration import BackendSettings
from cordee.communication.shared_memory.rounds import Rounds
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
from cordee.communication.shared_memory.two_level import OneHost, TwoLevel
from cordee.communication.this_host import can_share_memory, own_host_id
from cordee.core.errors import CommunicationError
from cordee.core.fault_points import reach

_inherited = BackendSettings()


def create_group(options: Any, settings: BackendSettings | None) -> CordeeProcessGroup:
    """Form a process group. Collective over its members; torch calls it.

    Members on one host share memory. Members on different hosts have connections.
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
    # A program may destroy a group and form it again in the same store: what was said of the first must not be found.
    store = PrefixStore(str(store.add(f"formed/{rank}", 1)), store)

    identity = Identity.own(job_ranks[rank])
    num_cores = len(os.sched_getaffinity(0))
    host_id, name = own_host_id(settings, identity.rank), socket.gethostname()
    has_memory = settings.shared_memory and can_share_memory()
    record = MemberRecord(
        host_id, identity, settings.slot_bytes, num_cores, has_memory, settings.encrypt, name, own_gpu()
    )
    if settings.encrypt and not has_memory:
        raise CommunicationError("encrypt = True works on Linux on x86-64 only: elsewhere gloo is used, in plain text")
    records = exchange_records(store, rank, size, record)
    _compare_settings(records)
    hosts = group_by_host([other.host_id for other in records])
    is_wide = len(hosts) > 1

    def gloo() -> ProcessGroupGloo:
        if is_wide and settings.encrypt:
            raise CommunicationError(
                "this operation, or this kind of tensor, is left to gloo, which does not encrypt, and the group is "
                "encrypted: use dense CPU tensors of ordinary types, or set encrypt = False (cluster.encrypt = false)"
            )
        gloo_store = PrefixStore("gloo", store)
        if is_wide:
            return _form_wide(gloo_store, rank, size, timeout, settings)
        return _form_near(gloo_store, rank, size, timeout)

    def for_gpus(asked: str) -> Any:
        chosen = choose_backend([(other.host_id, other.gpu) for other in records], asked)
        if chosen == NCCL and is_wide and settings.encrypt:
            raise CommunicationError(
                "NCCL, which exchanges CUDA tensors, does not encrypt what goes between hosts, and the group is "
                "encrypted: compute on CPUs, or set encrypt = False (cluster.encrypt = false)"
            )
        return form_nccl(store, rank, size, timeout, job_ranks, options.group_id) if chosen == NCCL else None

    if not has_memory:
        return CordeeProcessGroup(rank, size, gloo, form_for_gpus=for_gpus)

    ranks = next(ranks for ranks in hosts if rank in ranks)
    team = form_host_team(store, rank, ranks, records, settings)
    executor = CollectiveExecutor(team.host.rounds, timeout.total_seconds(), settings.patience_s, options.group_id)
    links = _connect(PrefixStore("hosts", store), rank, hosts, records, settings, timeout) if is_wide else None
    timeout_s, ranks_here = timeout.total_seconds(), tuple(ranks)
    mailbox = Mailbox(team.segment, team.layout, team.host.member, team.watch, ranks_here, timeout_s, links)
    operations: OneHost | TwoLevel = OneHost(team.host)
    if links is not None:
        operations = TwoLevel(team.host, hosts, rank, job_ranks, links, mailbox, timeout_s)
        executor.on_failure = operations.fail
    return CordeeProcessGroup(rank, size, gloo, Membership(team, executor, mailbox, operations, links), for_gpus)


def _connect(
    store: Any,
    rank: int,
    hosts: Sequence[Sequence[int]],
    records: Sequence[MemberRecord],
    settings: BackendSettings,
    timeout: timedelta,
) -> Links:
    """Connect with the members on other hosts. Collective over the group."""
    ranks = next(ranks for ranks in hosts if rank in ranks)
    names = [f"{record.identity} on {record.host}" for record in records]
    connecting_s = settings.connect_timeout_s or timeout.total_seconds()
    links = Links(
        rank, names, LinkSettings(settings.encrypt, settings.failure_timeout_s, connecting_s, settings.address)
    )
    remote = [other for other in range(len(records)) if other not in ranks]
    links.connect(store, remote, [others[0] for others in hosts if rank == ranks[0] and others is not ranks])
    return links


def _compare_settings(records: Sequence[MemberRecord]) -> None:
    """Raise CommunicationError, on every member, if members differ in what must be the same."""
    first = records[0]
    for record in records[1:]:
        for key in ("shared_memory", "encrypt"):
            ours, theirs = getattr(first, key), getattr(record, key)
            if ours != theirs:
                raise CommunicationError(
                    f"{key} of BackendSettings is {ours} on {first.identity} and {theirs} on {record.identity}: all "
                    "members of a group need the same"
                )


def _form_wide(store: Any, rank: int, size: int, timeout: timedelta, settings: BackendSettings) -> ProcessGroupGloo:
    """Form a gloo group across hosts, for what is not done here."""
    connecting = timedelta(seconds=settings.connect_timeout_s) if settings.connect_timeout_s else timeout
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
    shared_memory: bool = True
    encrypt: bool = False
    host: str = ""  # its name, for messages
    gpu: str = ""  # that it computes on; no other GPU of the host has this id


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
        self._beat = HEARTBEAT.add(counter(words, self.watch.life_word), min(timeout_s / 5, 1.0))

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
