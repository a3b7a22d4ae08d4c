"""The values of a large part in shared memory: clients on the host read them there, instead of being sent a copy.

Each megabyte has a counter that is odd while a server changes it. Who reads compares it before and after with the one
that the server told: if it is the same, so are the values. As in `rounds.py` this relies on the store order of x86.

    the counters, a word for each block, up to the next page / the values
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Iterator
from math import prod

import numpy as np
import psutil
import torch
from torch import Tensor

from cordee.communication.shared_memory.segment import Address, create_segment, map_for_reading
from cordee.core.errors import CommunicationError

log = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 20
SMALLEST_BYTES = 1 << 18  # below, a copy costs less than the care
_PAGE = 4096


class SharedValues:
    """The server's side."""

    def __init__(self, num_bytes: int, purpose: str) -> None:
        """Reserve the memory. Raises CommunicationError if there is not as much: asking the system for it would not
        fail, but end other programs."""
        free = psutil.virtual_memory().available
        if num_bytes > free:
            raise CommunicationError(f"{purpose} needs {num_bytes} bytes of memory, and {free} are free")
        self._segment, fd = create_segment(_values_at(num_bytes) + num_bytes, purpose)
        self.address = (fd, self._segment.num_bytes)  # the file stays open as long as the server lives
        self.number = secrets.randbits(62) + 1  # a client that has mapped it says so by this
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


def make_shared(num_bytes: int, purpose: str) -> SharedValues | None:
    """Return shared memory for values that are large enough, if there is any."""
    if num_bytes < SMALLEST_BYTES:
        return None
    try:
        return SharedValues(num_bytes, purpose)
    except CommunicationError as error:
        log.info("%s is not in shared memory: %s", purpose, error)
        return None


class ValuesView:
    """A client's side."""

    def __init__(self, pid: int, fd: int, num_bytes: int, num_value_bytes: int, number: int = 0) -> None:
        """Map the values of a server. Raises CommunicationError if that is not possible."""
        self.number = number
        if num_bytes != _values_at(num_value_bytes) + num_value_bytes:
            raise CommunicationError(f"{num_bytes} bytes of shared memory for {num_value_bytes} bytes of values")
        memory = map_for_reading(Address(pid, fd, num_bytes))
        self._counters = memory[: 8 * _num_blocks(num_value_bytes)].cast("q")
        self._values = np.frombuffer(memory, np.uint8)[_values_at(num_value_bytes) :]

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
