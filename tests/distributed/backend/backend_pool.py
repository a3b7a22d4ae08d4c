"""A pool of real processes that runs functions of the tests as ranks of one job."""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_context = mp.get_context("forkserver")
# What the tests' functions would otherwise import in every rank, some of it seconds long.
_context.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "torch.distributed.tensor.parallel",
        "cordee.communication.shared_memory.backend",
    ]
)


def _serve(rank: int, pipe: Connection, rendezvous: str, size: int, settings: Any, backend: str) -> None:
    import torch
    import torch.distributed as dist

    from cordee.communication.shared_memory import register

    torch.set_num_threads(1)
    register()
    try:
        options = {"pg_options": settings} if backend == "cordee" else {}
        dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=size, **options)
        pipe.send(("ok", os.getpid()))
    except BaseException as error:  # noqa: BLE001 - reported to the test
        pipe.send(("error", f"{type(error).__name__}: {error}", traceback.format_exc()))
        return
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        if request is None:
            break
        function, arguments = request
        try:
            pipe.send(("ok", function(rank, *arguments)))
        except BaseException as error:  # noqa: BLE001 - reported to the test
            pipe.send(("error", f"{type(error).__name__}: {error}", traceback.format_exc()))
    dist.destroy_process_group()
    pipe.send(("ok", None))


class RankError(AssertionError):
    """A function failed on a rank."""


class ProcessPool:
    """`size` processes with an initialised process group; ends them, and only them, when the block ends."""

    def __init__(self, size: int, settings: Any = None, backend: str = "cordee") -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        rendezvous = str(Path(self._folder.name) / "rendezvous")
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(size):
            ours, theirs = _context.Pipe()
            chosen = settings[rank] if isinstance(settings, list) else settings
            process = _context.Process(
                target=_serve, args=(rank, theirs, rendezvous, size, chosen, backend), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self.pids = self.collect()

    def post(self, function: Callable[..., Any], *arguments: Any, ranks: Sequence[int] | None = None) -> None:
        for rank in range(self.size) if ranks is None else ranks:
            self.pipes[rank].send((function, arguments))

    def collect(self, ranks: Sequence[int] | None = None, timeout_s: float = 60) -> list[Any]:
        answers = [self.answer(rank, timeout_s) for rank in (range(self.size) if ranks is None else ranks)]
        for answer in answers:
            if answer[0] == "error":
                raise RankError(answer[2])
        return [answer[1] for answer in answers]

    def answer(self, rank: int, timeout_s: float = 60) -> tuple[Any, ...]:
        if not self.pipes[rank].poll(timeout_s):
            raise TimeoutError(f"rank {rank} did not answer within {timeout_s} s")
        answer: tuple[Any, ...] = self.pipes[rank].recv()
        return answer

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run `function(rank, *arguments)` on all ranks and return what each returned."""
        self.post(function, *arguments)
        return self.collect()

    def leave(self) -> None:
        """Let all ranks destroy their group and exit in good order."""
        for pipe in self.pipes:
            pipe.send(None)
        self.collect()
        for process in self.processes:
            process.join(10)

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join(10)
        for pipe in self.pipes:
            pipe.close()
        self._folder.cleanup()
