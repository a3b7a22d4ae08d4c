"""A pool of processes in one group that run functions together, one case after the other, without a launch for each."""

from __future__ import annotations

import multiprocessing as mp
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

CASE_TIMEOUT_S = 100.0
_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "cordee.runs.team.worker"])


class CaseError(AssertionError):
    """A case failed on some member."""


class ProcessPool:
    """`size` members. One that fails a case ends them all, and the next case gets new ones."""

    def __init__(self, size: int, hosts: Sequence[str] = ()) -> None:
        """Each member takes itself to be on the host that `hosts` names, and encrypts what goes to others."""
        self.size = size
        self._hosts = hosts or [None] * size
        self._folder = tempfile.TemporaryDirectory()
        self._num_starts = 0
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call `function(index, size, *arguments)` in all members and return what each returned."""
        self.start()
        for pipe in self._pipes:
            pipe.send((function, arguments))
        return self._collect()

    def close(self) -> None:
        self._end()
        self._folder.cleanup()

    def start(self) -> None:
        """Start the members, unless they are there."""
        if self._processes:
            return
        self._num_starts += 1
        rendezvous = str(Path(self._folder.name) / f"rendezvous-{self._num_starts}")
        for index, host in enumerate(self._hosts):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_serve, args=(index, self.size, theirs, rendezvous, host), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._collect()

    def _collect(self) -> list[Any]:
        deadline = time.monotonic() + CASE_TIMEOUT_S
        answers, problems = [], []
        for index, pipe in enumerate(self._pipes):
            # Once one has failed the others have a moment to say what they think of it.
            if not pipe.poll(max(0.0, deadline - time.monotonic()) if not problems else 2.0):
                problems.append(f"member {index} did not answer")
                continue
            try:
                is_well, answer = pipe.recv()
            except EOFError:
                is_well, answer = False, "died"
            if is_well:
                answers.append(answer)
            else:
                problems.append(f"member {index}: {answer}")
        if problems:
            self._end()
            raise CaseError("\n".join(problems))
        return answers

    def _end(self) -> None:
        for process, pipe in zip(self._processes, self._pipes):
            pipe.close()
            process.kill()
            process.join(10)
        self._processes, self._pipes = [], []


def _serve(index: int, size: int, pipe: Connection, rendezvous: str, host: str | None) -> None:
    import torch
    import torch.distributed as dist

    from cordee.communication.shared_memory import BackendSettings, register

    torch.set_num_threads(1)
    register()
    settings = BackendSettings(host_id=host, encrypt=host is not None)
    dist.init_process_group(
        "cordee", init_method=f"file://{rendezvous}", rank=index, world_size=size, pg_options=settings
    )
    pipe.send((True, None))
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(index, size, *arguments)))
        except BaseException:  # noqa: BLE001 - reported to the test
            pipe.send((False, traceback.format_exc()))
