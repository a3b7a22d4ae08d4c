"""Memory that is used again: never while somebody can still see what is in it."""

from __future__ import annotations

import pytest
import torch

from cordee.horovod.buffers import ALIGNMENT_BYTES, SMALL_BYTES, BufferPool, Layout
from cordee.horovod.execution import divide
from cordee.horovod.requests import Part

FLOATS = 1 << 20


def test_a_buffer_is_used_again_when_nobody_refers_to_it() -> None:
    pool = BufferPool()
    address = pool.take(FLOATS, torch.float32).data_ptr()
    assert pool.take(FLOATS, torch.float32).data_ptr() == address
    assert pool.take(FLOATS // 2, torch.float64).data_ptr() == address  # memory has no type


@pytest.mark.parametrize(
    "refer",
    [
        lambda flat: flat,
        lambda flat: flat[-1:],
        lambda flat: flat.view(2, -1)[1],
        lambda flat: flat.numpy()[5:],
        lambda flat: torch.utils.dlpack.to_dlpack(flat),
        lambda flat: flat.untyped_storage().data_ptr() and flat.view(torch.uint8),
    ],
    ids=["tensor", "slice", "view", "array", "capsule", "bytes"],
)
def test_a_buffer_in_use_is_not_given_away(refer: object) -> None:
    pool = BufferPool()
    flat = pool.take(FLOATS, torch.float32)
    address = flat.data_ptr()
    held = refer(flat)  # type: ignore[operator]
    del flat
    other = pool.take(FLOATS, torch.float32)
    assert other.data_ptr() != address
    del held
    assert pool.take(FLOATS, torch.float32).data_ptr() == address


def test_a_result_keeps_its_values_while_later_ones_are_made() -> None:
    pool = BufferPool()
    held = []
    for number in range(6):
        flat = pool.take(FLOATS, torch.float32)
        flat.fill_(number)
        held.append(flat[number : number + 1000])
    assert [int(part.unique()) for part in held] == list(range(6))


def test_a_much_larger_buffer_is_not_taken_for_a_small_request() -> None:
    pool = BufferPool()
    address = pool.take(4 * FLOATS, torch.float32).data_ptr()
    assert pool.take(FLOATS, torch.float32).data_ptr() != address


def test_what_is_kept_is_bounded() -> None:
    pool = BufferPool(limit_bytes=10 * SMALL_BYTES)
    held = [pool.take(2 * SMALL_BYTES, torch.uint8) for _ in range(20)]
    addresses = [one.data_ptr() for one in held]
    assert len(set(addresses)) == 20
    assert len(pool._kept) == 5
    pool.take(6 * SMALL_BYTES, torch.uint8)  # more than half of the limit: not kept
    assert max(one.nbytes() for one in pool._kept) == 2 * SMALL_BYTES
    pool.clear()
    assert not pool._kept and held[0].fill_(3).sum() == 6 * SMALL_BYTES  # what is in use stays


@pytest.mark.parametrize("size", [1, 1000, 100_000])
def test_tensors_lie_apart_and_aligned_and_gaps_are_zero(size: int) -> None:
    shapes = [(), (3,), (0, 4), (size, 5), (2, 3, 4)]
    layout = Layout([Part("torch.float32", shape) for shape in shapes], 4)
    flat = torch.full((layout.length,), float("nan"))
    layout.clear_gaps(flat)
    views = layout.views(flat)
    assert [tuple(view.shape) for view in views] == shapes
    assert all(view.storage_offset() * 4 % ALIGNMENT_BYTES == 0 for view in views)
    for number, view in enumerate(views):
        assert view.is_contiguous()
        view.fill_(number + 1)
    assert flat.sum() == sum((number + 1) * view.numel() for number, view in enumerate(views))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("divisor", [1, 2, 3, 4, 6, 8, 64])
def test_a_mean_has_the_bits_of_a_division(dtype: torch.dtype, divisor: int) -> None:
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = torch.cat([values * scale for scale in (1.0, 1e-5, 1e-40, 1e4)]).to(dtype)
    own = values.clone()
    divide([own], divisor)
    assert torch.equal(own, values / divisor)
