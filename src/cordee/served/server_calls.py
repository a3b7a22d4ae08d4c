"""What the coordinator of a served run has to say to its servers, over the calls that workers use."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

from cordee.cluster.launcher_link import STARTUP_TIMEOUT_S
from cordee.communication.calls import Connection
from cordee.communication.endpoint import Speaker
from cordee.communication.keys import ClientKeys
from cordee.core.errors import CommunicationError
from cordee.served.whereabouts import Whereabouts
from cordee.strategies.parameter_server.messages import LIMITS, PARAMETERS, Adopt, Fence

CONNECTING_TIMEOUT_S = 2.0


class ServerCalls:
    """Connects anew for each call: there are few. A server that is gone is passed over: its exit tells the rest."""

    def __init__(self, run_id: str, client_keys: str) -> None:
        self._run_id = run_id
        self._keys = ClientKeys.from_text(client_keys)

    def pair(self, servers: Whereabouts) -> None:
        """Have servers give their seconds everything, where that is still to be done."""
        for index, serving, follower in servers.unfollowed():
            with contextlib.suppress(CommunicationError):
                with self._connect(serving) as connection:
                    connection.call(Adopt(follower), timeout_s=STARTUP_TIMEOUT_S)
                servers.note_following(index)

    def fence(self, addresses: Iterable[str], worker: str, incarnation: int) -> None:
        """Tell the servers at these addresses that nothing the worker says counts any more."""
        for address in addresses:
            with contextlib.suppress(CommunicationError), self._connect(address) as connection:
                connection.call(Fence(worker, incarnation), timeout_s=1.0)

    def _connect(self, address: str) -> Connection:
        speaker = Speaker(run=self._run_id, name="launcher", incarnation=time.time_ns())
        return Connection(
            address, speaker, PARAMETERS, self._keys, failure_timeout_s=CONNECTING_TIMEOUT_S, limits=LIMITS
        )
