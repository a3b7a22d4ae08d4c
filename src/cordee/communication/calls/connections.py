"""Connections to several servers: one to each, made when it is first needed, and made anew after it was dropped."""

from __future__ import annotations

import threading
from collections.abc import Callable

from cordee.communication.calls.client import Connection


class Connections:
    """By the numbers of the servers. Any thread may ask; `connect` is called by one at a time, and may raise."""

    def __init__(self, connect: Callable[[int], Connection]) -> None:
        self._connect = connect
        self._connections: dict[int, Connection] = {}
        self._lock = threading.Lock()

    def get(self, server: int) -> Connection:
        """Return the connection to a server. Raises what `connect` does where there is none yet."""
        connection = self._connections.get(server)
        if connection is not None:
            return connection
        with self._lock:
            if server not in self._connections:
                self._connections[server] = self._connect(server)
            return self._connections[server]

    def drop(self, server: int, connection: Connection | None) -> None:
        """Close a connection that failed, unless another thread has done so and there is a newer one."""
        with self._lock:
            if connection is None or self._connections.get(server) is not connection:
                return
            del self._connections[server]
        connection.close()

    def take_all(self) -> list[Connection]:
        """Return all connections, for the caller to close."""
        with self._lock:
            connections, self._connections = list(self._connections.values()), {}
        return connections
