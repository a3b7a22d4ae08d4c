"""Reading samples one by one, in the calling thread or in processes of their own.

Processes are those of torch's DataLoader, which are given our index lists, so that order, cut and random
draws are the same with any number of them. They end when the generator is closed, and when this process dies.
"""

from __future__ import annotations

import signal
import traceback
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from cordee.core.batch import Batch, Pieces, cut_parts
from cordee.core.errors import DataError
from cordee.core.seeds import derive_seed
from cordee.core.shards import Shards
from cordee.data.datasets import IterableSource
from cordee.data.order import part_of, preserved_generators, seed_generators
from cordee.data.source import Source


@runtime_checkable
class SampleSource(Source, Protocol):
    """A source whose samples can be read by other processes."""

    reads_at_once: bool  # samples that are read together are drawn from one seed: reading them apart gives others

    def read(self, indices: Tensor, positions: Tensor, seed: int) -> Batch:
        """Return the samples with these indices, random changes drawn from (seed, position)."""
        ...


class ReadJob(NamedTuple):
    """The part of a batch to read: which samples, and where in the epoch the first of them stands."""

    first: int
    indices: Tensor
    num_pieces: int = 1  # to collate by themselves


_EMPTY = ReadJob(0, torch.empty(0, dtype=torch.int64))


class PlacedBatch(NamedTuple):
    """A batch whose first sample stands at the position `first` of the epoch; the others follow it."""

    first: int
    batch: Batch | Pieces


class StreamPlan(NamedTuple):
    """Which part of which batches of a stream to keep."""

    epoch: int
    seed: int
    first_batch: int
    batch_size: int
    shards: Shards
    num_pieces: int = 1


def read_batches(
    source: SampleSource, jobs: Iterable[ReadJob], seed: int, *, processes: int, ahead: int
) -> Generator[PlacedBatch, None, None]:
    """Yield one batch per job, in order. Raises DataError as soon as a sample cannot be read."""
    if processes == 0:
        return (_read(source, job, seed) for job in jobs)
    per_process = max(1, -(-ahead // processes))
    return _from_processes(_JobReader(source, seed), jobs, num_processes=processes, ahead=per_process)


def read_stream(
    source: IterableSource, plan: StreamPlan, *, processes: int, ahead: int
) -> Generator[PlacedBatch, None, None]:
    """Yield the shard's part of each global batch of a stream. Batches before the first are read and dropped."""
    if processes == 0:
        return _stream_batches(source, plan)
    assert processes == 1
    return _from_processes(_StreamReader(source, plan), None, num_processes=1, ahead=max(1, ahead))


def _read(source: SampleSource, job: ReadJob, seed: int) -> PlacedBatch:
    positions = torch.arange(job.first, job.first + len(job.indices))
    if job.num_pieces == 1:
        return PlacedBatch(job.first, source.read(job.indices, positions, seed))
    cut = zip(job.indices.tensor_split(job.num_pieces), positions.tensor_split(job.num_pieces), strict=True)
    return PlacedBatch(job.first, Pieces(source.read(indices, places, seed) for indices, places in cut))


def _stream_batches(source: IterableSource, plan: StreamPlan) -> Generator[PlacedBatch, None, None]:
    stream = source.stream(plan.epoch)
    try:
        batch = 0
        while True:
            with preserved_generators():
                seed_generators(derive_seed(plan.seed, "stream", plan.epoch, batch))
                samples = stream.take(plan.batch_size)
            if not samples:
                return
            if batch >= plan.first_batch:
                start, stop = part_of(len(samples), plan.shards)
                first = batch * plan.batch_size + start
                bounds = [(first + i, first + j) for i, j in cut_parts(stop - start, plan.num_pieces)]
                offset = batch * plan.batch_size
                pieces = [_batch_of(source, samples[i - offset : j - offset], i, plan) for i, j in bounds]
                yield PlacedBatch(first, pieces[0] if plan.num_pieces == 1 else Pieces(pieces))
            batch += 1
    finally:
        stream.close()


def _batch_of(source: IterableSource, samples: Sequence[Any], first: int, plan: StreamPlan) -> Batch:
    if not samples:
        return source.example.rows(0, 0)
    names = range(first, first + len(samples))
    seed = derive_seed(plan.seed, "collate", plan.epoch, first)
    return source.format.batch(samples, names, source.what, source.num_classes, source.ignored, seed)


class _Failure(NamedTuple):
    """An error that happened in a process, as text: exceptions of user code may not survive the journey."""

    message: str
    details: str


class _JobReader(Dataset[Any]):
    def __init__(self, source: SampleSource, seed: int) -> None:
        self._source = source
        self._seed = seed

    def __getitem__(self, job: ReadJob) -> PlacedBatch | _Failure:
        try:
            return _read(self._source, job, self._seed)
        except DataError as error:
            return _failure(error)


class OnDemandReader:
    """Processes that read what is asked for when it is asked for, and stay until `close`."""

    def __init__(self, source: SampleSource, seed: int, *, processes: int, ahead: int) -> None:
        per_process = max(1, -(-ahead // processes))
        # Torch's DataLoader always wants to know this many jobs ahead: it is given empty ones where there is no other.
        self._num_empty = processes * per_process
        self._jobs: deque[ReadJob] = deque()
        self._reading = _from_processes(
            _JobReader(source, seed), self._next_jobs(), num_processes=processes, ahead=per_process
        )

    def read(self, jobs: Sequence[ReadJob]) -> Generator[PlacedBatch, None, None]:
        """Yield a batch for each job, in order. To be gone through before the next call. Raises DataError."""
        self._jobs.extend(jobs)
        for _ in range(self._num_empty if self._has_begun else 0):
            next(self._reading)
        self._has_begun = True
        for _ in jobs:
            yield next(self._reading)

    def close(self) -> None:
        """End the processes."""
        self._reading.close()

    _has_begun = False

    def _next_jobs(self) -> Iterator[ReadJob]:
        while True:
            yield self._jobs.popleft() if self._jobs else _EMPTY


class _StreamReader(IterableDataset[Any]):
    def __init__(self, source: IterableSource, plan: StreamPlan) -> None:
        self._source = source
        self._plan = plan

    def __iter__(self) -> Iterator[PlacedBatch | _Failure]:
        try:
            yield from _stream_batches(self._source, self._plan)
        except DataError as error:
            yield _failure(error)


def _from_processes(
    reader: Dataset[Any], jobs: Iterable[ReadJob] | None, *, num_processes: int, ahead: int
) -> Generator[PlacedBatch, None, None]:
    loader: DataLoader[Any] = DataLoader(
        reader,
        batch_size=None,
        sampler=jobs,
        num_workers=num_processes,
        prefetch_factor=ahead,
        collate_fn=_as_it_is,
        worker_init_fn=_ignore_interrupt,
        generator=torch.Generator().manual_seed(0),  # or it would draw from the process's own generator
    )
    # Begun by the main thread, torch would have a signal handler raise in whatever that does when a process dies.
    with ThreadPoolExecutor(1) as thread:
        iterator = thread.submit(iter, loader).result()
    try:
        while True:
            try:
                item = next(iterator)
            except StopIteration:
                return
            except (RuntimeError, ConnectionError, EOFError) as error:  # it was killed, or has no shared memory
                raise DataError(f"a process that reads the data ended: {error}; try data.processes = 0") from error
            if isinstance(item, _Failure):
                raise DataError(item.message) from RuntimeError(item.details)
            yield item
    finally:
        del iterator  # the last reference: this stops and joins the processes


def _as_it_is(item: Any) -> Any:
    return item


def _ignore_interrupt(_: int) -> None:
    # Ctrl-C reaches the whole group; the trainer still finishes its step, and ends the processes itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _failure(error: DataError) -> _Failure:
    return _Failure(str(error), "".join(traceback.format_exception(error)))
