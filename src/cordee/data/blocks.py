"""Samples that lie in blocks, which are read whole: row groups of a file, runs of lines. More of them than memory.

Blocks that were used last are held. Which blocks are used when is the order's affair (`order.EpochOrder`): one window
after the other, so that each block is read once in an epoch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from cordee.core import tree
from cordee.core.batch import Batch
from cordee.core.seeds import derive_seed
from cordee.core.tree import Nested
from cordee.data.order import BlockLayout
from cordee.data.source import ArraySource, ready_inputs

T = TypeVar("T")
Read = TypeVar("Read", covariant=True)


class BlockReader(Protocol[Read]):
    """What reads blocks. Called by several threads."""

    sizes: Tensor  # rows of each block, int64
    row_bytes: int  # of memory that a row takes once it is read

    def read(self, block: int) -> Read:
        """Return a block. Raises DataError that names it if it cannot be read."""
        ...

    def digest(self) -> str:
        """Return a hash of what is known without reading the rows: files with other rows have another one."""
        ...


@dataclasses.dataclass(frozen=True)
class Share:
    """A part of the rows of every block: drawn from the seed, block by block."""

    fraction: float
    seed: int
    is_aside: bool  # the part that was set aside, or what is left

    def counts(self, sizes: Tensor) -> Tensor:
        """Return how many rows of each block are in the share. Together they are as many as of the whole."""
        ends = sizes.cumsum(0).to(torch.float64)
        aside = ((ends * self.fraction).round() - ((ends - sizes) * self.fraction).round()).long()
        return aside if self.is_aside else sizes - aside

    def rows(self, block: int, size: int, count: int) -> Tensor:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "rows of block", block))
        drawn = torch.randperm(size, generator=generator)
        return (drawn[:count] if self.is_aside else drawn[size - count :]).sort().values


class Blocks(Generic[T]):
    """The rows of a reader by number, or a part of them, with at most about `memory_bytes` of blocks held.

    Half of the memory is for the window in use, half for the blocks that are read ahead. A block that is larger than
    that is held nevertheless. Not for several threads, but for its own.
    """

    def __init__(self, reader: BlockReader[T], memory_bytes: int) -> None:
        self.reader = reader
        self.sizes = reader.sizes
        self._share: Share | None = None
        self._memory_bytes = memory_bytes
        self._forget()

    def _forget(self) -> None:
        self._ends = self.sizes.cumsum(0)
        self._held: OrderedDict[int, tuple[T, Tensor | None]] = OrderedDict()
        self._changed = threading.Condition()
        self._wanted: deque[int] = deque()
        self._under_way: set[int] = set()  # blocks that are being read
        self._thread: threading.Thread | None = None
        self._is_reading_ahead = False

    @property
    def num_rows(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def layout(self) -> BlockLayout:
        return BlockLayout(self.sizes, max(1, self._memory_bytes // 2 // max(1, self.reader.row_bytes)))

    def split_rows(self, fraction: float, seed: int) -> tuple[Blocks[T], Blocks[T]]:
        """Return a part of the rows without a drawn share, and this share. Needs no memory for the choice."""
        assert self._share is None, "a share of a share"
        return self._part(Share(fraction, seed, False)), self._part(Share(fraction, seed, True))

    def first(self, num_rows: int) -> Blocks[T]:
        part = self._part(self._share)
        starts = self._ends - self.sizes
        part.sizes = torch.minimum(self.sizes, (num_rows - starts).clamp(min=0))
        part._forget()
        return part

    def _part(self, share: Share | None) -> Blocks[T]:
        part = Blocks(self.reader, self._memory_bytes)
        part._share = share
        part.sizes = self.sizes if share is None or share is self._share else share.counts(self.sizes)
        part._forget()
        return part

    def locate(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the block of each row, and its number among the rows of the block that are used."""
        block = torch.searchsorted(self._ends, indices, right=True)
        return block, indices - (self._ends - self.sizes)[block]

    def get(self, block: int) -> tuple[T, Tensor | None]:
        """Return a block as it was read, and which of its rows are used: None for all."""
        with self._changed:
            while block in self._under_way:
                self._changed.wait()
            if block in self._held:
                self._held.move_to_end(block)
                return self._held[block]
            self._begin(block)
        return self._read(block)

    def _begin(self, block: int) -> None:
        """Make room for a block that is about to be read. The lock is held."""
        self._under_way.add(block)
        sizes, row_bytes = self.reader.sizes, self.reader.row_bytes
        limit = max(self._memory_bytes, 2 * row_bytes * int(sizes.max()))
        taken = sum(int(sizes[number]) for number in (*self._held, *self._under_way)) * row_bytes
        while self._held and taken > limit:
            oldest, _ = self._held.popitem(last=False)
            taken -= int(sizes[oldest]) * row_bytes

    def _read(self, block: int) -> tuple[T, Tensor | None]:
        try:
            content = self.reader.read(block)
            rows: Tensor | None = None
            if self._share is not None:
                full, of_share = int(self.reader.sizes[block]), int(self._share.counts(self.reader.sizes)[block])
                rows = self._share.rows(block, full, of_share)[: int(self.sizes[block])]
            with self._changed:
                self._held[block] = content, rows
            return content, rows
        finally:
            with self._changed:
                self._under_way.discard(block)
                self._changed.notify_all()

    # Reading ahead: a thread that ends when there is nothing more to read.

    def expect(self, blocks: Sequence[int]) -> None:
        """Have these blocks read in the background. What was expected before, and is not begun, is dropped."""
        with self._changed:
            self._wanted = deque(block for block in blocks if self.sizes[block])
            if not self._is_reading_ahead and self._wanted:
                self._is_reading_ahead = True
                self._thread = threading.Thread(target=self._read_wanted, name="cordee-read-ahead", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the thread that reads ahead, if there is one. Blocks that are held stay."""
        with self._changed:
            self._wanted.clear()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _read_wanted(self) -> None:
        while (block := self._next_wanted()) is not None:
            with contextlib.suppress(Exception):  # whoever needs the block reads it again, and raises
                self._read(block)

    def _next_wanted(self) -> int | None:
        with self._changed:
            while self._wanted:
                block = self._wanted.popleft()
                if block not in self._held and block not in self._under_way:
                    self._begin(block)
                    return block
            self._is_reading_ahead = False
            return None


class BlockSource:
    """A split whose inputs and targets are read block by block."""

    reads_at_once = False

    def __init__(self, blocks: Blocks[Batch], example: Batch) -> None:
        """`example` has at least one sample, as it is held."""
        self.blocks = blocks
        self.num_samples: int | None = blocks.num_rows
        self.input_shape = tree.shapes(example.inputs)
        self.example = example

    def gather(self, indices: Tensor) -> Batch:
        raw = self.rows(indices)
        return Batch(self.finish(raw.inputs), raw.targets)

    def finish(self, raw: Nested) -> Nested:
        return ready_inputs(raw)

    def rows(self, indices: Tensor) -> Batch:
        """Return samples as they are held; `finish` makes their inputs ready. Augmentation goes between."""
        made = self.example.map(lambda leaf: leaf.new_empty((len(indices), *leaf.shape[1:])))
        columns = made.leaves()
        for block, places, rows in in_blocks(self.blocks, indices):
            content, used = self.blocks.get(block)
            rows = rows if used is None else used.index_select(0, rows)
            for column, held in zip(columns, content.leaves(), strict=True):
                column.index_copy_(0, places, held.index_select(0, rows))
        return made

    def read(self, indices: Tensor, positions: Tensor, seed: int) -> Batch:
        """Return samples as `gather` does: nothing in them is drawn."""
        return self.gather(indices)

    def first(self, num_samples: int) -> BlockSource:
        return BlockSource(self.blocks.first(num_samples), self.example)

    def split_rows(self, fraction: float, seed: int) -> tuple[BlockSource, BlockSource]:
        rest, aside = self.blocks.split_rows(fraction, seed)
        return BlockSource(rest, self.example), BlockSource(aside, self.example)

    def digest(self) -> str:
        return self.blocks.reader.digest()


def in_blocks(blocks: Blocks[T], indices: Tensor) -> list[tuple[int, Tensor, Tensor]]:
    """Return for each block that has some of the rows: its number, their places in `indices`, their numbers in it."""
    if len(indices) == 0:
        return []
    located, rows = blocks.locate(indices)
    ordered, places = located.sort(stable=True)
    numbers, starts = np.unique(ordered.numpy(), return_index=True)
    found = [
        (number, part, rows.index_select(0, part))
        for number, part in zip(numbers.tolist(), places.tensor_split(starts[1:].tolist()))
    ]
    # As they come in the epoch: at the end of a window its blocks are used before the next ones take their memory.
    return sorted(found, key=lambda one: int(one[1][0]))


def source_of_blocks(reader: BlockReader[Batch], memory_bytes: int) -> ArraySource | BlockSource:
    """Return the source of a reader's rows: an array of all of them where `memory_bytes` is enough for that."""
    first = reader.read(int(reader.sizes.nonzero()[0, 0]))
    if int(reader.sizes.sum()) * reader.row_bytes > memory_bytes:
        return BlockSource(Blocks(reader, memory_bytes), first.rows(0, 1).map(Tensor.clone))
    whole = [reader.read(int(block)) for block in reader.sizes.nonzero()[:, 0]]
    inputs, targets = Batch.concatenate(whole)
    is_ready = isinstance(inputs, Tensor) and inputs.dtype == torch.uint8
    return ArraySource(inputs if is_ready else ready_inputs(inputs), targets)
