import pytest
import torch

from cordee.communication.shared_memory.collectives import (
    Reduction,
    as_bytes,
    flatten,
    is_supported,
    reduce_into,
    write_back,
)
from cordee.communication.shared_memory.registration import BackendSettings
from cordee.communication.shared_memory.rounds import Operation, describe, sign
from cordee.core.errors import CommunicationError


def test_sixteen_bit_sums_are_rounded_once() -> None:
    # 1 + seven times 2**-9: each addition alone rounds to 1 in bfloat16, the exact sum does not.
    parts = [torch.tensor([1.0], dtype=torch.bfloat16)] + [torch.tensor([2.0**-9], dtype=torch.bfloat16)] * 7
    out = torch.empty(1, dtype=torch.bfloat16)
    reduce_into(out, parts, Reduction.SUM)
    assert out.item() == torch.tensor(1 + 7 * 2.0**-9).to(torch.bfloat16).item() > 1


def test_an_average_of_halves_does_not_overflow() -> None:
    out = torch.empty(1, dtype=torch.float16)
    reduce_into(out, [torch.tensor([60000.0], dtype=torch.float16)] * 2, Reduction.AVG)
    assert out.item() == 60000


def test_parts_are_taken_in_order() -> None:
    parts = [torch.tensor([value]) for value in (1e8, -1e8, 1.0)]
    out = torch.empty(1)
    reduce_into(out, parts, Reduction.SUM)
    assert out.item() == 1.0
    reduce_into(out, parts[::-1], Reduction.SUM)
    assert out.item() == 0.0


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        (Reduction.SUM, 13),
        (Reduction.PRODUCT, 60),
        (Reduction.MIN, 2),
        (Reduction.MAX, 6),
        (Reduction.BAND, 0),
        (Reduction.BOR, 7),
        (Reduction.BXOR, 1),
    ],
)
def test_each_reduction(reduction: Reduction, expected: int) -> None:
    out = torch.empty(1, dtype=torch.int64)
    reduce_into(out, [torch.tensor([value]) for value in (2, 5, 6)], reduction)
    assert out.item() == expected


def test_averages_of_integers_and_bits_of_floats_are_left_to_others() -> None:
    assert not is_supported(Reduction.AVG, torch.int32)
    assert not is_supported(Reduction.BAND, torch.float32)
    assert not is_supported(Reduction.SUM, torch.complex64)


def test_a_signature_says_what_it_is() -> None:
    word = sign(Operation.ALL_REDUCE, reduction=Reduction.MAX, dtype_code=1, count=12)
    assert describe(word) == "all_reduce(12 × float32, maximum)"
    assert describe(sign(Operation.BROADCAST, root=3, count=40)) == "broadcast(40 × bytes, root 3)"
    assert describe(sign(Operation.BARRIER)) == "barrier"
    assert describe(0) == "nothing yet"
    assert 0 < sign(Operation.ALL_TO_ALL, root=4095, count=1 << 60) < 1 << 63


def test_strided_tensors_are_copied_out_and_back() -> None:
    wide = torch.zeros(3, 2, requires_grad=True)
    column = wide[:, 0]
    flat = flatten(column)
    flat += 5
    after = write_back([column], [flat])
    assert after is not None
    after()
    assert wide.tolist() == [[5, 0], [5, 0], [5, 0]]
    whole = torch.zeros(4)
    assert write_back([whole], [as_bytes(whole)]) is None


def test_settings_say_what_to_change() -> None:
    with pytest.raises(CommunicationError, match="slot_bytes is 1000: it must be a positive multiple of 4096"):
        BackendSettings(slot_bytes=1000)
    with pytest.raises(CommunicationError, match="failure_timeout_s is 0"):
        BackendSettings(failure_timeout_s=0)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_mean_has_the_bits_of_a_sum_that_is_divided(count: int, dtype: torch.dtype) -> None:
    """Horovod's averages are means where all ranks are on one host, and divided sums elsewhere."""
    generator = torch.Generator().manual_seed(count)
    parts = [torch.randn(500, generator=generator, dtype=dtype) * 10.0**part for part in range(-2, count - 2)]
    mean, total = torch.empty(500, dtype=dtype), torch.empty(500, dtype=dtype)
    reduce_into(mean, parts, Reduction.AVG)
    reduce_into(total, parts, Reduction.SUM)
    assert torch.equal(mean, total.div(count))
