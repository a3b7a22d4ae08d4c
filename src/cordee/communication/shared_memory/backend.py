"""Forming the process groups of the `cordee` backend."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from cordee.communication.shared_memory.execution import CollectiveExecutor
from cordee.communication.shared_memory.gloo_sockets import recording_gloo_sockets
from cordee.communication.shared_memory.hosts import (
    HostTeam,
    MemberRecord,
    exchange_records,
    form_host_team,
    group_by_host,
    own_host_id,
)
from cordee.communication.shared_memory.liveness import Identity
from cordee.communication.shared_memory.mailbox import Mailbox
from cordee.communication.shared_memory.process_group import CordeeProcessGroup, GlooGroup
from cordee.communication.shared_memory.registration import BackendSettings
from cordee.communication.shared_memory.two_level import TwoLevel, leaders_of
from cordee.core.errors import CommunicationError

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
    gloo: GlooGroup
    if len(hosts) == 1:
        gloo = GlooGroup(lambda: _form_near(PrefixStore("gloo", store), rank, size, timeout))
    else:
        wide = _form_wide(PrefixStore("gloo", store), rank, size, timeout, settings)
        gloo = GlooGroup(lambda: wide)
    if len(hosts) == size and not (size == 1 and settings.shared_memory):
        return CordeeProcessGroup(rank, size, gloo, None, None, None, None)

    host_index = next(index for index, ranks in enumerate(hosts) if rank in ranks)
    team = form_host_team(store, rank, hosts[host_index], records, settings)
    executor = CollectiveExecutor(team.host.rounds, timeout.total_seconds(), settings.patience_s, options.group_id)
    if len(hosts) > 1:
        leaders = _form_leaders(PrefixStore("leaders", store), hosts, rank, timeout, settings)
        two_level = TwoLevel(team.host, hosts, host_index, leaders)
        return CordeeProcessGroup(rank, size, gloo, team, executor, None, two_level)
    return CordeeProcessGroup(rank, size, gloo, team, executor, _form_mailbox(team, size, timeout), None)


def _form_mailbox(team: HostTeam, size: int, timeout: timedelta) -> Mailbox:
    ranks = tuple(range(size))
    return Mailbox(team.segment, team.layout, team.host.member, team.watch, ranks, timeout.total_seconds())


def _form_leaders(
    store: Any, hosts: Sequence[Sequence[int]], rank: int, timeout: timedelta, settings: BackendSettings
) -> ProcessGroupGloo | None:
    """Collective over the leaders: return their gloo group; None on the other ranks, which need not call."""
    leading = leaders_of(hosts)
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
