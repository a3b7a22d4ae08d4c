"""Carrying operations out: in rounds in which the ranks of a process set compare what each of them waits for.

An operation is queued when it is called, and carried out when a rank waits for it. Everything that is queued on all
ranks by then is done at once, all-reduces in fused buffers. Between ranks of one host this is quicker than to start
each by itself: the hand-over to a thread costs more than most reductions (docs/decisions/0006).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from cordee.core.errors import CommunicationError
from cordee.horovod import execution, timeline
from cordee.horovod.errors import HorovodInternalError
from cordee.horovod.requests import Agreement, Proposal, Request, agree, agree_at_once, digest

_decode = msgspec.msgpack.Decoder(Proposal).decode


class Operation:
    """An operation that was called: its tensors, and its result once it is done. What front ends call a handle."""

    def __init__(
        self,
        queue: OperationQueue,
        request: Request,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor] | None = None,
        splits: Tensor | None = None,
    ) -> None:
        """Results are copied to `outputs`; with None they are new tensors."""
        self.queue = queue
        self.request = request
        self.inputs = list(inputs)
        self.outputs = None if outputs is None else list(outputs)
        self.splits = splits  # of alltoall: rows for each rank
        self.received_splits: Tensor | None = None
        self.is_done = False
        self.error: Exception | None = None
        self.finish: Callable[[Operation], Any] | None = None  # makes of the result what the caller gets
        self.called_us = timeline.now_us()

    def complete(self, results: Sequence[Tensor]) -> None:
        self.outputs, self.is_done = list(results), True

    def fail(self, error: Exception) -> None:
        self.error, self.is_done = error, True

    def wait(self) -> Any:
        """Return the result, once all ranks have come. Raises what went wrong."""
        if not self.is_done:
            self.queue.run_until(self)
        if self.error is not None:
            raise self.error
        assert self.outputs is not None
        return self.outputs if self.finish is None else self.finish(self)


class OperationQueue:
    """The operations of one process set, seen from one rank."""

    def __init__(self, group: dist.ProcessGroup | None, ranks: Sequence[int], own_rank: int) -> None:
        """`ranks` are those of the set, in their global numbers. Without a group this rank is alone."""
        self.group = group
        self.ranks = list(ranks)
        self.own_rank = own_rank
        self._pending: dict[str, Operation] = {}
        self._counts: Counter[str] = Counter()
        self._turn = threading.RLock()
        self._joined: list[int] = []
        self._has_joined = False
        self.lost: HorovodInternalError | None = None  # why nothing more can be done: a rank is gone

    @property
    def size(self) -> int:
        return len(self.ranks)

    def name(self, name: str | None, kind: str) -> str:
        """Return the name of an operation: as given, or the number of the calls of its kind without a name."""
        if name is not None:
            return f"{kind}.{name}"
        self._counts[kind] += 1
        return f"{kind}.noname.{self._counts[kind]}"

    def submit(self, operation: Operation) -> Operation:
        """Queue an operation. Local. Raises ValueError if another of its name is under way."""
        with self._turn:
            name = operation.request.name
            if name in self._pending:
                raise ValueError(
                    f"{name!r} was called again before its result was waited for: give operations that are under way "
                    "at the same time different names, and synchronize each handle"
                )
            self._pending[name] = operation
        return operation

    def run_until(self, operation: Operation) -> None:
        """Do rounds until an operation is done. Collective over the set."""
        with self._turn:
            while not operation.is_done:
                self._round()

    def compare(self, what: str) -> None:
        """Wait for all ranks of the set, and make sure that they are in the same call. Collective."""
        name = self.name(what, "barrier")
        self.submit(Operation(self, Request(name, "barrier"), [])).wait()

    def join(self) -> int:
        """Take part in what the others reduce, without data, until all ranks have called this. Returns the last one."""
        with self._turn:
            for operation in list(self._pending.values()):
                self.run_until(operation)
            self._has_joined = True
            last = self.own_rank
            try:
                while True:
                    before = set(self._joined)
                    self._round()
                    if new := [rank for rank in self._joined if rank not in before]:
                        last = new[-1]
                    if len(self._joined) == self.size:
                        return last
            finally:
                self._has_joined, self._joined = False, []
                self._counts.clear()  # ranks have made different numbers of calls

    def _round(self) -> None:
        """Compare what ranks wait for, and do what all of them do. Collective."""
        proposal = Proposal(tuple(operation.request for operation in self._pending.values()), self._has_joined)
        started_us = timeline.now_us()
        try:
            agreement = self._agree(proposal)
            timeline.record_negotiation(agreement.ready, started_us)
            self._joined = agreement.joined
            self._fail(agreement)
            execution.run(self, agreement.ready, self._take(agreement.ready))
        except CommunicationError as error:
            failure = error if isinstance(error, HorovodInternalError) else HorovodInternalError(str(error))
            failure.__cause__ = None if failure is error else error
            self.lost = failure
            for operation in self._pending.values():
                operation.fail(failure)
            self._pending.clear()
            raise failure from failure.__cause__

    def _agree(self, proposal: Proposal) -> Agreement:
        if self.group is None:
            return agree({self.own_rank: proposal})
        own = torch.tensor(digest(proposal))
        everybody = torch.empty(self.size, 2, dtype=torch.int64)
        dist.all_gather_single(everybody.view(-1), own, group=self.group)
        if bool((everybody == own).all()):
            return agree_at_once(proposal, self.ranks)
        contents = gather_bytes(msgspec.msgpack.encode(proposal), self.group, self.size)
        return agree({rank: _decode(content) for rank, content in zip(self.ranks, contents, strict=True)})

    def _take(self, ready: Sequence[Request]) -> list[Operation | None]:
        """Return this rank's operation for each request; None for those that only others make."""
        return [self._pending.pop(request.name, None) for request in ready]

    def _fail(self, agreement: Agreement) -> None:
        for name, problem in agreement.failures.items():
            if (operation := self._pending.pop(name, None)) is not None:
                operation.fail(HorovodInternalError(problem))


def gather_bytes(content: bytes, group: dist.ProcessGroup, size: int) -> list[bytes]:
    """Return what each rank has, in their order. Collective."""
    lengths = torch.empty(size, dtype=torch.int64)
    dist.all_gather_single(lengths, torch.tensor([len(content)]), group=group)
    longest = int(lengths.max())
    padded = torch.zeros(longest, dtype=torch.uint8)
    if content:
        padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    everybody = torch.empty(size * longest, dtype=torch.uint8)
    dist.all_gather_single(everybody, padded, group=group)
    rows = everybody.view(size, longest)
    return [rows[index, : int(length)].numpy().tobytes() for index, length in enumerate(lengths)]
