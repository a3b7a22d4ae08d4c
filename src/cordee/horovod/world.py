"""Who takes part: `init`, ranks and sizes, and process sets. Shared by all front ends.

Outside of a launcher a process is alone: rank 0 of 1, and every operation returns what it was given.
"""

from __future__ import annotations

import atexit
import hashlib
import re
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from cordee.cluster import Team
from cordee.communication.shared_memory import BACKEND_NAME, BackendSettings, register
from cordee.communication.this_host import own_host_id
from cordee.compute import share_threads
from cordee.core import env
from cordee.core.errors import CommunicationError, CordeeError, JobError
from cordee.horovod.errors import HorovodInternalError
from cordee.horovod.queue import OperationQueue
from cordee.runs.script.member import ScriptMember, present_member

CONNECT_S = 10.0  # for a connection to a store that is known to be there


class _Place(NamedTuple):
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_homogeneous: bool


class ProcessSet:
    """Ranks that do operations among themselves. Made by `add_process_set`, or given to `init(process_sets=…)`."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks: list[int] | None = sorted({int(rank) for rank in ranks})
        self.process_set_id: int | None = None
        self._queue: OperationQueue | None = None

    def size(self) -> int | None:
        """Return the number of ranks; None before the set is added."""
        return None if self.process_set_id is None else len(self.ranks or ())

    def rank(self) -> int | None:
        """Return this process's rank in the set; None if it has none."""
        return (self.ranks or []).index(rank()) if self.included() else None

    def included(self) -> bool | None:
        """Return whether this process belongs to the set; None before the set is added."""
        return None if self.process_set_id is None else rank() in (self.ranks or ())

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    def queue(self) -> OperationQueue:
        """Return what carries out operations of this set. Raises if this process is no member."""
        _require_init()
        if self.process_set_id is None or _sets.get(self.process_set_id) is not self:
            raise ValueError(
                f"{self}: this process set has not been added: call hvd.add_process_set(...) on every rank"
            )
        if self._queue is None and self.process_set_id == 0:
            raise JobError(
                "an operation before the loop: under --elastic the ranks meet where the function of hvd.elastic.run "
                "begins, which gives all of them the state of one. Call it inside of that function, or after it"
            )
        if self._queue is None:
            raise ValueError(f"{self}: rank {rank()} does not belong to this process set")
        return self._queue

    def _form(self, number: int, queue: OperationQueue | None) -> None:
        self.process_set_id, self._queue = number, queue

    def _dissolve(self) -> None:
        self.process_set_id, self._queue = None, None


global_process_set = ProcessSet([])

_place: _Place | None = None
_sets: dict[int, ProcessSet] = {}
_groups: dict[int, dist.ProcessGroup | None] = {}
_next_set = 1
_owns_group = False


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the processes that were started together: under `cordee run`, torchrun, mpirun or srun. Collective.

    Calling it again changes nothing. `comm` may be None or all ranks. `process_sets` are added at once; "dynamic"
    is accepted, since sets can always be added later.
    """
    global _place, _owns_group
    if _place is not None:
        return
    if (member := present_member()) is not None:
        _init_elastic(member, process_sets)
        return
    task = _launched_place()
    if task is None and dist.is_initialized():  # the script has formed the group by itself
        task = env.Place(dist.get_rank(), dist.get_world_size(), -1, -1)
    size = task.world_size if task else 1
    if comm is not None and (not isinstance(comm, list | tuple | range) or list(comm) not in ([], list(range(size)))):
        raise ValueError(
            f"hvd.init(comm={comm!r}): only all ranks, in order, can be given: use process sets for some of them"
        )
    group: dist.ProcessGroup | None = None
    if task is not None and size > 1:
        if not dist.is_initialized():
            _form_world(task)
            _owns_group = True
        if dist.get_world_size() != size or dist.get_rank() != task.rank:
            raise JobError(
                f"hvd.init: the launcher says rank {task.rank} of {size}, and the torch.distributed group of this "
                f"process rank {dist.get_rank()} of {dist.get_world_size()}: which is meant?"
            )
        group = dist.group.WORLD
    _place = _find_place(task, group) if task is not None else _Place(0, 1, 0, 1, 0, 1, True)
    _form_global(OperationQueue(group, list(range(_place.size)), _place.rank), group)
    from cordee.horovod import timeline

    timeline.start_if_wanted(_place.rank)
    atexit.register(shutdown)
    for one in process_sets if isinstance(process_sets, list | tuple) else ():
        add_process_set(one)


def _init_elastic(member: ScriptMember, process_sets: Sequence[ProcessSet] | str | None) -> None:
    """Know the own number, and with how many the run was started: ranks meet where the elastic loop begins."""
    global _place
    if isinstance(process_sets, list | tuple) and process_sets:
        raise JobError(
            "hvd.init(process_sets=…): ranks change under --elastic: add process sets in the loop's function"
        )
    index, size = member.spec.index, member.spec.num_local
    _place = _Place(index, max(size, index + 1), index, max(size, index + 1), 0, 1, True)
    _form_global(None)


def form(team: Team) -> None:
    """Become a rank of a team whose group has been formed. Process sets are those of no team then. Local."""
    global _place, _next_set
    for one in _sets.values():
        one._dissolve()
    _sets.clear()
    _groups.clear()
    rank, size, here = team.worker_index, team.num_workers, team.num_local_workers
    _place, _next_set = _Place(rank, size, team.local_rank, here, 0, 1, True), 1
    group = dist.group.WORLD if size > 1 else None
    _form_global(OperationQueue(group, list(range(size)), rank), group)


def _form_global(queue: OperationQueue | None, group: dist.ProcessGroup | None = None) -> None:
    global_process_set.ranks = list(range(_require_init().size))
    global_process_set._form(0, queue)
    _sets[0], _groups[0] = global_process_set, group


def lost_rank() -> HorovodInternalError | None:
    """Return the error of an operation in which a rank was lost, if one was."""
    return next((one._queue.lost for one in _sets.values() if one._queue and one._queue.lost), None)


def shutdown() -> None:
    """Leave. Local: ranks that still wait for this one get an error that names it. Calling it again changes nothing."""
    global _place, _next_set, _owns_group
    if _place is None:
        return
    from cordee.horovod import timeline

    timeline.stop_timeline()
    atexit.unregister(shutdown)
    for one in _sets.values():
        one._dissolve()
    _sets.clear()
    _groups.clear()
    _place, _next_set = None, 1
    if _owns_group and dist.is_initialized():
        _owns_group = False
        dist.destroy_process_group()


def is_initialized() -> bool:
    return _place is not None


def rank() -> int:
    return _require_init().rank


def size() -> int:
    return _require_init().size


def local_rank() -> int:
    return _require_init().local_rank


def local_size() -> int:
    return _require_init().local_size


def cross_rank() -> int:
    """Return the number of this host, among the hosts that have a process with this local rank."""
    return _require_init().cross_rank


def cross_size() -> int:
    return _require_init().cross_size


def is_homogeneous() -> bool:
    """Return whether every host has the same number of processes."""
    return _require_init().is_homogeneous


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Form a process set. Collective over all ranks, with the same ranks on each."""
    global _next_set
    place = _require_init()
    one = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    ranks = one.ranks or []
    if not ranks or ranks[0] < 0 or ranks[-1] >= place.size:
        raise ValueError(f"add_process_set: ranks {ranks} must be from 0 to {place.size - 1}, and at least one of them")
    if one.process_set_id is not None:
        raise ValueError(f"add_process_set: {one} has been added already")
    if any(other.ranks == ranks for other in _sets.values()):
        raise ValueError(f"add_process_set: there is a process set with the ranks {ranks} already")
    global_process_set.queue().compare(f"add_process_set({ranks})")
    number, _next_set = _next_set, _next_set + 1
    group = dist.new_group(ranks) if place.size > 1 else None
    queue = OperationQueue(group if len(ranks) > 1 else None, ranks, place.rank) if place.rank in ranks else None
    one._form(number, queue)
    _sets[number], _groups[number] = one, group
    return one


def remove_process_set(process_set: ProcessSet) -> bool:
    """Dissolve a process set. Collective over all ranks. Returns False for the set of all ranks, or one not added."""
    number = process_set.process_set_id
    _require_init()
    if number is None or number == 0 or _sets.get(number) is not process_set:
        return False
    global_process_set.queue().compare(f"remove_process_set({process_set.ranks})")
    group = _groups.pop(number)
    del _sets[number]
    process_set._dissolve()
    if isinstance(group, dist.ProcessGroup):
        dist.destroy_process_group(group)
    return True


def require_init() -> None:
    """Raise ValueError before `init`."""
    _require_init()


def _require_init() -> _Place:
    if _place is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _place


def _find_place(task: env.Place, group: dist.ProcessGroup | None) -> _Place:
    """Compare with the others which host each process is on. Collective."""
    host = own_host_id(BackendSettings(), task.rank)
    number = int.from_bytes(hashlib.blake2b(host.encode(), digest_size=7).digest(), "big")
    mine = torch.tensor([number, task.local_rank])
    everybody = [torch.empty_like(mine) for _ in range(task.world_size)]
    if group is None:
        everybody = [mine]
    else:
        dist.all_gather(everybody, mine, group=group)
    hosts: dict[int, list[int]] = {}
    for other_host, other_local in (row.tolist() for row in everybody):
        hosts.setdefault(other_host, []).append(other_local)
    own = sorted(hosts[number])
    if own[0] < 0:  # nobody has numbered them: by their ranks
        here = [other for other, row in enumerate(everybody) if int(row[0]) == number]
        hosts = {host: list(range(len(locals_))) for host, locals_ in hosts.items()}
        own = hosts[number]
        task = task._replace(local_rank=here.index(task.rank))
    if own != list(range(len(own))):
        raise CordeeError(f"the launcher numbers the processes of this host {own}: they must be 0 to {len(own) - 1}")
    with_local = [host for host, locals_ in hosts.items() if task.local_rank in locals_]
    return _Place(
        rank=task.rank,
        size=task.world_size,
        local_rank=task.local_rank,
        local_size=len(own),
        cross_rank=with_local.index(number),
        cross_size=len(with_local),
        is_homogeneous=len({len(locals_) for locals_ in hosts.values()}) == 1,
    )


# Where the processes of one launch connect to each other, whatever launched them.


def _form_world(task: env.Place) -> None:
    """Form the group of all ranks. Collective. Raises CommunicationError if the launch has ended already."""
    register()
    share_threads(0, task.local_world_size)
    store = _open_store(task)
    try:
        if store is None:
            _find_kept_store()
            dist.init_process_group(BACKEND_NAME)
        else:
            dist.init_process_group(BACKEND_NAME, store=store, rank=task.rank, world_size=task.world_size)
    except BaseException:
        # Groups are numbered by attempts, and members look for each other by the number. A process that goes on to
        # other launches, as those of Spark, would not be found by one that has not made this attempt.
        dist.distributed_c10d._world.group_count = 0
        raise


def _find_kept_store() -> None:
    """Raise CommunicationError if the store of the launch is gone. torch would look for it for half an hour."""
    if env.has_kept_store():
        address, port = env.master_address()
        try:
            socket.create_connection((address, port), timeout=CONNECT_S).close()
        except OSError as error:
            raise CommunicationError(
                f"hvd.init: the store of this launch, {address}:{port}, has ended ({error}): another rank has failed "
                "before, or the launcher is gone"
            ) from None


def _launched_place() -> env.Place | None:
    """Return the place that `cordee run`, torchrun, mpirun or srun gave this process; None if it runs alone."""
    if (place := env.place()) is not None:
        return place
    if not env.is_launched():
        return None
    task = env.launched_task()
    return env.Place(task.rank, task.world_size, task.local_rank, task.tasks_per_host)


def _open_store(place: env.Place) -> Any:
    """Return the store through which the processes connect; None where torch finds it by itself."""
    if env.place() is not None:
        return None
    task = env.launched_task()
    address, port = env.master_address()
    if address and port:
        return dist.TCPStore(address, port, place.world_size, place.rank == 0)  # type: ignore[attr-defined]
    if not task.is_one_host:
        raise JobError(
            f"hvd.init: {task.describe()}: set MASTER_ADDR and MASTER_PORT on all processes, the address and a free "
            "port of the first host, so that they can connect"
        )
    if not (launch := env.launch_name(task)):
        raise JobError(f"hvd.init: {task.launcher} gives its launches no id: set MASTER_ADDR and MASTER_PORT")
    folder = env.cache_folder() / "rendezvous"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", launch)
    return dist.FileStore(str(folder / name), place.world_size)  # type: ignore[attr-defined]
