"""Commands started as a user starts them, and what is left of their processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
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


def run_script(*args: str, folder: Path | None = None) -> Ended:
    """`python SCRIPT …`, in a process that has torch imported already."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = warm_launch.shared_server().python(*args, folder=folder or Path.cwd(), environment=environment)
    try:
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    finally:
        if process.poll() is None:
            process.kill()
    return Ended(process.returncode or 0, stdout, stderr)


def run_python(*args: str, folder: Path | None = None) -> Ended:
    """`python …`, from nothing."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, cwd=folder)
    return Ended(done.returncode, done.stdout, done.stderr)


def wait_until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
