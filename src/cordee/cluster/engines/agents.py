"""Where agents come from, whom the launcher believes, and which agent gets which process. Decided without I/O.

An `AgentSource` starts agents and notices their end: that is all that one cluster engine does differently from another.
Agents prove themselves by a ticket that is good for one agent.
"""

from __future__ import annotations

import abc
import hmac
import math
import secrets
from collections import Counter, deque
from collections.abc import Sequence

import msgspec

from cordee.cluster.engine import (
    CannotStart,
    Capacity,
    Exited,
    ProcessSpec,
    Report,
    Started,
    Working,
)
from cordee.cluster.engines.agent_messages import (
    AgentOrder,
    AgentStatus,
    Enrol,
    Versions,
)
from cordee.communication.keys import ServerKeys, make_keys
from cordee.core import Job

MOST_FAILURES, LONGEST_WAIT_S = 3, 30.0  # agents in a row that do not come; between asking for two of them
APART_S = 2.0  # that a process waits for a host without its like, before it goes where there is one
SIGKILL = -9


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a run needs of an engine."""

    job: Job
    num_slots: int  # workers at the start
    num_spares: int = 0  # agents that are ready for a process that is replaced

    @property
    def num_agents(self) -> int:
        """Agents at the start."""
        return self.num_slots + self.num_spares


class AgentEnded(msgspec.Struct, frozen=True):
    """An agent is gone, or will not come."""

    number: int
    how: str  # in words


class AgentSource(abc.ABC):
    """Where agents come from. Methods return at once; they are called by one thread at a time."""

    name: str  # as users write it

    @abc.abstractmethod
    def describe(self) -> str:
        """Return what was recognised, for the first line of a run: "Ray 2.60 at 10.0.0.1:6379, 2 nodes, 4 CPUs"."""

    @abc.abstractmethod
    def capacity(self) -> Capacity: ...

    @abc.abstractmethod
    def start(self, order: AgentOrder) -> None:
        """Ask for one agent. It may take long to come."""

    @abc.abstractmethod
    def ended(self) -> Sequence[AgentEnded]:
        """Return the agents that have ended, or cannot be started, since this was last asked."""

    def look(self) -> None:  # noqa: B027 - not every source can find out more than it is told
        """A connection of an agent has ended: find out soon whether the agent has."""

    @abc.abstractmethod
    def stop(self, number: int) -> None:
        """End an agent that is not needed any more, or was given up."""

    @abc.abstractmethod
    def close(self) -> None:
        """End all agents, and release what they took."""

    def credentials(self) -> Credentials:
        """Return the keys of the launcher, and tickets: new ones, unless agents must know them beforehand."""
        return Credentials()


class Credentials:
    """The launcher's keys, and the tickets of agents."""

    def __init__(self, keys: ServerKeys | None = None) -> None:
        self.keys = keys or make_keys(0)[0]

    def ticket(self, number: int) -> str:
        return secrets.token_urlsafe(24)


class AgentRecord(msgspec.Struct):
    """What is known of one agent."""

    order: AgentOrder
    key: str = ""  # public key; empty until its ticket was used
    host: str = ""
    host_id: str = ""
    pid: int = 0
    heard_s: float = 0.0
    fate: str = ""  # why it was given up, or has ended
    problem: str = ""  # why it cannot take part although its ticket is good
    num_sent: int = 0  # commands so far
    undone: deque[bytes] = msgspec.field(default_factory=deque)  # commands that it has not confirmed; the last ones
    num_heard: int = 0  # of its reports
    sent_s: float = 0.0  # when commands were last sent
    processes: dict[int, Started] = {}  # by index; pid 0 until it is known
    processor_s: dict[int, float] = {}

    @property
    def is_there(self) -> bool:
        return bool(self.key) and not self.fate


class Agents:
    """The agents of a run, and the processes that wait for one. Decides without I/O; the clock is passed in."""

    def __init__(self, failure_timeout_s: float, num_spares: int = 0) -> None:
        self.failure_timeout_s = failure_timeout_s
        self._num_spares = num_spares
        self.records: dict[int, AgentRecord] = {}
        self.queue: dict[int, ProcessSpec] = {}  # by index: no slot yet
        self.specs: dict[tuple[int, int], ProcessSpec] = {}  # all that were ever asked for
        self._asked_s: dict[int, float] = {}  # by index: since when it waits
        self._gathered_s = math.inf  # when the first agents had their time to come
        self._num_failures = 0  # agents in a row that did not come
        self._next_ask_s = -math.inf

    def order(self, order: AgentOrder) -> None:
        self.records[order.number] = AgentRecord(order)

    def enrol(self, enrol: Enrol, key: str, now_s: float) -> str:
        """Take an agent; return why it is refused, if it is. The same agent may say so again."""
        record = self.records.get(enrol.number)
        if record is None or not hmac.compare_digest(record.order.ticket, enrol.ticket):
            return "the ticket is not one of this run, or was used"
        if record.key and record.key != key:
            return "the ticket was used by another agent"
        if record.fate:
            return f"agent {enrol.number} was given up: {record.fate}"
        if enrol.versions != (own := Versions.here()):
            record.problem = (
                f"{enrol.host} has {enrol.versions.describe()}, the run {own.describe()}: install the same versions "
                "everywhere"
            )
            return record.problem
        record.key, record.host, record.host_id, record.pid = key, enrol.host, enrol.host_id, enrol.pid
        record.heard_s = now_s
        self._num_failures = 0
        self._gathered_s = min(self._gathered_s, now_s + self.failure_timeout_s)
        return ""

    def ask(self, spec: ProcessSpec, now_s: float) -> None:
        """Have a process wait for a slot. The end of an earlier one of its index is not for the new one."""
        self.specs[spec.index, spec.incarnation] = spec
        self.queue[spec.index] = spec
        self._asked_s[spec.index] = now_s

    def of_key(self, key: str) -> AgentRecord | None:
        return next((record for record in self.records.values() if record.key == key), None)

    @property
    def present(self) -> list[AgentRecord]:
        return [record for record in self.records.values() if record.is_there]

    @property
    def num_expected(self) -> int:
        """Agents that are there or were asked for."""
        return sum(not record.fate for record in self.records.values())

    def find_slot(self) -> AgentRecord | None:
        """Return the agent for the next process: one whose slot is free; on the host that has the most such agents."""
        free = self._free
        by_host: dict[str, int] = {}
        for record in free:
            by_host[record.host_id] = by_host.get(record.host_id, 0) + 1
        return min(free, key=lambda r: (-by_host[r.host_id], r.order.number), default=None)

    def find_beside(self, spec: ProcessSpec, now_s: float) -> AgentRecord | None:
        """Return the agent for a process without a slot: on the host with the fewest of its like, then of them all.

        None before the agents of the start are there, so that the first host is not given everything; and while a host
        without its like may still come.
        """
        num_coming = max(0, self._num_coming - self._num_spares)  # a spare may never come
        if num_coming and now_s < self._gathered_s:
            return None
        like, all_of = Counter[str](), Counter[str]()
        for record in self.present:
            beside = [other for other in self._specs_of(record) if other.place == "beside"]
            all_of[record.host_id] += len(beside)
            like[record.host_id] += sum(other.apart == spec.apart for other in beside if spec.apart)
        found = min(
            self.present,
            key=lambda r: (like[r.host_id], all_of[r.host_id], len(r.processes), r.order.number),
            default=None,
        )
        may_come = num_coming > 0 or now_s - self._asked_s[spec.index] < APART_S
        return None if found is not None and like[found.host_id] and may_come else found

    def place(self, now_s: float) -> list[tuple[AgentRecord, ProcessSpec]]:
        """Return which of the processes that wait go where. They wait no longer."""
        placed = []
        for index, spec in list(self.queue.items()):
            record = self.find_beside(spec, now_s) if spec.place == "beside" else self.find_slot()
            if record is None:
                continue
            del self.queue[index]
            record.processes[index] = Started(index, spec.incarnation, 0, record.host_id)
            placed.append((record, spec))
        return placed

    def find_lacking(self, now_s: float) -> int:
        """Return how many agents to ask for: one for each process that waits for a slot, and has none on its way.

        Processes without a slot need one agent in all. Spares that were used are asked for again. After agents that did
        not come nobody is asked for a while, the longer the more there were.
        """
        wanted = sum(spec.place == "slot" for spec in self.queue.values())
        if self.queue and not self.present:
            wanted = max(wanted, 1)
        if self.present:  # before, those of the start are on their way
            wanted += max(0, self._num_spares - len(self._free))
        lacking = wanted - self._num_coming
        return lacking if lacking > 0 and now_s >= self._next_ask_s else 0

    @property
    def _free(self) -> list[AgentRecord]:
        """The agents whose slot is free."""
        return [record for record in self.present if not any(s.place == "slot" for s in self._specs_of(record))]

    @property
    def _num_coming(self) -> int:
        """Agents that are on their way."""
        return sum(not record.fate and not record.key for record in self.records.values())

    def _specs_of(self, record: AgentRecord) -> list[ProcessSpec]:
        """Return the orders of the processes that an agent has."""
        return [self.specs[started.index, started.incarnation] for started in record.processes.values()]

    @property
    def is_hopeless(self) -> bool:
        """Whether nothing runs, and agents do not come."""
        return self._num_failures >= MOST_FAILURES and not self.present

    def holder(self, index: int) -> AgentRecord | None:
        """Return the agent that has a process: the newest, while the end of an earlier one was not heard of yet."""
        holders = [record for record in self.present if index in record.processes]
        return max(holders, key=lambda record: record.processes[index].incarnation, default=None)

    def take(self, record: AgentRecord, report: Started | Exited | CannotStart) -> Report | None:
        """Take what an agent says of a process; return it unless the process is not the agent's any more."""
        known = record.processes.get(report.index)
        if known is None or known.incarnation != report.incarnation:
            return None
        if isinstance(report, Started):
            record.processes[report.index] = report
        else:
            self._forget(record, known)
        return report

    def take_activity(self, record: AgentRecord, status: AgentStatus) -> list[Working]:
        found = []
        for activity in status.activity:
            known = record.processes.get(activity.index)
            if known is not None and known.incarnation == activity.incarnation:
                before_s = record.processor_s.get(activity.index, 0.0)
                record.processor_s[activity.index] = activity.processor_s
                has_worked = activity.processor_s > before_s
                found.append(Working(activity.index, activity.incarnation, has_worked, activity.is_stopped))
        return found

    def lose(self, record: AgentRecord, how: str, now_s: float) -> list[Exited]:
        """Give an agent up; return the ends of its processes."""
        if not record.key:
            self._num_failures += 1
            self._next_ask_s = now_s + min(LONGEST_WAIT_S, 2.0 ** (self._num_failures - 1))
        record.fate = record.fate or how
        ends = []
        for known in list(record.processes.values()):
            self._forget(record, known)
            reason = f"was lost with its agent: {how}"
            lost_with = f"agent {record.order.number}"
            ends.append(Exited(known.index, known.incarnation, known.pid, SIGKILL, reason, lost_with))
        return ends

    def silent(self, now_s: float) -> list[AgentRecord]:
        return [record for record in self.present if now_s - record.heard_s > self.failure_timeout_s]

    def _forget(self, record: AgentRecord, known: Started) -> None:
        del record.processes[known.index]
        record.processor_s.pop(known.index, None)
