"""Buffers: every type and shape comes back, without a copy where that is possible."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cordee.communication.wire import ITEM_BYTES, Buffer, BufferSpec, WireError, incoming, outgoing
from cordee.core.errors import CommunicationError


def travel(array: Any) -> Buffer:
    (spec,), (view,), _, _ = outgoing([array])
    return incoming(0, spec, memoryview(bytearray(view)))


@settings(max_examples=80, deadline=None)
@given(
    hnp.arrays(
        st.sampled_from([name for name in ITEM_BYTES if name != "bfloat16"]).map(np.dtype),
        hnp.array_shapes(min_dims=0, max_dims=8, min_side=0, max_side=3),
    )
)
def test_arrays_come_back(array: np.ndarray[Any, Any]) -> None:
    buffer = travel(array)
    for received in (buffer.numpy(), buffer.torch().numpy()):
        assert received.dtype == array.dtype
        assert received.shape == array.shape
        assert received.tobytes() == array.tobytes()


@pytest.mark.parametrize("name", ITEM_BYTES)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 4)])
def test_tensors_come_back(name: str, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(int(np.prod(shape))).reshape(shape).to(getattr(torch, name))
    received = travel(tensor).torch()
    assert received.dtype == tensor.dtype
    assert received.shape == tensor.shape
    assert received.tolist() == tensor.tolist()


def test_strides_gradients_and_byte_order_do_not_matter() -> None:
    matrix = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(travel(matrix.t()).torch(), matrix.t())
    assert torch.equal(travel(torch.nn.Parameter(matrix)).torch(), matrix)
    assert torch.equal(travel(torch._neg_view(matrix)).torch(), -matrix)
    assert travel(np.arange(12)[::-2]).numpy().tolist() == list(range(11, -1, -2))
    assert travel(np.arange(4, dtype=">i4")).numpy().tolist() == [0, 1, 2, 3]


def test_nothing_is_copied() -> None:
    array, tensor = np.zeros(8, np.float32), torch.zeros(8)
    views = outgoing([array, tensor]).views
    views[0][0], views[1][0] = 1, 1
    assert array[0] != 0
    assert tensor[0] != 0

    memory = bytearray(32)
    buffer = incoming(0, BufferSpec("float32", (8,)), memoryview(memory))
    buffer.torch().fill_(1.0)
    assert buffer.numpy().tolist() == [1.0] * 8
    assert bytes(memory) == np.ones(8, np.float32).tobytes()


def test_unaligned_and_read_only_bytes_are_copied() -> None:
    for data in (memoryview(bytearray(b"\0" + np.arange(3.0).tobytes()))[1:], memoryview(np.arange(3.0).tobytes())):
        buffer = incoming(0, BufferSpec("float64", (3,)), data)
        assert buffer.numpy().flags.aligned
        assert buffer.torch().add_(1).tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("length", [0, 1, 31, 33])
def test_a_frame_that_lies_about_its_size(length: int) -> None:
    with pytest.raises(WireError, match=f"takes 32 bytes, but has {length}"):
        incoming(2, BufferSpec("float32", (2, 4)), memoryview(bytes(length)))


def test_bools_are_zero_or_one() -> None:
    with pytest.raises(WireError, match="other than 0 and 1"):
        incoming(0, BufferSpec("bool", (3,)), memoryview(b"\0\1\2"))
    assert incoming(0, BufferSpec("bool", (0,)), memoryview(b"")).torch().tolist() == []


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(WireError, match="buffer 1 is complex64 of shape"):
        outgoing([np.zeros(1), np.zeros(1, np.complex64)])
    with pytest.raises(WireError, match="buffer 0 is complex64"):
        outgoing([torch.zeros(1, dtype=torch.complex64)])
    with pytest.raises(WireError, match="object"):
        outgoing([np.array([object()])])
    with pytest.raises(WireError, match="at most 8 dimensions"):
        outgoing([np.zeros((1,) * 9)])
    with pytest.raises(WireError, match="on meta"):
        outgoing([torch.zeros(1, device="meta")])


def test_bfloat16_has_no_numpy_type() -> None:
    with pytest.raises(CommunicationError, match=r"Buffer\.torch"):
        travel(torch.zeros(1, dtype=torch.bfloat16)).numpy()
