"""Two hosts on this machine: network namespaces with a virtual cable between them. Root and iproute2 are needed."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence

import psutil

from cordee.core import env
from cordee.core.errors import JobError

DEVICE = "cordee-bench"
_PREFIX = "cordee-bench-"
_CLONE_NEWNET = 0x40000000


@contextlib.contextmanager
def two_hosts(rate: float) -> Iterator[list[str]]:
    """Inside, there are two network namespaces with a cable of so many bits a second between them.

    SIGTERM ends the process as Ctrl-C does, so that they are removed. What a process that was killed has left is
    removed by the next one.
    """
    _remove_left_over()
    names = [f"{_PREFIX}{os.getpid()}-{side}" for side in "ab"]
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        for name in names:
            _call("ip", "netns", "add", name)
        ends = ("netns", names[0], "type", "veth", "peer", "name", DEVICE, "netns", names[1])
        _call("ip", "link", "add", DEVICE, *ends)
        for number, name in enumerate(names, start=1):
            _call("ip", "-n", name, "addr", "add", f"10.98.0.{number}/24", "dev", DEVICE)
            _call("ip", "-n", name, "link", "set", DEVICE, "up")
            _call("ip", "-n", name, "link", "set", "lo", "up")
            if rate:
                bucket = ("rate", f"{rate:.0f}bit", "burst", "64kb", "latency", "100ms")
                _call("tc", "-n", name, "qdisc", "add", "dev", DEVICE, "root", "tbf", *bucket)
        yield names
    finally:
        for name in names:
            with contextlib.suppress(JobError):
                _call("ip", "netns", "delete", name)
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _remove_left_over() -> None:
    """Remove the namespaces of processes that are gone."""
    with contextlib.suppress(JobError):
        for line in _call("ip", "netns", "list").splitlines():
            name = line.partition(" ")[0]
            pid = name.removeprefix(_PREFIX).partition("-")[0]
            if name.startswith(_PREFIX) and pid.isdecimal() and not psutil.pid_exists(int(pid)):
                _call("ip", "netns", "delete", name)


def _call(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", "") or error
        raise JobError(f"two hosts cannot be made on this machine, which takes root and iproute2: {why}") from None


def count_bytes(names: Sequence[str]) -> int:
    """Return how many bytes have left the two hosts, with all headers."""
    return sum(
        int(json.loads(_call("ip", "-n", name, "-s", "-j", "link", "show", "dev", DEVICE))[0]["stats64"]["tx"]["bytes"])
        for name in names
    )


def enter_host(name: str) -> None:
    """Move this process, which has no other thread yet, to a network namespace."""
    env.adopt({"GLOO_SOCKET_IFNAME": DEVICE})
    descriptor = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(descriptor)
