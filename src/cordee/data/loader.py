"""Batches of a source, in an order and cut that depend on (seed, epoch, shards) alone.

In-memory sources are gathered several batches at a time: one gather and one conversion for about 3 MB of
inputs, handed out as views. 60,000 images of 28 × 28 in batches of 32, one kernel thread, a busy two-core EPYC:
17 µs per batch, against 43 µs in the same run for `X[i], Y[i]` on floats normalised beforehand, which also take
four times the memory.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor

from cordee.core import tree
from cordee.core.batch import Batch, Pieces
from cordee.core.errors import DataError, JobError
from cordee.core.seeds import derive_seed
from cordee.core.shards import Shards
from cordee.data.augment import Augmentation
from cordee.data.blocks import BlockSource
from cordee.data.datasets import DatasetSource, IterableSource
from cordee.data.online import GrowingSource
from cordee.data.order import EpochOrder, batch_part, count_batches, positions_of
from cordee.data.reading import (
    OnDemandReader,
    PlacedBatch,
    ReadJob,
    SampleSource,
    StreamPlan,
    read_batches,
    read_stream,
)
from cordee.data.source import ArraySource, Source

# Inputs gathered at once, as float32 bytes. Gather and conversion alone took, per batch of the above on two
# threads, 21 µs with 0.4 MB, 14 µs with 0.8 MB, 11 µs with 1.6 MB, 10 µs with 3.2 MB; much more would leave the
# last-level cache before it is used.
_GATHER_BYTES = 3 << 20
# A thread prepares batches only where that is more than moving bytes (augmentation, a source of the user's own)
# and a batch has at least this many. On a busy two-core host with one kernel thread, training on augmented
# batches of 128 × 3 × 32 × 32 took 12.5 ms a step without a thread and 10.4 ms with it, LeNet on batches of
# 32 × 28 × 28 took 4.0 ms without and 4.3 ms with: there the interpreter lock goes to and fro.
_THREAD_BYTES = 1 << 20
_NUM_LIKE = 64  # batches of growing data that are made up to measure with


class Loader:
    """The batches of `num_held` shards from `shard` on.

    With `shuffle` it is a training loader: a batch must not exceed the data.

    `batch_size` is that of the global batch, of which every shard gets its part; a part may be empty, so that
    all shards take equally many steps. The content of a batch depends on (seed, epoch, batch, shards) only,
    whatever was read before. Parts of several shards follow each other: cut into as many parts whose sizes
    differ by at most one, a batch gives them back.
    """

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        seed: int,
        shuffle: bool,
        shard: int = 0,
        num_shards: int = 1,
        num_held: int = 1,
        augment: Sequence[str] = (),
        prefetch: int = 2,
        processes: int = 0,
        in_pieces: bool = False,
    ) -> None:
        """`in_pieces` has samples that are collated by the user's own function collated shard by shard."""
        assert batch_size >= 1 and 0 <= shard < shard + num_held <= num_shards and prefetch >= 0 and processes >= 0
        if shuffle and source.num_samples is not None and batch_size > source.num_samples:
            raise DataError(
                f"training.batch_size = {batch_size} is larger than the training set ({source.num_samples} samples): "
                f"set it to at most {source.num_samples}"
            )
        if isinstance(source, IterableSource) and processes > 1:
            raise JobError(
                f"data.processes = {processes}: an IterableDataset is one stream and is read by one process; "
                "set data.processes = 1 or 0"
            )
        self._source = source
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._shards = Shards(shard, shard + num_held, num_shards)
        self._augmentation = Augmentation(augment, source.input_shape) if augment else None
        self._has_collate = getattr(getattr(source, "format", None), "collate", None) is not None
        self._in_pieces = in_pieces and self._has_collate
        self._prefetch = prefetch
        self._processes = processes
        self._blocks = getattr(source, "blocks", None)  # that samples are read from, where they lie in blocks
        self._expected: tuple[int, int] | None = None  # the epoch and the window whose blocks are read ahead
        self._read_order: tuple[int, EpochOrder] | None = None  # of the epoch that was read last
        self._on_demand: tuple[int, OnDemandReader] | None = None  # the same, where processes read

    def with_shards(self, shards: Shards) -> Loader:
        """Return what reads the parts of other shards of the same batches."""
        other = copy.copy(self)
        other._shards, other._read_order, other._on_demand = shards, None, None
        return other

    def in_one_piece(self) -> Loader:
        """Return what reads the same samples, each batch as one whoever collates it."""
        other = self.with_shards(self._shards)
        other._in_pieces = False
        return other

    @property
    def _num_pieces(self) -> int:
        return self._shards.num_held if self._in_pieces else 1

    @property
    def num_batches(self) -> int | None:
        """Global batches per epoch, the last uneven one included; None where the length is unknown."""
        num_samples = self._source.num_samples
        return None if num_samples is None else count_batches(num_samples, self._batch_size)

    def batches(self, epoch: int, first_batch: int = 0) -> Generator[Batch | Pieces, None, None]:
        """Return the batches of an epoch from `first_batch` on; no batch before it is read, but of a stream.

        Closing the generator stops all threads and processes it uses before it returns.
        """
        batches = self._batches(epoch, first_batch)
        return batches if self._blocks is None else self._closing_blocks(batches)

    def _batches(self, epoch: int, first_batch: int) -> Generator[Batch | Pieces, None, None]:
        source = self._source
        if isinstance(source, GrowingSource):
            return self._like_those_to_come(source)
        if isinstance(source, IterableSource):
            plan = StreamPlan(epoch, self._seed, first_batch, self._batch_size, self._shards, self._num_pieces)
            placed = read_stream(source, plan, processes=self._processes, ahead=self._prefetch)
            return self._finished(placed, epoch)
        if self._reads_samples(source):
            seed = derive_seed(self._seed, "samples", epoch)
            jobs = self._jobs(epoch, first_batch)
            placed = read_batches(source, jobs, seed, processes=self._processes, ahead=self._prefetch)
            return self._finished(placed, epoch)
        if self._uses_thread():
            num_ahead = -(-self._prefetch // self._num_gathered())
            return _flattened(in_background(lambda: self._gathered(epoch, first_batch), num_ahead))
        return _flattened(self._gathered(epoch, first_batch))

    def _reads_samples(self, source: Source) -> TypeGuard[SampleSource]:
        """Whether samples are read one by one, or in other processes: not gathered by the batch in this one."""
        if isinstance(source, DatasetSource):
            return True
        return self._processes > 0 and isinstance(source, SampleSource)

    def _like_those_to_come(self, source: GrowingSource) -> Generator[Batch, None, None]:
        """Yield batches made of the first samples, to measure with. Training takes them as they come (`online`)."""
        length = self._batch_size * self._shards.num_held // self._shards.total
        rows = torch.arange(max(1, length)) % source.example.num_samples
        for _ in range(_NUM_LIKE):
            yield source.example.select(rows)

    def sample_numbers(self, epoch: int, batch: int) -> list[int] | None:
        """Return which samples of the source make up a batch of these shards; None for streams."""
        if isinstance(self._source, (IterableSource, GrowingSource)) or self._source.num_samples is None:
            return None
        return self.numbers_at(epoch, *self._part(batch))

    def numbers_at(self, epoch: int, start: int, stop: int) -> list[int]:
        """Return which samples of the source are at the positions [start, stop) of an epoch. Not for streams."""
        source = self._source
        assert source.num_samples is not None
        indices = self._order(epoch).samples_at(torch.arange(start, stop))
        numbers: list[int] = source.numbers(indices) if isinstance(source, DatasetSource) else indices.tolist()
        return numbers

    def read(self, epoch: int, parts: Sequence[tuple[int, int]]) -> Generator[Batch, None, None]:
        """Return the samples at the positions [start, stop) of an epoch, for each of the parts, in order.

        They are the same whoever reads them, and when. Processes read them side by side, and stay for the next call;
        parts after the first are made ready in the background where `prefetch` allows. Not for streams, whose samples
        have no positions.
        """
        source = self._source
        assert not isinstance(source, IterableSource) and source.num_samples is not None
        if self._read_order is None or self._read_order[0] != epoch:
            self._read_order = (epoch, self._order(epoch))
        order = self._read_order[1]
        if parts:
            self._expect(order, epoch, parts[-1][0])
        if self._reads_samples(source):
            jobs = [ReadJob(start, order.samples_at(torch.arange(start, stop))) for start, stop in parts]
            return self._finished(self._read_jobs(source, jobs, epoch), epoch)
        augment_seed = derive_seed(self._seed, "augment", epoch)

        def gather() -> Iterator[Batch]:
            for positions in (torch.arange(start, stop) for start, stop in parts):
                yield self._read_array(order.samples_at(positions), positions, augment_seed)

        if len(parts) > 1 and self._uses_thread():
            return in_background(gather, self._prefetch)
        return (batch for batch in gather())

    def close(self) -> None:
        """End the processes and threads that `read` has started."""
        if self._blocks is not None:
            self._blocks.close()
        if self._on_demand is not None:
            self._on_demand[1].close()
            self._on_demand = None

    def _order(self, epoch: int) -> EpochOrder:
        assert self._source.num_samples is not None
        layout = None if self._blocks is None else self._blocks.layout
        return EpochOrder(self._source.num_samples, seed=self._seed, epoch=epoch, shuffle=self._shuffle, layout=layout)

    def _expect(self, order: EpochOrder, epoch: int, position: int) -> None:
        """Have the blocks of the window after that of `position` read ahead, once."""
        if self._blocks is None or self._prefetch == 0 or self._processes > 0:
            return
        following = order.blocks_after(position)
        if following is not None and self._expected != (epoch, following[0]):
            self._expected = (epoch, following[0])
            self._blocks.expect(following[1])

    def _read_jobs(
        self, source: SampleSource, jobs: Sequence[ReadJob], epoch: int
    ) -> Generator[PlacedBatch, None, None]:
        seed = derive_seed(self._seed, "samples", epoch)
        if self._processes == 0:
            yield from read_batches(source, jobs, seed, processes=0, ahead=0)
            return
        if self._on_demand is None or self._on_demand[0] != epoch:
            self.close()
            reader = OnDemandReader(source, seed, processes=self._processes, ahead=self._prefetch)
            self._on_demand = (epoch, reader)
        num_cuts = 1 if source.reads_at_once or self._has_collate else -(-self._processes // len(jobs))
        cut = [
            ReadJob(job.first + first, job.indices[first:last])
            for job in jobs
            for first, last in _cut_evenly(len(job.indices), num_cuts)
        ]
        placed = self._on_demand[1].read(cut)
        try:
            yield from _joined(placed, jobs, num_cuts)
        except BaseException:  # also of one who does not want the rest: what is under way would come first next time
            self.close()
            raise

    def _read_array(self, indices: Tensor, positions: Tensor, augment_seed: int) -> Batch:
        source = self._source
        if self._augmentation is None:
            return source.gather(indices)
        if isinstance(source, (ArraySource, BlockSource)):
            raw, targets = source.rows(indices)  # bytes: a quarter of the work, and padding is black
            return Batch(source.finish(self._augmentation.apply(raw, positions, augment_seed)), targets)
        inputs, targets = source.gather(indices)
        return Batch(self._augmentation.apply(inputs, positions, augment_seed), targets)

    def _uses_thread(self) -> bool:
        is_cheap = self._augmentation is None and isinstance(self._source, ArraySource)
        return self._prefetch > 0 and not is_cheap and self._batch_bytes() >= _THREAD_BYTES

    def _batch_bytes(self) -> int:
        """The bytes of these shards' part of a batch, as float32."""
        size = sum(math.prod(shape) for shape in tree.shape_leaves(self._source.input_shape))
        return 4 * size * -(-self._batch_size * self._shards.num_held // self._shards.total)

    def _num_gathered(self) -> int:
        """How many batches are gathered at once: of samples in blocks, no more than a window has."""
        count = _GATHER_BYTES // max(1, self._batch_bytes())
        if self._blocks is not None:
            count = min(count, self._blocks.layout.window // self._batch_size)
        return max(1, count)

    def _jobs(self, epoch: int, first_batch: int) -> Iterator[ReadJob]:
        num_batches = self.num_batches
        assert num_batches is not None
        order = self._order(epoch)
        for batch in range(first_batch, num_batches):
            start, stop = self._part(batch)
            yield ReadJob(start, order.samples_at(torch.arange(start, stop)), self._num_pieces)
            self._expect(order, epoch, start)  # after what is needed now

    def _finished(self, placed: Generator[PlacedBatch, None, None], epoch: int) -> Generator[Any, None, None]:
        seed = derive_seed(self._seed, "augment", epoch)
        with contextlib.closing(placed):
            for first, batch in placed:
                pieces = batch if isinstance(batch, Pieces) else (batch,)
                if self._augmentation is not None:
                    made = []
                    for inputs, targets in pieces:
                        positions = torch.arange(first, first + len(inputs))
                        made.append(Batch(self._augmentation.apply(inputs, positions, seed), targets))
                        first += len(inputs)
                    yield Pieces(made) if isinstance(batch, Pieces) else made[0]
                else:
                    yield batch

    def _closing_blocks(self, batches: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """Have nothing read ahead any more when the batches end, or are not wanted any more."""
        assert self._blocks is not None
        try:
            with contextlib.closing(batches):
                yield from batches
        finally:
            self._blocks.close()
            self._expected = None

    def _gathered(self, epoch: int, first_batch: int) -> Iterator[Iterator[Batch]]:
        num_batches = self.num_batches
        assert num_batches is not None
        order = self._order(epoch)
        augment_seed = derive_seed(self._seed, "augment", epoch)
        at_once = self._num_gathered()
        for first in range(first_batch, num_batches, at_once):
            parts = [self._part(batch) for batch in range(first, min(first + at_once, num_batches))]
            positions = positions_of(parts)
            indices = order.samples_at(positions)
            whole = self._read_array(indices, positions, augment_seed)
            self._expect(order, epoch, parts[0][0])  # after what is needed now, which is to have the processor
            sizes = [stop - start for start, stop in parts]
            if isinstance(whole.inputs, Tensor) and isinstance(whole.targets, Tensor):
                yield map(Batch, whole.inputs.split_with_sizes(sizes), whole.targets.split_with_sizes(sizes))
            else:
                ends = itertools.accumulate(sizes, initial=0)
                yield (whole.rows(start, stop) for start, stop in itertools.pairwise(ends))

    def _part(self, batch: int) -> tuple[int, int]:
        return batch_part(
            batch,
            batch_size=self._batch_size,
            num_samples=self._source.num_samples,
            shards=self._shards,
        )


def _cut_evenly(length: int, count: int) -> list[tuple[int, int]]:
    """Cut [0, length) into `count` parts of nearly equal size, none of them empty; into one if that is empty."""
    count = max(1, min(count, length))
    bounds = [length * part // count for part in range(count + 1)]
    return list(itertools.pairwise(bounds))


def _joined(placed: Iterator[PlacedBatch], jobs: Sequence[ReadJob], num_cuts: int) -> Iterator[PlacedBatch]:
    """Put together what was read of each job in pieces."""
    for job in jobs:
        pieces = [next(placed) for _ in _cut_evenly(len(job.indices), num_cuts)]
        whole = pieces[0].batch if len(pieces) == 1 else Batch.concatenate([piece.batch for piece in pieces])  # type: ignore[misc]
        yield PlacedBatch(job.first, whole)


def _flattened(groups: Iterator[Iterator[Batch]]) -> Generator[Batch, None, None]:
    try:
        for group in groups:
            yield from group
    finally:
        if isinstance(groups, Generator):
            groups.close()


# A thread that makes things ready while they are not yet asked for.

T = TypeVar("T")


def in_background(produce: Callable[[], Iterator[T]], ahead: int) -> Generator[T, None, None]:
    """Yield what `produce()` yields, made in a thread that stays at most `ahead` things in front.

    An exception of the producer is raised here, in its place in the order. Closing the generator (also by
    KeyboardInterrupt, or by dropping it) ends the thread before it returns.
    """
    ready: queue.Queue[tuple[T | None, BaseException | None, bool]] = queue.Queue(maxsize=max(1, ahead))
    is_closed = threading.Event()

    def offer(item: tuple[T | None, BaseException | None, bool]) -> bool:
        while not is_closed.is_set():
            try:
                ready.put(item, timeout=1.0)
            except queue.Full:
                continue
            return True
        return False

    def run() -> None:
        try:
            for thing in produce():
                if not offer((thing, None, False)):
                    return
            offer((None, None, True))
        except BaseException as error:  # noqa: BLE001 - handed to the consumer, who raises it
            offer((None, error, True))

    thread = threading.Thread(target=run, name="cordee-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            thing, error, is_last = ready.get()
            if error is not None:
                raise error
            if is_last:
                return
            yield thing  # type: ignore[misc]  # T may itself include None
    finally:
        is_closed.set()
        with contextlib.suppress(queue.Empty):
            while True:  # a thread that waits for room sees at once that it is not needed any more
                ready.get_nowait()
        thread.join()
