"""Compression: what comes through, what is made good later, what is refused."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from cordee.communication.compression import DeltaReceiver, DeltaSender, ErrorFeedback, make_codec
from cordee.core.errors import CommunicationError

LENGTH = 3000
KINDS = ["none", "fp16", "bf16", "int8", "int4", "topk", "topk_2bit", "powersgd"]
TOLERANCES = {
    "none": 1e-6,
    "fp16": 1e-5,
    "bf16": 1e-4,
    "int8": 1e-4,
    "int4": 2e-3,
    "topk": 0.1,
    "topk_2bit": 0.2,
    "powersgd": 0.2,
}


def codec(kind: str):  # type: ignore[no-untyped-def]
    return make_codec(kind, 0.1, LENGTH, torch.float32, [(40, 50), (50, 5, 2, 2)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "share"),
    [
        ("none", 1.0),
        ("fp16", 0.5),
        ("bf16", 0.5),
        ("int8", 0.26),
        ("int4", 0.137),
        ("topk", 0.21),
        ("topk_2bit", 0.046),
        ("powersgd", 0.11),
    ],
)
def test_fewer_bytes_travel(kind: str, share: float) -> None:
    sent = codec(kind).encode(torch.randn(LENGTH))
    assert sum(tensor.nbytes for tensor in sent) <= share * 4 * LENGTH


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_gradient_lacks_the_next_ones_bring(kind: str) -> None:
    """The sum of what arrives stays within one gradient's rounding of the sum of what was meant."""
    generator = torch.Generator().manual_seed(0)
    sender, receiver = ErrorFeedback(codec(kind)), codec(kind)
    meant, arrived = torch.zeros(LENGTH), torch.zeros(LENGTH)
    steady = torch.randn(LENGTH, generator=generator)
    for _ in range(200):
        gradient = steady + 0.1 * torch.randn(LENGTH, generator=generator)
        meant += gradient
        arrived += receiver.decode(sender.compress(gradient))
    error = float((arrived - meant).norm() / meant.norm())
    assert error < TOLERANCES[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_followed_and_lost_messages_noticed(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(LENGTH, generator=generator)
    sender, receiver, copy = DeltaSender(codec(kind)), DeltaReceiver(codec(kind), LENGTH), torch.zeros(LENGTH)
    for turn in range(60):
        if turn < 40:
            values += 0.01 * torch.randn(LENGTH, generator=generator)
        sent = sender.compress(values, receiver.stamp)
        if turn % 7 != 3:  # every seventh is lost: the next one is whole
            receiver.take(copy, sent, sender.stamp)
    torch.testing.assert_close(copy, values, rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "powersgd"])
def test_parameters_come_as_they_are_also_to_a_copy_that_was_changed(kind: str) -> None:
    """As that of a worker that takes steps alone between two pulls."""
    values, copy = torch.linspace(-1, 1, LENGTH), torch.zeros(LENGTH)
    sender, receiver = DeltaSender(codec(kind)), DeltaReceiver(codec(kind), LENGTH)
    for _ in range(40):
        receiver.take(copy, sender.compress(values, receiver.stamp), sender.stamp)
        error = (copy - values).abs().max()
        copy += 1.0
    assert error < 1e-3


@pytest.mark.parametrize(("kind", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_parameters_of_the_type_that_is_sent_are_no_differences(
    kind: Literal["fp16", "bf16"], dtype: torch.dtype
) -> None:
    sender, receiver = DeltaSender(make_codec(kind, 0.1, 4, dtype)), DeltaReceiver(make_codec(kind, 0.1, 4, dtype), 4)
    values, copy = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=dtype), torch.zeros(4, dtype=dtype)
    for _ in range(3):
        values += 1
        receiver.take(copy, sender.compress(values, receiver.stamp), sender.stamp)
        assert torch.equal(copy, values)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_arrives_as_such_and_is_not_kept(kind: str) -> None:
    sender, receiver = ErrorFeedback(codec(kind)), codec(kind)
    bad = torch.ones(LENGTH)
    bad[5] = float("inf")
    assert not bool(torch.isfinite(receiver.decode(sender.compress(bad))).all())
    assert bool(torch.isfinite(receiver.decode(sender.compress(torch.ones(LENGTH)))).all())


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_of_another_length_or_kind_are_refused(kind: str) -> None:
    with pytest.raises(CommunicationError):
        codec(kind).decode([torch.zeros(LENGTH - 1)])
    with pytest.raises(CommunicationError):
        codec(kind).decode([torch.zeros(LENGTH, dtype=torch.int64)] * 2)


def test_places_outside_of_the_vector_are_refused() -> None:
    with pytest.raises(CommunicationError, match="outside"):
        codec("topk").decode([torch.tensor([LENGTH], dtype=torch.int32), torch.ones(1)])


# What rounds to a neighbour, or to nothing, leaves a difference that double precision has exactly (Sterbenz). The two
# others send something else, so that what is left is rounded once.
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 2, 127, 4096, 9001])
def test_what_is_sent_and_left_is_what_was_meant(kind: str, length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    sender = ErrorFeedback(make_codec(kind, 0.05, length, torch.float64, [(length,)]))  # type: ignore[arg-type]
    for turn in range(5):
        gradient = torch.randn(length, generator=generator, dtype=torch.float64) * 10.0 ** (turn - 2)
        meant = gradient if sender.left is None else gradient + sender.left
        arrived = sender.codec.decode(sender.compress(gradient))
        left = torch.zeros_like(meant) if sender.left is None else sender.left
        if kind == "topk_2bit":
            torch.testing.assert_close(arrived + left, meant, rtol=0, atol=float(meant.abs().max()) * 2**-52)
        else:
            assert torch.equal(arrived + left, meant)


def test_a_matrix_of_low_rank_arrives_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(40, 2, generator=generator, dtype=torch.float64) @ torch.randn(2, 30, dtype=torch.float64)
    powersgd = make_codec("powersgd", 0.0, 1205, torch.float64, [(40, 30), (5,)], 2)
    values = torch.cat([matrix.reshape(-1), torch.arange(5, dtype=torch.float64)])
    torch.testing.assert_close(powersgd.decode(powersgd.encode(values)), values, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_parameters_of_all_types_can_be_compressed(kind: str, dtype: torch.dtype) -> None:
    feedback = ErrorFeedback(make_codec(kind, 0.1, 240, dtype, [(12, 20)], 2))  # type: ignore[arg-type]
    gradient = torch.randn(240, generator=torch.Generator().manual_seed(0)).to(dtype)
    arrived = sum(feedback.codec.decode(feedback.compress(gradient)).double() for _ in range(200))
    assert float((arrived / 200 - gradient).abs().max()) < 0.1  # type: ignore[operator]


def test_a_receiver_need_not_know_the_share() -> None:
    values = torch.randn(5000)
    sent = make_codec("topk_2bit", 0.03, 5000, torch.float32).encode(values)
    one = make_codec("topk_2bit", 0.03, 5000, torch.float32).decode(sent)
    assert torch.equal(one, make_codec("topk_2bit", 1.0, 5000, torch.float32).decode(sent))
    assert 0.02 * 5000 < int((one != 0).sum()) < 0.04 * 5000
