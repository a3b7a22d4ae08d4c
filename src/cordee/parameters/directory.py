"""The directory of a store: who takes part, which keys there are and where, who has come to the barrier. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cordee.communication.buffers import ITEM_BYTES
from cordee.core.errors import StoreError, nearest
from cordee.parameters.messages import Cut, Role
from cordee.parameters.placement import place

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
    meetings: int = 0  # barriers it has passed
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
    """All decisions of the directory. `num_workers` 0: as many as come, and the store ends when it is told to."""

    def __init__(self, *, num_workers: int, num_servers: int, failure_timeout_s: float) -> None:
        self.num_workers, self.num_servers = num_workers, num_servers
        self.failure_timeout_s = failure_timeout_s
        self.participants: dict[str, Participant] = {}
        self.keys: dict[str, KeyRecord] = {}
        self._at_barrier: dict[str, int] = {}  # worker -> the number of its barrier
        self._looked_s: float | None = None

    def enlist(self, name: str, role: Role, *, pid: int, host: str, address: str, now_s: float) -> Participant:
        """Register a process; again for one that is known. Raises StoreError if there is no place for it."""
        known = self.participants.get(name)
        if known is not None:
            return self.hear(name, now_s)
        same = [participant for participant in self.participants.values() if participant.role == role]
        if self.num_workers and role == "worker" and len(same) >= self.num_workers:
            raise StoreError(
                f"the store was started for {self.num_workers} workers, and {len(same)} have come: start it with more"
            )
        if role == "server" and len(same) >= self.num_servers:
            raise StoreError(
                f"the store was started for {self.num_servers} servers, and {len(same)} have come: start it with more"
            )
        self.participants[name] = Participant(role, len(same), pid, host, address, now_s)
        return self.participants[name]

    def hear(self, name: str, now_s: float) -> Participant:
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

    def lose_silent(self, now_s: float) -> list[Participant]:
        """Give up those that have not been heard of for the failure timeout, and return them.

        To be called several times a second. Time in which this process was busy, and heard nobody, does not count.
        """
        deaf_s = now_s - self._looked_s if self._looked_s is not None else 0.0
        self._looked_s = now_s
        if deaf_s > _DEAF_S:
            for participant in self.participants.values():
                participant.heard_s += deaf_s
        silent = [
            participant
            for participant in self.participants.values()
            if participant.is_here and now_s - participant.heard_s > self.failure_timeout_s
        ]
        for participant in silent:
            participant.is_lost = True
        return silent

    @property
    def lost_workers(self) -> list[str]:
        return [name for name, one in self.participants.items() if one.is_lost and one.role == "worker"]

    def present(self, role: Role) -> list[Participant]:
        return [participant for participant in self.participants.values() if participant.role == role]

    @property
    def is_complete(self) -> bool:
        """Whether everybody who is expected has come."""
        return len(self.present("server")) >= self.num_servers and len(self.present("worker")) >= self.num_workers

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

    def meet(self, name: str, number: int) -> bool:
        """A worker has come to its barrier; return whether it may go on. Raises StoreError if one of them is lost."""
        if number <= self.participants[name].meetings:
            return True  # it has passed already, and asks again since it did not hear so
        self._at_barrier[name] = number
        missing = self.missing_at_barrier()
        lost = [participant for participant in missing if participant.is_lost]
        if lost:
            raise StoreError(f"barrier: {join(lost)} {'is' if len(lost) == 1 else 'are'} lost")
        if missing:
            return False
        for other, its_number in self._at_barrier.items():
            self.participants[other].meetings = its_number
        self._at_barrier.clear()
        return True

    def has_met(self, name: str, number: int) -> bool:
        """Whether a worker has passed its barrier of this number."""
        return number <= self.participants[name].meetings

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
