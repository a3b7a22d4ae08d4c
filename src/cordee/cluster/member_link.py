"""A process's side of a run, whatever its kind: its connection to the coordinator, and that it ends with the run."""

from __future__ import annotations

import abc
import contextlib
import logging
import math
import os
import socket
import sys
import threading
import time
import tomllib
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import msgspec

from cordee.checkpoint.stored_run import run_name, why_not_shared
from cordee.cluster.control import has_run_directory
from cordee.cluster.members import REPLACED, incarnation_of, member_name
from cordee.cluster.messages import Event, Numbered, TimelineReport
from cordee.cluster.processes import is_alive
from cordee.communication.channel import ClientChannel, Received, RefusedError
from cordee.communication.endpoint import Admission, Speaker
from cordee.communication.keys import ClientKeys
from cordee.communication.messages import (
    MOST_PROBLEM_CHARACTERS,
    Bye,
    Failure,
    Heartbeat,
    Join,
    Joined,
    Message,
    Refused,
)
from cordee.communication.this_host import host_id, own_address
from cordee.communication.traffic import SENT
from cordee.communication.wire import Codec
from cordee.core import Job, env
from cordee.core.errors import CommunicationError, TrainingError
from cordee.monitoring.events import AnyEvent
from cordee.monitoring.timeline import Ages, Line, Timeline, TimelineFolder

log = logging.getLogger("cordee.link")

AGAIN_S = 0.01  # between two attempts to ask
RETRY_S = 0.05  # between two attempts to send a heartbeat
LONGEST_REQUEST_S = 5.0  # of one that is not to wait for ever, before it is made again
LONGEST_ABSENCE_S = 30.0  # of the coordinator, before a process that cannot look at the launcher ends


class MemberSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is told when it is started, or joins. Travels through a private socket, or the secure channel."""

    kind: str  # of the run
    role: str  # "worker", "server", "evaluator"
    index: int  # among those of its role; the place of a worker in a team may be another
    replica: int = 0  # of a server: 0 is the first to serve, the others can take its place
    serial: int = 1  # among all processes of the run: that of one which takes the place of another is larger
    run_dir: str  # on the run's host
    log_dir: str = ""  # where this process keeps its log; empty is the run directory
    run_id: str
    address: str  # of the coordinator, for processes of its host
    public: str = ""  # of the coordinator, for processes of other hosts; empty where there are none
    client_keys: str
    server_keys: str = ""
    store: str = ""  # folder where the groups of a team find themselves
    failure_timeout_s: float
    startup_timeout_s: float
    resume: bool = False
    marker: str = ""  # what the launcher wrote into the job's `checkpoint.storage`, for members to find; empty for none
    has_state: bool = True  # a server: what it starts with, or reads, is what the run has; else it is given everything
    launcher_pid: int = 0  # for one that the launcher did not start; on the launcher's host it ends with this process
    run_host: str  # id of the host that the run is on
    job: str  # as TOML
    data: str = ""  # what is known of the run's data, where workers of other hosts may join: all must have the same
    num_local: int = 1  # processes that compute on this host to begin with: they share its cores

    @property
    def is_remote(self) -> bool:
        """Whether the run is on another host: its processes cannot be looked at from here, nor its memory shared."""
        return self.run_host != host_id()

    @property
    def coordinator_address(self) -> str:
        """Where this process reaches the coordinator."""
        return self.public if self.is_remote else self.address

    @property
    def silence_s(self) -> float:
        """How long the coordinator's host may be silent before a channel to it counts as broken; 0 on its own host."""
        return self.failure_timeout_s if self.is_remote else 0.0  # nothing else shows that a connection is broken

    @property
    def host_address(self) -> str:
        """The address of this host for what goes between hosts; empty if the run has no processes on others."""
        return own_address(self.public) if self.public else ""

    @property
    def is_external(self) -> bool:
        """Whether somebody else than the launcher has started this process."""
        return self.launcher_pid > 0

    def load_job(self) -> Job:
        """Return the job of the run. Raises JobError."""
        return Job.from_dict(tomllib.loads(self.job), python_path=(self.run_dir, str(Path.cwd())))

    @property
    def name(self) -> str:
        return member_name(self.role, self.index, self.replica)

    @property
    def log_file(self) -> Path:
        """Where the log of this process is."""
        return env.log_file() or Path(self.log_dir or self.run_dir) / "logs" / f"{self.name}.log"


class MemberLink(abc.ABC):
    """One connection to the coordinator. A thread shows that this process lives, from `join` to `close`.

    The coordinator may die and come back: it is asked again what it has not answered. What must not be lost is
    numbered, and counts once however often it is said.

    A process that the launcher did not start looks at it, and ends when it does. One on another host cannot: it ends
    when the coordinator is out of reach for long.
    """

    def __init__(self, spec: MemberSpec, codec: Codec, num_returns: int = 0) -> None:
        """`num_returns` is how often this process was given up and has come back."""
        self._spec = spec
        self._keys = ClientKeys.from_text(spec.client_keys)
        speaker = Speaker(run=spec.run_id, name=spec.name, incarnation=incarnation_of(spec.serial, num_returns))
        self._is_remote = spec.is_remote
        self._channel = ClientChannel(spec.coordinator_address, speaker, codec, self._keys, silence_s=spec.silence_s)
        self._asking = threading.Lock()
        self._outbox_changed = threading.Condition()
        self._num_sent = 0
        self._heard_s = time.monotonic()  # when the coordinator last said something
        self._beat_by_s = 0.0  # when the next heartbeat is due
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._storage_problem: str | None = None  # why this process cannot read the storage; None: not looked yet
        self.step = 0  # told with each heartbeat
        self.clock_offset_us = (0, 0)  # of this host's clock to that of the coordinator's host, and its error

    @property
    def incarnation(self) -> int:
        """That this process speaks with: another one after it was given up and has come back."""
        return self._channel.speaker.incarnation

    @abc.abstractmethod
    def _reach(self, when: Literal["ask", "answered"], message: Message) -> None:
        """Pass the fault point before a request is sent, or after its answer has come."""

    @abc.abstractmethod
    def _deliver(self, message: Numbered) -> None:
        """Have the coordinator hear a numbered message. Called by one thread at a time."""

    @abc.abstractmethod
    def _await_message(self, timeout_s: float) -> Received | None:
        """Return the next message that answers no request, or None after `timeout_s` or earlier.

        Called by the thread of the heartbeats.
        """

    @abc.abstractmethod
    def _take(self, received: Received) -> None:
        """Take a message that answers no request. Called by the thread of the heartbeats."""

    def ask(self, message: Message, *, patience_s: float | None = None) -> Message:
        """Make a request and wait for its answer, for as long as it takes or at most `patience_s`. Any thread may ask.

        Asks again where no answer can come: a coordinator that dies comes back, and answers once however often it is
        asked. Raises CommunicationError if it does not.
        """
        limit_s = self._spec.startup_timeout_s if patience_s is None else patience_s
        once_s = limit_s if patience_s is None else min(limit_s, LONGEST_REQUEST_S)
        deadline_s = time.monotonic() + limit_s
        with self._asking:
            while True:
                try:
                    self._reach("ask", message)
                    asked = self._channel.begin(message, timeout_s=once_s)
                    if patience_s is None:
                        deadline_s = time.monotonic() + limit_s
                    answer = self._channel.finish(
                        asked, timeout_s=once_s, wait_on=lambda: patience_s is None and not self._is_closing.is_set()
                    ).message
                    self._heard_s = time.monotonic()
                    self._reach("answered", message)
                    return answer
                except RefusedError:
                    raise
                except CommunicationError as error:
                    if self._is_launcher_gone:
                        raise CommunicationError("the run is over: its launcher is gone") from error
                    if self._is_closing.is_set() or time.monotonic() > deadline_s:
                        raise
                    log.info("asking again: %s", error)
                    time.sleep(AGAIN_S)

    def _join(self, patience_s: float | None = None, **server: Any) -> Joined:
        """Have this process registered; a server says where it listens, and what it has."""
        if self._storage_problem is None:  # once: one that comes back is waited for
            self._storage_problem = self._find_storage_problem()
        join = Join(os.getpid(), socket.gethostname(), host_id(), storage_problem=self._storage_problem, **server)
        sent_s = time.time()
        try:
            reply = self.ask(join, patience_s=patience_s)
        except RefusedError as error:
            if error.reason != Admission.STALE_INCARNATION:
                raise
            refused = Refused(REPLACED, f"another process is {self._spec.name} now")
            raise RefusedError(self._channel.address, refused) from error
        assert isinstance(reply, Joined), reply
        if self._is_remote and reply.time_s:
            self.clock_offset_us = measure_offset(sent_s, reply.time_s, time.time())
        return reply

    def _find_storage_problem(self) -> str:
        """Return why this process cannot read what the launcher wrote into the storage of the run, if it cannot."""
        if not self._spec.marker:
            return ""
        url = self._spec.load_job().checkpoint.storage
        return why_not_shared(url, run_name(self._spec.run_dir), self._spec.marker)[:MOST_PROBLEM_CHARACTERS]

    def send_timeline(self, line: Line) -> None:
        """Have the coordinator write a line of this process's timeline; it is lost while there is no coordinator."""
        with contextlib.suppress(CommunicationError):
            self._channel.send(TimelineReport(line), timeout_s=0.0)

    def emit(self, event: AnyEvent) -> None:
        """Pass an event on. It reaches the coordinator, now or when it is back."""
        self._send_numbered(Event(event))

    def fail(self, error: BaseException) -> None:
        """Report the error that this process ends with."""
        self._send_numbered(describe_failure(error, self.step))

    def leave(self) -> None:
        """Say that this process is done. Returns when that has been heard."""
        self._send_numbered(Bye())

    def _send_numbered(self, message: Numbered) -> None:
        with self._outbox_changed:
            self._num_sent += 1
            self._deliver(msgspec.structs.replace(message, number=self._num_sent))

    def _beat(self) -> None:
        """Show that this process lives."""
        self._channel.send(Heartbeat(self.step), timeout_s=0.0)

    def _keep_alive(self, heartbeat_s: float) -> None:
        """Send a heartbeat every `heartbeat_s`, and take what the coordinator says, until `_is_closing` is set."""
        while not self._is_closing.is_set():
            try:
                if time.monotonic() >= self._beat_by_s:
                    self._end_with_the_run()
                    # Before it is sent: what happens meanwhile may ask for another.
                    self._beat_by_s = time.monotonic() + heartbeat_s
                    self._beat()
                received = self._await_message(max(0.0, self._beat_by_s - time.monotonic()))
                if received is not None:
                    self._heard_s = time.monotonic()
                    self._take(received)
            except CommunicationError:  # the coordinator is busy, or gone, and may come back
                self._beat_by_s = 0.0
                self._is_closing.wait(min(heartbeat_s, RETRY_S))

    def _start_heartbeats(self, heartbeat_s: float) -> None:
        self._thread = threading.Thread(
            target=self._keep_alive, args=(heartbeat_s,), name="cordee-heartbeat", daemon=True
        )
        self._thread.start()

    @property
    def _is_launcher_gone(self) -> bool:
        return self._spec.is_external and not self._is_remote and not is_alive(self._spec.launcher_pid)

    def _end_with_the_run(self) -> None:
        """End this process if the run is over: the main thread may wait for others, or for an answer, for ever."""
        if self._is_launcher_gone:
            log.error("the run is over: its launcher (process %d) is gone", self._spec.launcher_pid)
            os._exit(1)
        if self._is_remote and time.monotonic() - self._heard_s > LONGEST_ABSENCE_S:
            message = f"the run has ended or is out of reach: nothing was heard of it for {LONGEST_ABSENCE_S:g} s"
            log.error("%s", message)
            sys.stderr.write(f"cordee: {message}\n")
            os._exit(1)

    def close(self) -> None:
        self._is_closing.set()
        self._channel.close()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def measure_offset(sent_s: float, there_s: float, received_s: float) -> tuple[int, int]:
    """Return what to add to the own clock for the other one, and how wrong that may be, in microseconds. Pure.

    The other clock was read some time between sending the question and receiving the answer.
    """
    return round((there_s - (sent_s + received_s) / 2) * 1e6), math.ceil((received_s - sent_s) / 2 * 1e6)


def open_timeline(spec: MemberSpec, link: MemberLink, take_ages: Callable[[], Ages] = dict) -> Timeline:
    """Return what records the phases of this process: in the run directory, or through the coordinator."""
    run_dir = Path(spec.run_dir)
    if has_run_directory(run_dir, spec.run_id):
        folder = TimelineFolder(run_dir)

        def write(line: Line) -> None:
            folder.write(spec.name, line)
    else:
        write = link.send_timeline
    return Timeline(spec.name, write, lambda: link.clock_offset_us, _sent, take_ages, SENT.take_links)


def _sent() -> int:
    return SENT.num_bytes


class PeerError(TrainingError):
    """What another member raises at the same time: its own report, which has the traceback, is the one to show."""


def describe_failure(error: BaseException, step: int) -> Failure:
    """Return what is reported of an error; the loss or the failure of a peer is a consequence, all else a cause."""
    text = "".join(traceback.format_exception(error))[-60_000:]
    line = f"raised {type(error).__name__}: {error}"[:4000]
    return Failure(step, line, text, isinstance(error, CommunicationError | PeerError))
