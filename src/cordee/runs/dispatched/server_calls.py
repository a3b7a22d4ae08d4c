"""What the coordinator of a dispatched run has to say to its servers, over the calls that workers use."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable

from cordee.cluster.launcher_link import STARTUP_TIMEOUT_S
from cordee.communication.calls import Connection
from cordee.communication.endpoint import Speaker
from cordee.communication.keys import ClientKeys
from cordee.core.errors import CommunicationError, TrainingError
from cordee.core.fault_points import reach
from cordee.parameters.messages import Adopt
from cordee.runs.dispatched.server_registry import ServerRegistry
from cordee.strategies.parameter_server.messages import LIMITS, PARAMETERS, Fence

log = logging.getLogger("cordee.coordinator")

CONNECTING_TIMEOUT_S = 2.0
_AGAIN_S = 0.2  # between two attempts of one server to give another everything
_MOST_ATTEMPTS = 30


class ServerCalls:
    """Connects again for each call: there are few. A server that is gone is passed over: its exit tells the rest."""

    def __init__(self, run_id: str, client_keys: str) -> None:
        self._run_id = run_id
        self._keys = ClientKeys.from_text(client_keys)
        self._handovers: dict[int, _Handover] = {}  # by the index of the server
        self._num_failed: Counter[tuple[str, str]] = Counter()

    def pair(self, servers: ServerRegistry) -> bool:
        """Have servers give their followers everything, where that is still to be done; return whether one has.

        Does not wait for it: a server that loses its follower tells the dispatcher, and waits for the answer while it
        holds its lock, so that a coordinator that waited for the server would wait for ever. Raises TrainingError where
        it fails time and again.
        """
        has_paired = False
        for index, handover in list(self._handovers.items()):
            if handover.is_alive():
                continue
            del self._handovers[index]
            pair = handover.serving, handover.follower
            if handover.problem is None:
                reach("dispatch.paired")
                servers.record_following(index, *pair)
                has_paired = True
                continue
            self._num_failed[pair] += 1
            if self._num_failed[pair] >= _MOST_ATTEMPTS:
                raise TrainingError(f"{pair[0]} could not give {pair[1]} everything: {handover.problem}")
        for index, serving, follower in servers.unfollowed():
            if index not in self._handovers:
                reach("dispatch.pair")
                handover = _Handover(self, servers, serving, follower)
                self._handovers[index] = handover
                handover.start()
        return has_paired

    def fence(self, addresses: Iterable[str], worker: str, incarnation: int) -> None:
        """Tell the servers at these addresses that nothing the worker says counts any more."""
        for address in addresses:
            with contextlib.suppress(CommunicationError), self.connect(address) as connection:
                reach("dispatch.fence")
                connection.call(Fence(worker, incarnation), timeout_s=1.0)

    def connect(self, address: str) -> Connection:
        speaker = Speaker(run=self._run_id, name="launcher", incarnation=time.time_ns())
        return Connection(
            address, speaker, PARAMETERS, self._keys, failure_timeout_s=CONNECTING_TIMEOUT_S, limits=LIMITS
        )


class _Handover(threading.Thread):
    """One server giving another everything. Ends with a `problem`, or without where the other follows from there."""

    def __init__(self, calls: ServerCalls, servers: ServerRegistry, serving: str, follower: str) -> None:
        super().__init__(name="cordee-handover", daemon=True)
        self.serving, self.follower = serving, follower
        self.problem: str | None = "not done"
        self._calls = calls
        self._addresses = servers.address_of(serving), servers.address_of(follower, serving)

    def run(self) -> None:
        serving, follower = self._addresses
        try:
            with self._calls.connect(serving) as connection:
                connection.call(Adopt(follower), timeout_s=STARTUP_TIMEOUT_S)
            self.problem = None
        except CommunicationError as error:
            self.problem = str(error)
            log.warning("%s could not give %s everything: %s", self.serving, self.follower, error)
            time.sleep(_AGAIN_S)
