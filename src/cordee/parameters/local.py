"""Servers of a store as children of this process: they end with it, however it ends.

A child is told what to do through its standard input, and ends when that is closed or its parent is another.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from typing import Any

import msgspec

from cordee.core.errors import StoreError
from cordee.parameters.keys import StoreKey

MAX_SERVERS = 64
_START_S = 60.0  # importing torch takes seconds on a busy machine
_END_S = 5.0


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a child is to do."""

    key: str
    parent: int
    root: str  # address of the first server; empty for that one itself
    num_servers: int
    replicas: int
    updaters: list[str]
    failure_timeout_s: float
    python_path: list[str]


class LocalServers:
    """The servers of one store on this host."""

    def __init__(self, num_servers: int, updaters: list[str], failure_timeout_s: float, replicas: int = 1) -> None:
        """Start them and wait until they serve. Raises StoreError that says what went wrong."""
        if not (isinstance(num_servers, int) and 1 <= num_servers <= MAX_SERVERS):
            raise StoreError(
                f"num_servers = {num_servers!r} must be a whole number from 1 to {MAX_SERVERS}: "
                "they are processes of this host"
            )
        if replicas not in (1, 2):
            raise StoreError(f"replicas = {replicas!r} must be 1 or 2: the processes of each server")
        num_processes = num_servers if replicas == 1 else 1 + num_servers * replicas  # the first is the directory alone
        self.key = StoreKey.make()
        self._children: list[subprocess.Popen[bytes]] = []
        try:
            for _ in range(num_processes):  # all at once: what takes long is importing torch
                self._children.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "cordee.parameters.child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
                    )
                )
            self.address = ""
            for child in self._children:
                spec = ChildSpec(
                    key=self.key.to_text(),
                    parent=os.getpid(),
                    root=self.address,
                    num_servers=num_servers,
                    replicas=replicas,
                    updaters=updaters,
                    failure_timeout_s=failure_timeout_s,
                    python_path=sys.path,
                )
                address = self._instruct(child, spec)
                self.address = self.address or address
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children]

    def close(self) -> None:
        """End all of them."""
        for child in self._children:
            assert child.stdin is not None and child.stdout is not None
            child.stdin.close()
        deadline = time.monotonic() + _END_S
        for child in self._children:
            try:
                child.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            assert child.stdout is not None
            child.stdout.close()
        self._children.clear()

    def _instruct(self, child: subprocess.Popen[bytes], spec: ChildSpec) -> str:
        """Tell a child what to do; return its address when it serves."""
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(msgspec.json.encode(spec) + b"\n")
            child.stdin.flush()
        except BrokenPipeError:
            pass  # it died, which reading its answer tells
        readable, _, _ = select.select([child.stdout], [], [], _START_S)
        line = child.stdout.readline() if readable else b""
        if not line:
            why = "said nothing" if child.poll() is None else f"ended with code {child.returncode}"
            raise StoreError(f"a server of the local store {why} within {_START_S:g} s of its start")
        answer: dict[str, Any] = msgspec.json.decode(line)
        if "error" in answer:
            raise StoreError(str(answer["error"]))
        return str(answer["address"])
