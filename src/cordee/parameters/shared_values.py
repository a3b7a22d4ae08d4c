"""The values of a large part in shared memory: clients on the host read them there, instead of being sent a copy.

Each megabyte has a counter that is odd while a server changes it. Who reads compares it before and after with the one
that the server told: if it is the same, so are the values. As in `rounds.py` this relies on the store order of x86.

    the counters, a word for each block, up to the next page / the values
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from math import prod

import numpy as np
import psutil
import torch
from torch import Tensor

from cordee.communication.shared_memory.segment import Address, create_segment, map_for_reading
from cordee.communication.wire import Parcel, outgoing
from cordee.core.errors import CommunicationError
from cordee.parameters.messages import Memory, Value

BLOCK_BYTES = 1 << 20
SMALLEST_BYTES = 1 << 18  # below, a copy costs less than the care
_PAGE = 4096
_NOTHING = contextlib.nullcontext()


class SharedValues:
    """The server's side."""

    def __init__(self, num_bytes: int, purpose: str) -> None:
        """Reserve the memory. Raises CommunicationError if there is not as much: asking the system for it would not
        fail, but end other programs."""
        free = psutil.virtual_memory().available
        if num_bytes > free:
            raise CommunicationError(f"{purpose} needs {num_bytes} bytes of memory, and {free} are free")
        self._segment, fd = create_segment(_values_at(num_bytes) + num_bytes, purpose)
        # The file stays open as long as the server lives. A client that has mapped it says so by the number.
        self.place = Memory(os.getpid(), fd, self._segment.num_bytes, secrets.randbits(62) + 1)
        self._num_bytes = num_bytes
        self._counters = self._segment.words(0, _num_blocks(num_bytes))

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        assert prod(shape) * dtype.itemsize == self._num_bytes
        return self._segment.tensor(_values_at(self._num_bytes), self._num_bytes, dtype).view(shape)

    @contextlib.contextmanager
    def changing(self, first: int, last: int) -> Iterator[None]:
        """Bytes [first, last) change in here."""
        blocks = range(first // BLOCK_BYTES, _num_blocks(last))
        for block in blocks:
            self._counters[block] += 1
        try:
            yield
        finally:
            for block in blocks:
                self._counters[block] += 1

    def stamp(self, first: int, last: int) -> int:
        """Return what a client must find to read these bytes as they are now."""
        return _stamp(self._counters, first, last)


class StoredValues:
    """Numbers of a server, with their version: in memory that clients of this host map, or in the server's own."""

    def __init__(self, values: Tensor, memory: SharedValues | None) -> None:
        self.memory = memory
        self.values = values
        self.flat = values.view(-1)
        self.length = self.flat.numel()
        self.version = 0  # counts the updates
        self._whole: Parcel | None = None

    def changing(self, start: int, stop: int) -> contextlib.AbstractContextManager[None]:
        """Elements [start, stop) change in here."""
        if self.memory is None:
            return _NOTHING
        item = self.flat.element_size()
        return self.memory.changing(start * item, stop * item)

    def locate(self, memory: int, start: int, stop: int) -> Value:
        """Return how a client that has mapped `memory` gets elements [start, stop): with a stamp it reads them there.

        Else they are to be sent; where they are is for the next time, for a client that can map memory.
        """
        if self.memory is None or memory < 0:
            return Value(self.version)
        if memory != self.memory.place.number:  # none yet, or of a process that served before this one
            return Value(self.version, memory=self.memory.place)
        item = self.flat.element_size()
        return Value(self.version, self.memory.stamp(start * item, stop * item))

    def parcel(self, start: int, stop: int) -> Parcel:
        """Return elements [start, stop), ready to be sent: views of this memory."""
        if start == 0 and stop == self.length:
            if self._whole is None:
                self._whole = outgoing([self.flat])
            return self._whole
        return outgoing([self.flat[start:stop]])


class ValuesView:
    """A client's side."""

    def __init__(self, place: Memory, num_bytes: int) -> None:
        """Map `num_bytes` of values of a server. Raises CommunicationError if that is not possible."""
        self.number = place.number
        if place.num_bytes != _values_at(num_bytes) + num_bytes:
            raise CommunicationError(f"{place.num_bytes} bytes of shared memory for {num_bytes} bytes of values")
        memory = map_for_reading(Address(place.pid, place.fd, place.num_bytes))
        self._counters = memory[: 8 * _num_blocks(num_bytes)].cast("q")
        self._values = np.frombuffer(memory, np.uint8)[_values_at(num_bytes) :]

    def read(self, first: int, target: memoryview, stamp: int) -> bool:
        """Copy bytes from `first` on into `target`; False if they are no longer those of the stamp."""
        last = first + target.nbytes
        if _stamp(self._counters, first, last) != stamp:
            return False
        np.frombuffer(target, np.uint8)[:] = self._values[first:last]
        return _stamp(self._counters, first, last) == stamp


def _stamp(counters: memoryview, first: int, last: int) -> int:
    """Return the sum of the counters of the blocks: they only grow, so none has changed where the sum has not."""
    block = first // BLOCK_BYTES
    if last <= (block + 1) * BLOCK_BYTES:
        return int(counters[block])
    return sum(counters[block : _num_blocks(last)])


def _num_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES)


def _values_at(num_bytes: int) -> int:
    return -(-8 * _num_blocks(num_bytes) // _PAGE) * _PAGE
