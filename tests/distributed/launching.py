"""Commands started as a user starts them, and what is left of their processes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

import warm_launch

TIMEOUT_S = 120.0


class Ended(NamedTuple):
    code: int
    stdout: str
    stderr: str


class Command:
    """`cordee …` in a process of its own."""

    def __init__(self, *args: str, folder: Path | None = None) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = warm_launch.start(*args, folder=folder or Path.cwd(), environment=environment)
        self.family: list[psutil.Process] = []

    def note_family(self) -> None:
        """Remember all processes below this one, for `survivors`."""
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def finish(self, timeout_s: float = TIMEOUT_S) -> Ended:
        stdout, stderr = self.process.communicate(timeout=timeout_s)
        return Ended(self.process.returncode, stdout, stderr)

    def survivors(self, timeout_s: float = 5.0) -> list[psutil.Process]:
        """Return which processes are still there after `timeout_s`."""
        return psutil.wait_procs(self.family, timeout=timeout_s)[1]


@contextlib.contextmanager
def started(*args: str, folder: Path | None = None) -> Iterator[Command]:
    command = Command(*args, folder=folder)
    try:
        yield command
    finally:
        if command.process.poll() is None:
            command.process.kill()
        command.process.communicate()


def run(*args: str, folder: Path | None = None) -> Ended:
    with started(*args, folder=folder) as command:
        return command.finish()


def wait_until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
