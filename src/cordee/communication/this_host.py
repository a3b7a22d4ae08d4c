"""What a process reports to others of the host it runs on: an id, and addresses."""

from __future__ import annotations

import ipaddress
import os
import platform
import socket
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

from cordee.communication.shared_memory.registration import BackendSettings
from cordee.core.errors import CommunicationError, JobError


class Listening(NamedTuple):
    """Where a run can be reached from other hosts."""

    ip: str
    port: int  # 0 leaves it to the system

    @property
    def address(self) -> str:
        """The address to listen at, in the words of a channel."""
        host = f"[{self.ip}]" if ":" in self.ip else self.ip
        return f"tcp://{host}:{self.port or '*'}"


def host_id() -> str:
    """Return an id that is equal for processes that share a kernel, their process numbers and their network.

    Containers on one machine, or network namespaces in tests, count as hosts of their own.
    """
    if sys.platform != "linux":
        return socket.gethostname()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = "/".join(str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("pid", "net"))  # noqa: PTH116
    return f"{boot}/{spaces}"


def can_share_memory() -> bool:
    """Whether processes of this host can share memory: the backend relies on the store order of x86 (rounds.py)."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


def own_host_id(settings: BackendSettings, rank: int) -> str:
    """Return an id that is equal for processes that can share memory, and unique where that is impossible.

    See `host_id`: containers on one machine count as hosts of their own.
    """
    alone = f"{socket.gethostname()}/alone/{rank}"
    if not settings.shared_memory:
        return alone
    if settings.host_id is not None:
        return settings.host_id
    if not can_share_memory():
        warnings.warn(
            f"the cordee backend uses shared memory on Linux on x86-64 only, this is {sys.platform} on "
            f"{platform.machine()}: gloo is used instead",
            RuntimeWarning,
            stacklevel=2,
        )
        return alone
    return host_id()


def find_listening(setting: str) -> Listening:
    """Return what `cluster.address` (HOST or HOST:PORT) comes to. Raises JobError if it is none of this host's."""
    host, port = split_address(setting)
    if port is None:
        raise JobError(f"cluster.address = {setting!r} has no port from 1 to 65535: write HOST or HOST:PORT")
    try:
        ip = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise JobError(f"cluster.address = {setting!r} cannot be looked up: {error}") from None
    if ipaddress.ip_address(ip.partition("%")[0]).is_unspecified:
        raise JobError(
            f"cluster.address = {setting!r} is every address of this host: name the one that other hosts can reach"
        )
    try:
        with socket.create_server((ip, port), family=socket.AF_INET6 if ":" in ip else socket.AF_INET):
            pass
    except OSError as error:
        raise JobError(f"cluster.address = {setting!r}: cannot listen at {ip}: {error.strerror}") from None
    return Listening(ip, port)


def own_address(peer: str) -> str:
    """Return the address of this host that is used to reach `peer` (tcp://HOST:PORT). Raises CommunicationError."""
    host, port = split_address(peer.removeprefix("tcp://"))
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # nothing is sent
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise CommunicationError(f"this host has no way to {host}: {error.strerror}") from error


def split_address(text: str) -> tuple[str, int | None]:
    """Return host and port of HOST, HOST:PORT, [IPV6] or [IPV6]:PORT; no port is 0, a wrong one None."""
    host, port = text.strip(), ""
    if host.startswith("["):
        host, _, port = host[1:].partition("]")
        port = port.removeprefix(":")
    elif host.count(":") == 1:
        host, _, port = host.partition(":")
        if not port:
            return host, None
    if not port:
        return host, 0
    return host, int(port) if port.isdecimal() and 0 < int(port) < 65536 else None
