"""Contestants that run in processes of their own: started once, then told round by round to take some steps.

All of them stay in memory, with everything set up, and sleep while it is not their turn. So rounds can be
short and many, and no contestant's start is measured.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from cordee.core.errors import CordeeError

START_TIMEOUT_S = 300.0
ROUND_TIMEOUT_S = 300.0

_context = multiprocessing.get_context("forkserver")


class Place(NamedTuple):
    """A process of a contestant, and where it meets the others."""

    rank: int
    size: int
    folder: str

    @property
    def meeting(self) -> str:
        return f"file://{self.folder}/meeting"


class Clock:
    """Called by a contestant's loop once a step; lets it run for a round and then waits for the next."""

    def __init__(self, pipe: Connection, num_steps: int) -> None:
        self._pipe, self._num_steps = pipe, num_steps
        self._left = 0
        self._started_s = 0.0
        self.busy_s = 0.0  # of this round, that a loop which knows it spent on computing

    def tick(self) -> None:
        if self._left == 0:  # set up, or at the end of a round
            if self._started_s:
                self._pipe.send((time.perf_counter() - self._started_s, self.busy_s))
            else:
                self._pipe.send("ready")
            self._pipe.recv()
            self._left = self._num_steps
            self.busy_s = 0.0
            self._started_s = time.perf_counter()
        self._left -= 1


# What a contestant does in each of its processes: loop for ever, telling the clock before each step.
Loop = Callable[[Place, Clock], None]


class Contestant:
    """`size` processes that run `loop`. Calling it runs a round and returns the samples per second of all."""

    busy_share = 0.0  # of the last round, as far as its loop told its clock

    def __init__(self, loop: Loop, *, size: int, num_steps: int, batch_size: int) -> None:
        self._samples = num_steps * batch_size * size
        self._folder = tempfile.TemporaryDirectory(prefix="cordee-bench-")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        port = _free_port()
        for rank in range(size):
            ours, theirs = _context.Pipe()
            place = Place(rank, size, self._folder.name)
            process = _context.Process(target=_run, args=(loop, place, theirs, num_steps, port), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._answers(START_TIMEOUT_S)

    def __call__(self) -> float:
        self.begin()
        return self.end()

    def begin(self) -> None:
        for pipe in self._pipes:
            pipe.send("go")

    def end(self) -> float:
        """Wait for the round that was begun and return its samples per second."""
        answers = self._answers(ROUND_TIMEOUT_S)
        longest_s = max(elapsed_s for elapsed_s, _ in answers)
        self.busy_share = sum(busy_s for _, busy_s in answers) / (len(answers) * longest_s)
        return float(self._samples / longest_s)

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        self._folder.cleanup()

    def _answers(self, timeout_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        answers = []
        for pipe in self._pipes:
            try:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise CordeeError(f"a contestant did not answer within {timeout_s:g} s")
                answers.append(pipe.recv())
            except EOFError:
                raise CordeeError("a process of a contestant died: its error is above") from None
        return answers


def _run(loop: Loop, place: Place, pipe: Connection, num_steps: int, port: int) -> None:
    # What torchrun would have set; peers find each other by it.
    os.environ.update(
        RANK=str(place.rank),
        LOCAL_RANK=str(place.rank),
        WORLD_SIZE=str(place.size),
        LOCAL_WORLD_SIZE=str(place.size),
        NODE_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    import torch

    torch.set_num_threads(1)
    clock = Clock(pipe, num_steps)
    with contextlib.chdir(Path(place.folder)):
        loop(place, clock)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
