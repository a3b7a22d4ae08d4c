"""The directory of a store: who takes part, which keys there are and where, who has come to the barrier. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from cordee.communication.wire import ITEM_BYTES
from cordee.core.errors import StoreError, nearest
from cordee.parameters.messages import Cut, Role
from cordee.parameters.placement import place
from cordee.parameters.server_slots import ServerSlot, ServerSlots

_DEAF_S = 1.0  # between two looks at who is silent: more means that nobody was listening


@dataclass
class Participant:
    """One worker or server."""

    role: Role
    index: int
    pid: int
    host: str
    address: str
    heard_s: float
    host_id: str = ""
    num_barriers: int = 0  # that it has passed
    has_left: bool = False
    is_lost: bool = False

    @property
    def is_here(self) -> bool:
        return not (self.has_left or self.is_lost)

    def __str__(self) -> str:
        return f"{self.role} {self.index} (process {self.pid} on {self.host})"


@dataclass
class KeyRecord:
    """What is known of one key."""

    number: int
    kind: str
    shape: tuple[int, ...]
    cuts: tuple[Cut, ...]
    owner: str  # who brings the first value
    placed_s: float
    is_ready: bool = False
    declared_by: dict[str, int] = field(default_factory=dict)  # worker -> the number of its call


class Directory:
    """All decisions of the directory. `num_workers` 0: as many as come, and the store ends when it is told to.

    With two `replicas` each server is two processes: one that serves, and its follower, which has all that was
    acknowledged and takes over when the first is lost. The directory alone decides that, and never undoes it: a
    process that was given up is not heard any more.
    """

    def __init__(self, *, num_workers: int, num_servers: int, failure_timeout_s: float, replicas: int = 1) -> None:
        self.num_workers, self.num_servers, self.replicas = num_workers, num_servers, replicas
        self.slots = ServerSlots([ServerSlot() for _ in range(num_servers)])
        self.failure_timeout_s = failure_timeout_s
        self.participants: dict[str, Participant] = {}
        self.keys: dict[str, KeyRecord] = {}
        self._at_barrier: dict[str, int] = {}  # worker -> the number of its barrier
        self._looked_s: float | None = None

    def register(
        self, name: str, role: Role, *, pid: int, host: str, address: str, now_s: float, host_id: str = ""
    ) -> Participant:
        """Register a process; again for one that is known. Raises StoreError if there is no place for it."""
        known = self.participants.get(name)
        if known is not None:
            return self.record_heartbeat(name, now_s)
        if role == "server":
            index = self._free_slot()
            self.participants[name] = Participant(role, index, pid, host, address, now_s, host_id)
            self.slots.join(index, name)
            return self.participants[name]
        same = self.present("worker")
        if self.num_workers and len(same) >= self.num_workers:
            raise StoreError(
                f"the store was started for {self.num_workers} workers, and {len(same)} have come: start it with more"
            )
        self.participants[name] = Participant(role, len(same), pid, host, address, now_s)
        return self.participants[name]

    def _free_slot(self) -> int:
        """Return which server a new process becomes: one that nobody has been yet, else one that has no follower."""
        slots, present = self.slots.slots, self.present("server")
        known = {participant.index for participant in present}
        for index in range(self.num_servers):
            if index not in known:
                return index
        for index, _ in self.slots.without_follower() if self.replicas > 1 else ():
            return index
        if lost := [index for index, slot in enumerate(slots) if not slot.serving]:
            raise StoreError(f"all processes of server {lost[0]} are lost, and its values with them")
        raise StoreError(
            f"the store was started for {self.num_servers} servers"
            f"{f' of {self.replicas} processes each' if self.replicas > 1 else ''}, and {len(present)} have come: "
            "start it with more"
        )

    @property
    def num_missing_servers(self) -> int:
        """How many processes of servers have yet to come, and to be given everything."""
        if self.slots.is_ready(wants_followers=self.replicas > 1):
            return 0
        slots, wants = self.slots.slots, self.replicas > 1
        return sum((not slot.serving) + (wants and not slot.is_following) for slot in slots)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where the servers are, if all of them serve and at the start have their followers."""
        if self.replicas > 1 and self.num_missing_servers:
            return ()
        return tuple(self.participants[name].address for name in self.slots.serving)

    def leader_of(self, name: str) -> tuple[str, str]:
        """Return the name and the address of the server that `name` is to follow; both empty for one that serves."""
        slot = self.slots.slots[self.participants[name].index]
        if slot.follower != name or not slot.serving:
            return "", ""
        return slot.serving, self.participants[slot.serving].address

    def follow(self, name: str, address: str) -> None:
        """`name` has been given everything by the server at `address`. Raises StoreError if that serves no more."""
        leader, its_address = self.leader_of(name)
        if not leader or its_address != address:
            raise StoreError(f"{self.describe(name)} is nobody's follower: the server at {address} does not serve")
        self.slots.record_following(self.participants[name].index, leader, name)
        self.slots.is_ready(wants_followers=True)  # from the first time on it is, whoever follows

    def drop_follower(self, name: str, address: str, now_s: float) -> Participant | None:
        """Have the follower at `address` never take over from `name`. Raises StoreError if `name` was given up."""
        participant = self.record_heartbeat(name, now_s)
        slot = self.slots.slots[participant.index]
        if slot.serving != name:
            raise StoreError(f"{participant} does not serve any more")
        if not slot.follower or self.participants[slot.follower].address != address:
            return None
        follower = self.participants[slot.follower]
        self._lose(slot.follower)
        return follower

    def _lose(self, name: str) -> None:
        participant = self.participants[name]
        participant.is_lost = True
        if participant.role == "server" and self.replicas > 1:
            self.slots.lose(name)

    def has_successor(self, participant: Participant) -> bool:
        """Whether the part of a server that was lost is served by another."""
        return participant.role == "server" and bool(self.slots.slots[participant.index].serving) and self.replicas > 1

    def record_heartbeat(self, name: str, now_s: float) -> Participant:
        """Note a sign of life. Raises StoreError for a process that is not known, or was given up."""
        participant = self.participants.get(name)
        if participant is None:
            raise StoreError(f"{name} is not known to this store: was the server started again since?")
        if participant.is_lost:
            raise StoreError(f"{participant} was given up: it was silent for {self.failure_timeout_s:g} s")
        participant.heard_s = now_s
        return participant

    def leave(self, name: str) -> None:
        if name in self.participants:
            self.participants[name].has_left = True
            self._at_barrier.pop(name, None)
            if self.replicas > 1:
                self.slots.lose(name)

    def lose_silent(self, now_s: float) -> list[Participant]:
        """Give up those that have not been heard of for the failure timeout, and return them.

        To be called several times a second. Time in which this process was busy, and heard nobody, does not count.
        """
        deaf_s = now_s - self._looked_s if self._looked_s is not None else 0.0
        self._looked_s = now_s
        if deaf_s > _DEAF_S:
            for participant in self.participants.values():
                participant.heard_s += deaf_s
        return self._give_up(lambda participant: now_s - participant.heard_s > self.failure_timeout_s)

    def lose_dead(self, is_dead: Callable[[Participant], bool]) -> list[Participant]:
        """Give up servers whose process has ended, and return them. Only where others can take their place."""
        if self.replicas == 1:
            return []
        return self._give_up(lambda participant: participant.role == "server" and is_dead(participant))

    def _give_up(self, is_lost: Callable[[Participant], bool]) -> list[Participant]:
        lost = [name for name, one in self.participants.items() if one.is_here and is_lost(one)]
        for name in lost:
            self._lose(name)
        return [self.participants[name] for name in lost]

    @property
    def lost_workers(self) -> list[str]:
        return [name for name, one in self.participants.items() if one.is_lost and one.role == "worker"]

    def present(self, role: Role) -> list[Participant]:
        return [participant for participant in self.participants.values() if participant.role == role]

    @property
    def is_complete(self) -> bool:
        """Whether everybody who is expected has come."""
        return not self.num_missing_servers and len(self.present("worker")) >= self.num_workers

    @property
    def is_over(self) -> bool:
        """Whether all workers that were expected have come and gone."""
        workers = self.present("worker")
        return 0 < self.num_workers <= len(workers) and not any(worker.is_here for worker in workers)

    def declare(
        self, name: str, key: str, kind: str, shape: Sequence[int], sequence: int, now_s: float
    ) -> tuple[KeyRecord, bool]:
        """Record that a worker initialises a key; return the record and whether that worker brings the value.

        Where the number of workers is known, the value is that of worker 0; else that of the first who comes. Who
        takes its task over when the first one does not finish is the next who asks after the failure timeout.
        Raises StoreError for a second declaration by the same worker (of another `sequence`: else it is the same, sent
        again), or one that differs from the first.
        """
        shape = tuple(shape)
        record = self.keys.get(key)
        if record is None:
            loads = [0] * self.num_servers
            for other in self.keys.values():
                for cut in other.cuts:
                    loads[cut.server] += (cut.stop - cut.start) * ITEM_BYTES[other.kind]
            owner = name if not self.num_workers else self._first_worker()
            record = KeyRecord(len(self.keys), kind, shape, place(kind, shape, loads), owner, now_s)
            self.keys[key] = record
        if record.declared_by.get(name, sequence) != sequence:
            raise StoreError(f"key '{key}' has been initialised before: init each key once, then push to it")
        if (kind, shape) != (record.kind, record.shape):
            raise StoreError(
                f"key '{key}' is {record.kind} of shape {record.shape} for another worker, and {kind} of shape {shape} "
                "here: all workers must initialise it alike"
            )
        record.declared_by[name] = sequence
        if not record.is_ready and record.owner != name and now_s - record.placed_s > self.failure_timeout_s:
            record.owner, record.placed_s = name, now_s
        return record, record.owner == name and not record.is_ready

    def finish(self, key: str) -> None:
        """The value of the key is on the servers."""
        self.keys[key].is_ready = True

    def locate(self, key: str) -> KeyRecord:
        """Return the record of a key that has a value. Raises StoreError with the nearest name if there is none."""
        record = self.keys.get(key)
        if record is None:
            known = [name for name, other in self.keys.items() if other.is_ready]
            raise StoreError(f"key '{key}' has not been initialised: call init first{nearest(key, known)}")
        if not record.is_ready:
            raise StoreError(f"key '{key}' has no value yet: {self.describe(record.owner)} is about to bring it")
        return record

    def enter_barrier(self, name: str, number: int) -> bool:
        """A worker is at its barrier: return whether it may pass. Raises StoreError if one of them is lost."""
        if number <= self.participants[name].num_barriers:
            return True  # it has passed already, and asks again since it did not hear so
        self._at_barrier[name] = number
        missing = self.missing_at_barrier()
        lost = [participant for participant in missing if participant.is_lost]
        if lost:
            raise StoreError(f"barrier: {join(lost)} {'is' if len(lost) == 1 else 'are'} lost")
        if missing:
            return False
        for other, its_number in self._at_barrier.items():
            self.participants[other].num_barriers = its_number
        self._at_barrier.clear()
        return True

    def has_passed_barrier(self, name: str, number: int) -> bool:
        """Whether a worker has passed its barrier of this number."""
        return number <= self.participants[name].num_barriers

    def leave_barrier(self, name: str) -> None:
        """A worker has given up waiting."""
        self._at_barrier.pop(name, None)

    def missing_at_barrier(self) -> list[Participant]:
        """Return the workers that have not come to the barrier. Those that left in order are not waited for."""
        return [
            participant
            for name, participant in self.participants.items()
            if participant.role == "worker"
            and not participant.has_left
            and name not in self._at_barrier
            and (self.num_workers or not participant.is_lost)
        ]

    def describe(self, name: str) -> str:
        return str(self.participants[name]) if name in self.participants else "worker 0"

    def _first_worker(self) -> str:
        return next((name for name, one in self.participants.items() if one.role == "worker" and one.index == 0), "")


def join(participants: Iterable[Participant]) -> str:
    return ", ".join(str(participant) for participant in participants)


def describe_missing(servers_missing: int, num_servers: int, workers_present: int, num_workers: int) -> str:
    """Return who has not come yet, for people; empty if everybody has."""
    parts = []
    workers_missing = max(0, num_workers - workers_present)
    for missing, expected, name in (
        (servers_missing, num_servers, "server"),
        (workers_missing, num_workers, "worker"),
    ):
        if missing:
            parts.append(f"{missing} of {expected} {name}{'s' if expected > 1 else ''}")
    return " and ".join(parts)
