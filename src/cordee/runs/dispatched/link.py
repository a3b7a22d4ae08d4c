"""A process's line to the dispatcher of a served run."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time

from cordee.cluster.engine import SIGNALS
from cordee.cluster.member_link import MemberLink, MemberSpec, describe_failure
from cordee.cluster.messages import Event
from cordee.communication.calls import Connection
from cordee.communication.channel import ClientChannel, RefusedError
from cordee.communication.endpoint import Speaker
from cordee.communication.keys import ClientKeys
from cordee.communication.messages import Heartbeat, Message
from cordee.communication.wire import Codec
from cordee.core.errors import CommunicationError
from cordee.core.fault_points import reach
from cordee.monitoring.events import AnyEvent, stamp
from cordee.runs.dispatched.messages import LIMITS, SERVED, AskServers, Bye, Join, Joined, Servers
from cordee.strategies.parameter_server.messages import LIMITS as PARAMETER_LIMITS
from cordee.strategies.parameter_server.messages import PARAMETERS

log = logging.getLogger(__name__)

END_SIGNAL = SIGNALS["end"]  # to a server: the run is over. SIGTERM has it hand over and leave
_AGAIN_S = 0.01


class DispatchLink(MemberLink):
    """Joins the run, shows that this process lives, and asks. One request at a time; any thread may ask."""

    def __init__(self, order: MemberSpec) -> None:
        self._order = order
        self._keys = ClientKeys.from_text(order.client_keys)
        self.incarnation = time.time_ns()
        speaker = Speaker(run=order.run_id, name=order.name, incarnation=self.incarnation)
        silence_s = order.failure_timeout_s if order.is_remote else 0.0  # a broken link is told by nothing else
        codec = Codec(SERVED, LIMITS)
        channel = ClientChannel(order.address, speaker, codec, self._keys, silence_s=silence_s)
        super().__init__(channel, launcher_pid=order.launcher_pid, is_remote=order.is_remote)
        self._lock = threading.Lock()
        self._num_events = 0

    def join(self, address: str = "", public: str = "", step: int = 0) -> None:
        """Join the run. A server says where it listens, and after which step of the job its parameters are."""
        order = self._order
        host = socket.gethostname()
        hello = Join(order.role, order.index, os.getpid(), host, address, public, step, order.has_state)
        reply = self.ask(hello)
        assert isinstance(reply, Joined)
        self._show_life(reply.failure_timeout_s / 5)

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

    def emit(self, event: AnyEvent) -> None:
        """Have an event of this process recorded. Returns when the coordinator has noted it."""
        self._num_events += 1
        self.ask(Event(stamp(event, f"{self._order.role} {self._order.index}"), self._num_events))

    def fail(self, error: BaseException) -> None:
        """Report the error this process ends with."""
        with contextlib.suppress(CommunicationError):  # its exit will tell
            self.ask(describe_failure(error, self.step))

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

    def is_given_up(self) -> bool:
        """Whether the dispatcher does not know this process any more: it was taken for lost, being frozen."""
        try:
            self.ask(AskServers())
        except RefusedError as error:
            return error.reason in ("unknown-process", "stale-incarnation")
        except CommunicationError:
            pass
        return False

    def _keep_alive(self, heartbeat_s: float) -> None:
        heard_s = time.monotonic()
        while not self._is_closing.wait(heartbeat_s):
            self._end_with_the_run(heard_s)
            try:
                self._channel.send(Heartbeat(self.step), timeout_s=heartbeat_s)
                heard_s = time.monotonic()
            except CommunicationError:
                continue  # the launcher is busy, or gone, and this process with it
