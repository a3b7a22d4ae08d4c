"""Memory for flat buffers, used again as soon as nobody refers to the results in it.

The kernel makes new pages one fault at a time: 4 MB that are new cost 0.7 ms, ten times the copy into them, and more
than the reduction between two ranks of one host.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from cordee.horovod.requests import Part

ALIGNMENT_BYTES = 64
SMALL_BYTES = 256 * 1024  # less is had from the allocator, which has such pieces ready
LIMIT_BYTES = 256 * 1024 * 1024  # of all that is kept; what is larger by itself than half of it is not kept


class Layout:
    """Where tensors lie in a flat buffer."""

    def __init__(self, parts: Sequence[Part], itemsize: int) -> None:
        step = max(1, ALIGNMENT_BYTES // itemsize)
        self.length = 0
        self._places: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []  # shape, strides, start
        self._gaps: list[tuple[int, int]] = []  # elements that belong to no tensor: first, and the one after the last
        for part in parts:
            strides: list[int] = []
            count = 1
            for extent in reversed(part.shape):
                strides.insert(0, count)
                count *= extent
            self._places.append((part.shape, tuple(strides), self.length))
            end = self.length + -(-count // step) * step
            if self.length + count < end:
                self._gaps.append((self.length + count, end))
            self.length = end

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the tensors in a buffer."""
        return [flat.as_strided(shape, strides, start) for shape, strides, start in self._places]

    def clear_gaps(self, flat: Tensor) -> None:
        """Set to zero what belongs to no tensor, and in a small buffer everything, which takes less."""
        if self._gaps and flat.nbytes < SMALL_BYTES:
            flat.zero_()
        elif self._gaps:
            torch._foreach_zero_([flat[start:end] for start, end in self._gaps])


@lru_cache(maxsize=64)
def find_layout(parts: tuple[Part, ...], itemsize: int) -> Layout:
    """Return the layout of these tensors: training asks for the same again in every step."""
    return Layout(parts, itemsize)


class BufferPool:
    """Buffers that were used before. May be used from several threads."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._kept: list[torch.UntypedStorage] = []  # those that were taken last are at the end
        self._lock = threading.Lock()

    def take(self, length: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor of one dimension, aligned, with anything in it: memory to which nobody else refers.

        It becomes free by itself when the last tensor, array or DLPack capsule on its memory is gone.
        """
        num_bytes = length * dtype.itemsize
        if num_bytes < SMALL_BYTES or num_bytes > self._limit_bytes // 2:
            return torch.empty(length, dtype=dtype)
        with self._lock:
            fitting = [one for one in self._kept if num_bytes <= one.nbytes() <= 2 * num_bytes and _is_free(one)]
            if fitting:
                chosen = min(fitting, key=torch.UntypedStorage.nbytes)
                self._kept = [one for one in self._kept if one is not chosen]
            else:
                chosen = torch.UntypedStorage(num_bytes)  # type: ignore[no-untyped-call]
            self._kept.append(chosen)
            total = sum(one.nbytes() for one in self._kept)
            while total > self._limit_bytes:
                total -= self._kept.pop(0).nbytes()
            flat = torch.empty(0, dtype=dtype)
            flat.set_(chosen, 0, (length,), (1,))
            return flat

    def clear(self) -> None:
        """Keep nothing any more. Results that are in use stay."""
        with self._lock:
            self._kept.clear()


def _is_free(storage: torch.UntypedStorage) -> bool:
    """Whether the pool's own is the only reference. Views, NumPy arrays and DLPack capsules hold a reference each."""
    return bool(torch._C._storage_Use_Count(storage._cdata) == 1)


BUFFERS = BufferPool()
