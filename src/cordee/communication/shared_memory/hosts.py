"""Which members of a group share a host, and forming their shared memory through the group's store."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from torch.distributed.distributed_c10d import Store

from cordee.communication.shared_memory.collectives import Host
from cordee.communication.shared_memory.liveness import FAILED, HEARTBEAT, Identity, PeerWatch
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
from cordee.communication.this_host import host_id
from cordee.core.errors import CommunicationError
from cordee.core.fault_points import reach

_SEAL_BYTES = 64


@dataclass(frozen=True)
class MemberRecord:
    """What a member reports of itself to the others when a group is formed."""

    host_id: str
    identity: Identity
    slot_bytes: int | None
    num_cores: int

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> MemberRecord:
        fields = json.loads(text)
        return cls(fields["host_id"], Identity(**fields["identity"]), fields["slot_bytes"], fields["num_cores"])


def own_host_id(settings: BackendSettings, rank: int) -> str:
    """Return an id that is equal for processes that can share memory, and unique where that is impossible.

    See `this_host.host_id`: containers on one machine count as hosts of their own.
    """
    if not settings.shared_memory:
        return f"{socket.gethostname()}/alone/{rank}"
    if settings.host_id is not None:
        return settings.host_id
    if not (sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")):
        # Shared memory relies on the store order of x86 (see rounds.py).
        warnings.warn(
            f"the cordee backend uses shared memory on Linux on x86-64 only, this is {sys.platform} on "
            f"{platform.machine()}: gloo is used instead",
            RuntimeWarning,
            stacklevel=2,
        )
        return f"{socket.gethostname()}/alone/{rank}"
    return host_id()


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
    store.set(f"member/{rank}", record.encode())
    reach("segment.introduced")
    return [MemberRecord.decode(store.get(f"member/{other}").decode()) for other in range(size)]


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
    seal = hashlib.sha256("\n".join(record.encode() for record in records).encode()).digest()
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
