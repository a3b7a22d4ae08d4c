"""Typed views of the members' buffers in a segment, made once and reused."""

from __future__ import annotations

import torch
from torch import Tensor

from cordee.communication.shared_memory.layout import Layout
from cordee.communication.shared_memory.segment import Segment

_MAX_CACHED = 256  # a training step repeats its sizes; a program with endless new ones starts over


class Slots:
    """The two buffers of each member, as tensors of any element type and length."""

    def __init__(self, segment: Segment, layout: Layout) -> None:
        self._segment = segment
        self._layout = layout
        self._whole: dict[torch.dtype, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}
        self._sliced: dict[tuple[torch.dtype, int, int], tuple[Tensor, ...]] = {}

    def capacity(self, dtype: torch.dtype) -> int:
        """Elements that fit into one buffer."""
        return self._layout.slot_bytes // dtype.itemsize

    def whole(self, dtype: torch.dtype, parity: int) -> tuple[Tensor, ...]:
        """Return the full buffers of all members, in member order."""
        views = self._whole.get(dtype)
        if views is None:
            views = self._whole[dtype] = (self._make(dtype, 0), self._make(dtype, 1))
        return views[parity]

    def first(self, dtype: torch.dtype, parity: int, count: int) -> tuple[Tensor, ...]:
        """Return the first `count` elements of the buffers of all members, in member order."""
        key = (dtype, parity, count)
        views = self._sliced.get(key)
        if views is None:
            if len(self._sliced) >= _MAX_CACHED:
                self._sliced.clear()
            views = tuple(buffer[:count] for buffer in self.whole(dtype, parity))
            self._sliced[key] = views
        return views

    def _make(self, dtype: torch.dtype, parity: int) -> tuple[Tensor, ...]:
        layout = self._layout
        members = range(layout.num_members)
        return tuple(
            self._segment.tensor(layout.slot_at(member, parity), layout.slot_bytes, dtype) for member in members
        )
