"""A network that does not get through, for `cordee chaos`: the kernel drops what arrives at a process's connections.

A socket filter that lets nothing pass is put onto both ends of every connection of the process, from outside, through
copies of their descriptors (pidfd_getfd, Linux 5.6). TCP sends again what was dropped, and delivers it when the line is
back: as behind a broken switch. What goes through shared memory is not touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import time
from collections.abc import Iterator

import psutil

from cordee.core.errors import JobError

_PIDFD_GETFD = 438  # on all architectures
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_RETURN_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)  # one instruction: keep 0 bytes of the packet


def cut_off(pid: int, seconds: float) -> int:
    """Let nothing through between a process and those it is connected to; return how many connections that were.

    Returns after `seconds`, with everything as before. Raises JobError where the kernel does not permit it.
    """
    with contextlib.ExitStack() as ends:
        cut = [ends.enter_context(_silenced(owner, fd)) for owner, fd in _both_ends(pid)]
        time.sleep(seconds)
    return sum(cut) // 2


def _both_ends(pid: int) -> list[tuple[int, int]]:
    """Return process and descriptor of each end of the established TCP connections of a process."""
    known = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_ESTABLISHED and c.pid]
    own = {(c.laddr, c.raddr) for c in known if c.pid == pid}
    return [(c.pid, c.fd) for c in known if (c.laddr, c.raddr) in own or (c.raddr, c.laddr) in own]


@contextlib.contextmanager
def _silenced(pid: int, fd: int) -> Iterator[bool]:
    """Inside, a socket of another process receives nothing. Gives whether there is such a socket."""
    number = _copy_descriptor(pid, fd)
    if number is None:
        yield False
        return
    with socket.socket(fileno=number) as copy:
        program = ctypes.create_string_buffer(_RETURN_NOTHING)
        copy.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))
        try:
            yield True
        finally:
            copy.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def _copy_descriptor(pid: int, fd: int) -> int | None:
    """Return a descriptor of our own for that of another process; None if one of the two is gone."""
    library = ctypes.CDLL(None, use_errno=True)
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    try:
        number: int = library.syscall(_PIDFD_GETFD, process, fd, 0)
    finally:
        os.close(process)
    problem = ctypes.get_errno()
    if number < 0 and isinstance(OSError(problem, ""), PermissionError):
        raise JobError(
            f"the kernel does not let us reach the sockets of process {pid} (pidfd_getfd: {os.strerror(problem)}): "
            "leave 'partition' out of --faults, or run as root"
        )
    return number if number >= 0 else None
