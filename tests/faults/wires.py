"""Two network namespaces with a cable between them: hosts that cannot reach each other's loopback."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

DEVICE = "rope0"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Wires:
    """The two ends of a cable. `names` are the namespaces, `addresses` what each is reached at."""

    def __init__(self) -> None:
        self.names = [f"cordee{os.getpid()}{side}" for side in "ab"]
        self.addresses = ["10.99.0.1", "10.99.0.2"]

    def inside(self, side: int, *command: str) -> list[str]:
        """Return the command that runs another at one end. Its process is that of the other."""
        return ["ip", "netns", "exec", self.names[side], *command]

    def cut(self) -> None:
        ip("-n", self.names[1], "link", "set", DEVICE, "down")

    def mend(self) -> None:
        ip("-n", self.names[1], "link", "set", DEVICE, "up")

    @contextmanager
    def slowed(self, rate: str) -> Iterator[None]:
        """Inside, what either end sends has this rate at most, in the words of `tc`."""
        limit = ("tbf", "rate", rate, "burst", "32kbit", "latency", "400ms")
        try:
            for name in self.names:
                subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", DEVICE, "root", *limit], check=True)
            yield
        finally:
            for name in self.names:
                subprocess.run(["tc", "-n", name, "qdisc", "del", "dev", DEVICE, "root"], capture_output=True)

    def pids(self, side: int) -> list[int]:
        """Return the processes at one end."""
        found = subprocess.run(["ip", "netns", "pids", self.names[side]], check=True, capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]


@contextmanager
def third_host(wires: Wires) -> Iterator[list[str]]:
    """Inside, there is a host that reaches the first end, and not the second; gives what runs a command there.

    The first end passes nothing on, as a firewall between the others: what they send each other is dropped.
    """
    name, device = f"{wires.names[0]}c", "rope1"
    ip("netns", "add", name)
    try:
        ip("link", "add", device, "netns", wires.names[0], "type", "veth", "peer", "name", device, "netns", name)
        for place, address in ((wires.names[0], "10.98.0.1"), (name, "10.98.0.2")):
            ip("-n", place, "addr", "add", f"{address}/24", "dev", device)
            ip("-n", place, "link", "set", device, "up")
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "route", "add", "default", "via", "10.98.0.1")
        ip("-n", wires.names[1], "route", "add", "default", "via", wires.addresses[0])
        yield ["ip", "netns", "exec", name]
    finally:
        with suppress(OSError, subprocess.CalledProcessError):
            ip("-n", wires.names[1], "route", "del", "default")
        ip("netns", "delete", name)


@contextmanager
def two_networks() -> Iterator[Wires]:
    """Skips the test where namespaces cannot be made."""
    wires = Wires()
    try:
        try:
            for name in wires.names:
                ip("netns", "add", name)
            ends = ("netns", wires.names[0], "type", "veth", "peer", "name", DEVICE, "netns", wires.names[1])
            ip("link", "add", DEVICE, *ends)
            for name, address in zip(wires.names, wires.addresses):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", DEVICE)
                ip("-n", name, "link", "set", DEVICE, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces need root and iproute2: {error}")
        yield wires
    finally:
        for name in wires.names:
            with suppress(OSError, subprocess.CalledProcessError):
                ip("netns", "delete", name)
