"""The connections of this process's groups to other hosts, and cutting them.

gloo waits for a peer for as long as its time limit says, and cannot be notified that the peer is lost: behind a
broken link a connection neither delivers nor fails. Shutting its sockets down makes every operation on them fail at
once, in this process and, where they can be reached, in the others.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")

_cables: dict[int, str] = {}  # descriptor -> the socket it names; another's after it was closed
_being_laid: list[tuple[dict[int, str], str | None]] = []  # what was open before, and at which address


@contextlib.contextmanager
def recording_gloo_sockets(address: str | None) -> Iterator[None]:
    """Record the connections that are opened inside at this address of the host, or at any."""
    before = _open_sockets()
    _being_laid.append((before, address))
    try:
        yield
    finally:
        _cables.update(_new_connections(before, address))
        _being_laid.remove((before, address))


def shut_gloo_sockets() -> None:
    """Make all that waits for other hosts fail. For when a member is known to be lost; any thread may call."""
    known = dict(_cables)
    for before, address in list(_being_laid):
        known |= _new_connections(before, address)
    for descriptor, name in known.items():
        with contextlib.suppress(OSError):
            if os.readlink(_DESCRIPTORS / str(descriptor)) == name:  # noqa: PTH115 - it is no path
                with socket.socket(fileno=os.dup(descriptor)) as copy:
                    copy.shutdown(socket.SHUT_RDWR)


def _new_connections(before: dict[int, str], address: str | None) -> dict[int, str]:
    now = _open_sockets()
    return {fd: name for fd, name in now.items() if before.get(fd) != name and _is_connection(fd, address)}


def _is_connection(descriptor: int, address: str | None) -> bool:
    """Whether a socket is a connection at the address that groups use, and not what another thread opened."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            if copy.type != socket.SOCK_STREAM or copy.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            copy.getpeername()  # raises for one that listens, at whose end gloo would end the process
            return address in (None, copy.getsockname()[0])
    except OSError:
        return False


def _open_sockets() -> dict[int, str]:
    found = {}
    for entry in os.scandir(_DESCRIPTORS):
        with contextlib.suppress(OSError):
            name = os.readlink(entry.path)  # noqa: PTH115 - it is no path
            if name.startswith("socket:"):
                found[int(entry.name)] = name
    return found
