"""Calls: a request to a server process and its reply, through shared memory on one host and the channel between."""

from cordee.communication.calls.client import Connection, Connections, Pending, ServerDiedError, ServerFrozenError
from cordee.communication.calls.server import Call, CallServer, UnavailableError
from cordee.communication.calls.shm_channel import UNAVAILABLE

__all__ = [
    "UNAVAILABLE",
    "Call",
    "CallServer",
    "Connection",
    "Connections",
    "Pending",
    "ServerDiedError",
    "ServerFrozenError",
    "UnavailableError",
]
