"""A process's connection to the dispatcher of a dispatched run."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Literal

from cordee.cluster.engine import SIGNALS
from cordee.cluster.member_link import MemberLink, MemberSpec
from cordee.cluster.members import GIVEN_UP
from cordee.cluster.messages import Numbered
from cordee.communication.calls import Connection
from cordee.communication.channel import Received, RefusedError
from cordee.communication.messages import Message
from cordee.communication.this_host import host_id
from cordee.communication.wire import Codec
from cordee.core.errors import CommunicationError
from cordee.core.fault_points import reach
from cordee.monitoring.events import AnyEvent, stamp
from cordee.runs.dispatched.messages import DISPATCHED, LIMITS, AskServers, Servers
from cordee.strategies.parameter_server.messages import LIMITS as PARAMETER_LIMITS
from cordee.strategies.parameter_server.messages import PARAMETERS

log = logging.getLogger(__name__)

END_SIGNAL = SIGNALS["end"]  # to a server: the run is over. SIGTERM has it hand over and leave


class DispatchLink(MemberLink):
    """Joins the run, shows that this process lives, and asks. One request at a time; any thread may ask."""

    def __init__(self, spec: MemberSpec, num_returns: int = 0, codec: Codec | None = None) -> None:
        super().__init__(spec, codec or Codec(DISPATCHED, LIMITS), num_returns)

    def join(self, address: str = "", public: str = "", step: int = 0) -> None:
        """Join the run. A server says where it listens, and after which step of the job its parameters are."""
        joined = self._join(address=address, public=public, step=step, has_state=self._spec.has_state)
        self._start_heartbeats(joined.heartbeat_s)

    def _reach(self, when: Literal["ask", "answered"], message: Message) -> None:
        reach(f"dispatched.{when}.{type(message).__name__.lower()}")

    def _deliver(self, message: Numbered) -> None:
        self.ask(message)

    def emit(self, event: AnyEvent) -> None:
        """Have an event of this process recorded. Returns when the coordinator has acknowledged it."""
        super().emit(stamp(event, f"{self._spec.role} {self._spec.index}"))

    def fail(self, error: BaseException) -> None:
        with contextlib.suppress(CommunicationError):  # its exit will tell
            super().fail(error)

    def connect(self, server: int) -> Connection:
        """Return a connection to a server. Raises CommunicationError if it is not up in time."""
        deadline = time.monotonic() + 4 * self._spec.failure_timeout_s
        while True:
            servers = self.ask(AskServers())
            assert isinstance(servers, Servers)
            try:
                return self.connect_to(servers.addresses[server].seen_from(host_id()))
            except CommunicationError as error:
                if time.monotonic() > deadline:
                    raise CommunicationError(f"server {server} is gone: {error}") from error
                log.info("server %d: %s; asking where it is now", server, error)
                time.sleep(0.05)

    def connect_to(self, address: str) -> Connection:
        return Connection(
            address,
            self._channel.speaker,
            PARAMETERS,
            self._keys,
            failure_timeout_s=self._spec.failure_timeout_s,
            limits=PARAMETER_LIMITS,
        )

    def is_given_up(self) -> bool:
        """Whether the dispatcher does not know this process any more: it was taken for lost, being frozen."""
        try:
            self.ask(AskServers())
        except RefusedError as error:
            return error.reason in GIVEN_UP
        except CommunicationError:
            pass
        return False

    def _await_message(self, timeout_s: float) -> Received | None:
        # Does not wait at the socket: whoever asks meanwhile would wait for it.
        received = self._channel.kept()
        if received is None and self._asking.acquire(blocking=False):  # who asks takes what comes in
            try:
                received = self._channel.receive(0.0)
            finally:
                self._asking.release()
        if received is None:
            self._is_closing.wait(timeout_s)
        return received

    def _take(self, received: Received) -> None:
        """Take the answer to a heartbeat, which says nothing but that the coordinator lives."""
