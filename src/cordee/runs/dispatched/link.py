"""A process's line to the dispatcher of a served run."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Any

import msgspec

from cordee.cluster.engine import SIGNALS
from cordee.cluster.processes import is_alive
from cordee.communication.calls import Connection
from cordee.communication.channel import ClientChannel, RefusedError
from cordee.communication.endpoint import Speaker
from cordee.communication.keys import ClientKeys
from cordee.communication.messages import Event, Failure, Heartbeat, Message
from cordee.communication.wire import Codec
from cordee.core.errors import CommunicationError
from cordee.core.fault_points import reach
from cordee.runs.dispatched.messages import LIMITS, SERVED, AskServers, Bye, Join, Joined, Servers
from cordee.strategies.parameter_server.messages import LIMITS as PARAMETER_LIMITS
from cordee.strategies.parameter_server.messages import PARAMETERS

log = logging.getLogger(__name__)

END_SIGNAL = SIGNALS["end"]  # to a server: the run is over. SIGTERM has it hand over and leave
_AGAIN_S = 0.01
LONGEST_ABSENCE_S = 30.0  # of the dispatcher, before a worker of another host ends


class MemberSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher tells a process when it starts it. Travels through a private socket."""

    role: str  # "worker", "server", "evaluator"
    index: int  # among those of its role
    replica: int = 0  # of a server: 0 is the first to serve, the others can take its place
    run_dir: str
    run_id: str
    dispatcher: str  # address
    client_keys: str
    server_keys: str = ""
    failure_timeout_s: float
    startup_timeout_s: float
    resume: bool = False
    has_state: bool = True  # a server: what it starts with, or reads, is what the run has; else it is given everything
    launcher_pid: int = 0  # for one that the launcher did not start: it ends when this one does
    host_address: str = ""  # of this host, for what goes between hosts; empty where nobody can join from another
    job: str = ""  # as TOML, for one on another host: it has a run directory of its own
    data: str = ""  # what is known of the run's data, for one on another host
    num_local: int = 1  # processes that compute on this host: they share its cores

    @property
    def is_remote(self) -> bool:
        return bool(self.job)

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}" + (f".{self.replica}" if self.replica else "")


class DispatchLink:
    """Joins the run, shows that this process lives, and asks. One request at a time; any thread may ask."""

    def __init__(self, order: MemberSpec) -> None:
        self._order = order
        self._keys = ClientKeys.from_text(order.client_keys)
        self.incarnation = time.time_ns()
        speaker = Speaker(run=order.run_id, name=order.name, incarnation=self.incarnation)
        silence_s = order.failure_timeout_s if order.is_remote else 0.0  # a broken link is told by nothing else
        codec = Codec(SERVED, LIMITS)
        self._channel = ClientChannel(order.dispatcher, speaker, codec, self._keys, silence_s=silence_s)
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._num_events = 0
        self.step = 0

    def join(self, address: str = "", public: str = "", step: int = 0) -> None:
        """Join the run. A server says where it listens, and after which step of the job its parameters are."""
        order = self._order
        host = socket.gethostname()
        hello = Join(order.role, order.index, os.getpid(), host, address, public, step, order.has_state)
        reply = self.ask(hello)
        assert isinstance(reply, Joined)
        beat_s = reply.failure_timeout_s / 5
        self._thread = threading.Thread(target=self._keep_alive, args=(beat_s,), name="cordee-alive", daemon=True)
        self._thread.start()

    def ask(self, message: Message) -> Message:
        """Make a request and wait for its answer, which may take long. If the launcher dies, so does this process.

        Asks again where no answer can come: a dispatcher that dies comes back, and answers once however often it is
        asked. Raises CommunicationError if it does not.
        """
        limit_s = self._order.startup_timeout_s
        kind = type(message).__name__.lower()
        sending_until_s = time.monotonic() + limit_s
        with self._lock:
            while True:
                try:
                    reach(f"served.ask.{kind}")
                    asked = self._channel.begin(message, timeout_s=limit_s)
                    sending_until_s = time.monotonic() + limit_s
                    answer = self._channel.finish(
                        asked, timeout_s=limit_s, wait_on=lambda: not self._is_closing.is_set()
                    ).message
                    reach(f"served.answered.{kind}")
                    return answer
                except RefusedError:
                    raise
                except CommunicationError as error:
                    if self._is_closing.is_set() or time.monotonic() > sending_until_s:
                        raise
                    log.info("asking again: %s", error)
                    time.sleep(_AGAIN_S)

    def emit(self, kind: str, fields: dict[str, Any]) -> None:
        self._num_events += 1
        self.ask(Event(kind, fields, self._num_events))

    def fail(self, error: BaseException) -> None:
        """Report the error this process ends with."""
        text = "".join(traceback.format_exception(error))[-60_000:]
        is_consequence = isinstance(error, CommunicationError)
        with contextlib.suppress(CommunicationError):  # its exit will tell
            self.ask(Failure(self.step, f"raised {type(error).__name__}: {error}"[:4000], text, is_consequence))

    def leave(self) -> None:
        self.ask(Bye())

    def connect(self, server: int) -> Connection:
        """Return a connection to a server. Raises CommunicationError if it is not up in time."""
        deadline = time.monotonic() + 4 * self._order.failure_timeout_s
        known = 0
        while True:
            servers = self.ask(AskServers(known, self._order.is_remote))
            assert isinstance(servers, Servers)
            try:
                return self.connect_to(servers.addresses[server])
            except CommunicationError as error:
                if time.monotonic() > deadline:
                    raise CommunicationError(f"server {server} is gone: {error}") from error
                log.info("server %d: %s; asking where it is now", server, error)
                time.sleep(0.05)

    def connect_to(self, address: str) -> Connection:
        speaker = Speaker(run=self._order.run_id, name=self._order.name, incarnation=self.incarnation)
        return Connection(
            address,
            speaker,
            PARAMETERS,
            self._keys,
            failure_timeout_s=self._order.failure_timeout_s,
            limits=PARAMETER_LIMITS,
        )

    def close(self) -> None:
        self._is_closing.set()
        self._channel.close()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def __enter__(self) -> DispatchLink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def is_given_up(self) -> bool:
        """Whether the dispatcher does not know this process any more: it was taken for lost, being frozen."""
        try:
            self.ask(AskServers())
        except RefusedError as error:
            return error.reason in ("unknown-process", "stale-incarnation")
        except CommunicationError:
            pass
        return False

    def _keep_alive(self, beat_s: float) -> None:
        heard_s = time.monotonic()
        while not self._is_closing.wait(beat_s):
            if self._order.launcher_pid and not is_alive(self._order.launcher_pid):
                log.error("the run is over: its launcher (process %d) is gone", self._order.launcher_pid)
                os._exit(1)  # the main thread may wait for an answer for ever
            if self._order.is_remote and time.monotonic() - heard_s > LONGEST_ABSENCE_S:
                message = f"the run has ended or is out of reach: nothing was heard of it for {LONGEST_ABSENCE_S:g} s"
                log.error("%s", message)
                sys.stderr.write(f"cordee: {message}\n")
                os._exit(1)
            try:
                self._channel.send(Heartbeat(self.step), timeout_s=beat_s)
                heard_s = time.monotonic()
            except CommunicationError:
                continue  # the launcher is busy, or gone, and this process with it
