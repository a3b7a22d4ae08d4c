from __future__ import annotations

import numpy as np
import pytest
import torch

from cordee.core.errors import CommunicationError
from cordee.parameters.shared_values import BLOCK_BYTES, SharedValues, ValuesView

NUM_BYTES = 2 * BLOCK_BYTES + 400


def made() -> tuple[SharedValues, torch.Tensor, ValuesView]:
    memory = SharedValues(NUM_BYTES, "a test")
    return memory, memory.tensor((NUM_BYTES // 4,), torch.float32), ValuesView(memory.place, NUM_BYTES)


def test_values_are_read_where_they_are() -> None:
    memory, values, view = made()
    with memory.changing(0, NUM_BYTES):
        values.copy_(torch.arange(len(values)))
    blocks = ((0, BLOCK_BYTES), (BLOCK_BYTES, 2 * BLOCK_BYTES), (2 * BLOCK_BYTES, NUM_BYTES))
    for first, last in (*blocks, (0, NUM_BYTES), (400, BLOCK_BYTES + 800)):
        out = np.zeros((last - first) // 4, np.float32)
        assert view.read(first, out.data.cast("B"), memory.stamp(first, last))
        assert np.array_equal(out, np.arange(first // 4, last // 4))


def test_values_that_have_changed_are_not_taken() -> None:
    memory, _, view = made()
    out = np.zeros(10, np.float32).data.cast("B")
    stamps = [memory.stamp(0, 40), memory.stamp(BLOCK_BYTES, BLOCK_BYTES + 40)]
    with memory.changing(0, 40):
        assert not view.read(0, out, stamps[0]), "it changes now"
    assert not view.read(0, out, stamps[0]), "it has changed"
    assert view.read(0, out, memory.stamp(0, 40))
    assert view.read(BLOCK_BYTES, out, stamps[1]), "another block"


def test_values_in_several_blocks_are_not_taken_if_one_of_them_has_changed() -> None:
    memory, _, view = made()
    out = np.zeros(NUM_BYTES // 4, np.float32).data.cast("B")
    stamp = memory.stamp(0, NUM_BYTES)
    with memory.changing(2 * BLOCK_BYTES, NUM_BYTES):
        assert not view.read(0, out, stamp)
    assert not view.read(0, out, stamp) and view.read(0, out, memory.stamp(0, NUM_BYTES))


def test_memory_of_another_size_is_refused() -> None:
    memory, _, _ = made()
    with pytest.raises(CommunicationError, match="bytes of shared memory for 100 bytes of values"):
        ValuesView(memory.place, 100)
