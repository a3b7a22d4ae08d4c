"""The engine of agents: the launcher's side. Places processes on agents, and reports what becomes of them.

An agent that is silent for `failure_timeout` is given up: its processes count as killed, nothing that it says later
counts, and another agent is asked for. What is decided is in `agents.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from cordee.cluster.engine import (
    Action,
    AgentLost,
    CannotStart,
    Capacity,
    EngineWaits,
    Exited,
    ProcessSpec,
    Report,
    Started,
    Waiting,
)
from cordee.cluster.engines.agent_messages import (
    AGENT,
    GIVEN_UP,
    LIMITS,
    AgentOrder,
    AgentReport,
    AgentStatus,
    Command,
    Commands,
    Enrol,
    Enrolled,
    Leave,
    LogText,
    SignalProcess,
    StatusHeard,
)
from cordee.cluster.engines.agents import SIGKILL, AgentRecord, Agents, AgentSource, EngineRequest
from cordee.cluster.engines.local import LocalEngine
from cordee.cluster.members import MOST_TIMEOUTS
from cordee.communication.channel import Peer, Received, ServerChannel
from cordee.communication.endpoint import Speaker
from cordee.communication.messages import Message, Refused
from cordee.communication.this_host import find_listening, host_id
from cordee.communication.wire import Codec
from cordee.core.errors import CommunicationError, JobError

log = logging.getLogger("cordee.agents")

WAITING_EVERY_S = 1.0  # between two reports that a process waits for a slot
LONG_WAIT_S = 30.0  # after which people are told
RESEND_S = 1.0  # after which a command that was not carried out is sent again
CLOSE_S = 3.0  # that agents have to end their processes


class AgentEngine:
    """The `Engine` of a source of agents. Processes for the launcher's host are started by a local engine.

    A thread hears agents, so that they are served while the launcher does something else.
    """

    def __init__(self, source: AgentSource, preload: Sequence[str], request: EngineRequest) -> None:
        self._source = source
        self._preload = tuple(preload)
        self._capacity = source.capacity()
        self._check_capacity(request)
        timeout_s = request.job.cluster.failure_timeout_s
        self._agents = Agents(timeout_s, request.num_spares)
        self._credentials = source.credentials()
        self._run = secrets.token_hex(8)
        self._num_agents = 0
        self._lock = threading.RLock()
        self._reports: deque[Report] = deque()
        self._next_waiting_s = 0.0
        self._drained_s = time.monotonic()  # when nothing was left to be read from agents
        self._waits_since_s: float | None = None
        self._has_said = False  # that processes wait
        self._last_failure = ""
        self._peers: dict[int, Peer] = {}
        self._is_closing = threading.Event()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        address = "tcp://127.0.0.1:*"
        if self._capacity.address:
            address = find_listening(self._capacity.address).address
        speaker = Speaker(run=self._run, name="launcher", incarnation=time.time_ns())
        self._channel = ServerChannel(
            address, speaker, Codec(AGENT, LIMITS), self._credentials.keys, admits_every_key=True
        )
        self._local = LocalEngine(preload)
        self._poll = select.epoll()
        self._poll.register(self._local.fileno(), select.EPOLLIN)
        self._poll.register(self._wake, select.EPOLLIN)
        self._thread = threading.Thread(target=self._serve, name="cordee-agents", daemon=True)
        self._thread.start()
        with self._lock:
            for _ in range(request.num_agents):
                self._ask_for_agent()

    def _check_capacity(self, request: EngineRequest) -> None:
        capacity, needed = self._capacity, request.num_agents
        if capacity.is_limit and not capacity.may_grow and capacity.num_slots < needed:
            there = ", ".join(f"{host}: {slots}" for host, slots in capacity.slots.items()) or "none"
            spares = request.num_spares
            most = max(0, capacity.num_slots - spares)
            raise JobError(
                f"the job has {request.num_slots} workers{f' and {spares} spares' if spares else ''}, and the cluster "
                f"has {capacity.num_slots} free slots ({there}): set strategy.workers to at most {most}"
                f"{', cluster.spares to fewer' if spares else ''}, or add hosts ({self._source.describe()})"
            )

    def capacity(self) -> Capacity:
        return self._capacity

    def describe(self) -> str:
        """Return what was recognised."""
        return self._source.describe()

    def members(self) -> Sequence[Started]:
        with self._lock:
            placed = [started for record in self._agents.present for started in record.processes.values()]
        return [*self._local.members(), *(started for started in placed if started.pid)]

    def fileno(self) -> int:
        return self._poll.fileno()

    def start(self, spec: ProcessSpec) -> None:
        if spec.place == "launcher":
            self._local.start(spec)
            return
        with self._lock:
            if (spec.index, spec.incarnation) not in self._agents.specs:
                self._agents.ask(spec, time.monotonic())
                self._place(time.monotonic())

    def signal(self, index: int, action: Action) -> None:
        with self._lock:
            if (queued := self._agents.queue.get(index)) is not None:
                if action == "kill":
                    del self._agents.queue[index]
                    self._report(Exited(index, queued.incarnation, 0, SIGKILL))
            elif (holder := self._agents.holder(index)) is not None:
                self._send(holder, SignalProcess(index, action))
            else:
                self._local.signal(index, action)

    def reports(self, timeout_s: float = 0.0) -> Iterator[Report]:
        self._poll.poll(max(timeout_s, 0.0))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        with self._lock:
            self._check_agents(time.monotonic())
            found = list(self._reports)
            self._reports.clear()
        return iter([*self._local.reports(), *found])

    def close(self) -> None:
        with self._lock:
            for record in self._agents.present:
                self._send(record, Leave())
        deadline_s = time.monotonic() + CLOSE_S
        while (now_s := time.monotonic()) < deadline_s and self._agents.present:
            time.sleep(0.02)
            with self._lock:
                for ended in self._source.ended():
                    self._agents.lose(self._agents.records[ended.number], ended.how, now_s)
                for record in self._agents.present:
                    if not record.undone and not record.processes:  # it has heard, and all of its processes have ended
                        self._agents.lose(record, "the run is over", now_s)
        self._is_closing.set()
        self._channel.close()
        self._thread.join(timeout=2.0)
        try:
            self._source.close()
        finally:
            self._local.close()
            self._poll.close()
            os.close(self._wake)

    def _ask_for_agent(self) -> None:
        number = self._num_agents
        self._num_agents += 1
        order = AgentOrder(
            number=number,
            run=self._run,
            address=self._channel.address,
            server_key=self._credentials.keys.public.hex(),
            ticket=self._credentials.ticket(number),
            failure_timeout_s=self._agents.failure_timeout_s,
            preload=self._preload,
        )
        self._agents.order(order)
        self._source.start(order)

    def _check_agents(self, now_s: float) -> None:
        """Give up who is gone or silent, ask for others, and say who waits."""
        agents = self._agents
        for ended in self._source.ended():
            self._lose(agents.records[ended.number], ended.how)
        # What this process has not read yet, because it had no processor time itself, is not silence.
        for record in agents.silent(max(self._drained_s, now_s - MOST_TIMEOUTS * agents.failure_timeout_s)):
            silent_s = now_s - record.heard_s
            self._lose(
                record, f"nothing was heard of agent {record.order.number} on {record.host} for {silent_s:.1f} s"
            )
        for record in agents.present:
            if record.undone and now_s - record.sent_s > RESEND_S:
                self._send_undone(record)
        self._place(now_s)
        for _ in range(agents.find_lacking(now_s)):
            self._ask_for_agent()
        if agents.is_hopeless:
            for spec in agents.queue.values():
                self._report(CannotStart(spec.index, spec.incarnation, self._last_failure))
            agents.queue.clear()
        if agents.queue and now_s >= self._next_waiting_s:
            self._next_waiting_s = now_s + WAITING_EVERY_S
            for spec in agents.queue.values():
                self._report(Waiting(spec.index, spec.incarnation))
        self._say_who_waits(now_s)

    def _say_who_waits(self, now_s: float) -> None:
        """Nothing else is heard of a cluster that gives no slot: it may be full, or its autoscaler at work."""
        num_waiting = len(self._agents.queue)
        if not num_waiting:
            self._waits_since_s, self._has_said = None, False
        elif self._waits_since_s is None:
            self._waits_since_s = now_s
        elif not self._has_said and now_s - self._waits_since_s > LONG_WAIT_S:
            self._has_said = True
            who = "a process has waited" if num_waiting == 1 else f"{num_waiting} processes have waited"
            self._report(EngineWaits(f"{who} for a slot for {LONG_WAIT_S:g} s ({self._source.describe()})"))

    def _lose(self, record: AgentRecord, how: str) -> None:
        if record.fate:
            return
        was_there = record.is_there
        self._last_failure = how
        ends = self._agents.lose(record, how, time.monotonic())
        for exited in ends:
            self._report(exited)
        self._peers.pop(record.order.number, None)
        self._source.stop(record.order.number)
        if how and not self._is_closing.is_set():
            what = "it had no processes" if was_there else "it did not come"
            what = "its processes are lost" if ends else what
            self._report(AgentLost(record.pid, f"{how}: {what}", keeps_processes=False))

    def _place(self, now_s: float) -> None:
        for record, spec in self._agents.place(now_s):
            self._send(record, spec)

    def _send(self, record: AgentRecord, command: Command) -> None:
        record.num_sent += 1
        record.undone.append(msgspec.json.encode(command))
        self._send_undone(record, only_last=True)

    def _send_undone(self, record: AgentRecord, *, only_last: bool = False) -> None:
        if (peer := self._peers.get(record.order.number)) is None:
            return
        record.sent_s = time.monotonic()
        count = 1 if only_last else len(record.undone)
        first = record.num_sent - count + 1
        with contextlib.suppress(CommunicationError):  # it is sent again, or the agent is given up
            self._channel.send(peer, Commands(first, tuple(record.undone)[-count:]))

    def _report(self, report: Report) -> None:
        self._reports.append(report)
        os.eventfd_write(self._wake, 1)

    def _serve(self) -> None:
        num_lost = 0  # connections
        while not self._is_closing.is_set():
            looked_s = time.monotonic()
            try:
                if (num_now := self._channel.num_lost) != num_lost:
                    num_lost = num_now
                    with self._lock:
                        self._source.look()
                    os.eventfd_write(self._wake, 1)
                received = self._channel.receive(0.0)
                if received is None:  # of many agents one speaks every moment: it is never quiet for a while
                    with self._lock:
                        self._drained_s = looked_s
                    received = self._channel.receive(0.2)
            except CommunicationError:
                return
            if received is None:
                continue
            with self._lock:
                reply = self._handle(received)
            with contextlib.suppress(CommunicationError):
                self._channel.reply(received, reply)

    def _handle(self, received: Received) -> Message:
        agents, key, now_s = self._agents, received.envelope.sender, time.monotonic()
        message = received.message
        if isinstance(message, Enrol):
            if problem := agents.enrol(message, key, now_s):
                log.warning("an agent of %s is refused: %s", message.host, problem)
                refused = agents.records.get(message.number)
                if refused is not None and refused.problem:  # who only ends says no more than its exit code
                    self._lose(refused, refused.problem)
                return Refused("refused", problem)
            self._peers[message.number] = received.peer
            os.eventfd_write(self._wake, 1)  # processes may wait for it
            command_line = tuple(os.fsencode(argument) for argument in sys.argv)
            return Enrolled(agents.failure_timeout_s / 5, command_line, host_id())
        record = agents.of_key(key)
        if record is None or not isinstance(message, AgentStatus):
            return Refused("unknown-agent")
        if record.fate:
            return Refused(GIVEN_UP, record.fate)
        record.heard_s = now_s
        self._peers[record.order.number] = received.peer
        while record.undone and record.num_sent - len(record.undone) < message.num_done:
            record.undone.popleft()
        for number, content in enumerate(message.reports, message.first):
            if number == record.num_heard + 1:
                record.num_heard = number
                self._take(record, msgspec.json.decode(content, type=AgentReport))
        for working in agents.take_activity(record, message):
            self._report(working)
        return StatusHeard(record.num_heard)

    def _take(self, record: AgentRecord, report: AgentReport) -> None:
        if isinstance(report, LogText):
            spec = self._agents.specs.get((report.index, report.incarnation))
            if spec is not None and spec.log is not None:
                with contextlib.suppress(OSError), Path(spec.log).open("ab") as file:  # a full disk ends no run
                    file.write(report.content)
        elif (known := self._agents.take(record, report)) is not None:
            self._report(known)
