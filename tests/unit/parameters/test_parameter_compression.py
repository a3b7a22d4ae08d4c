"""Compression: what comes through, what is made good later, what is refused."""

from __future__ import annotations

import pytest
import torch

from cordee.core.errors import CommunicationError
from cordee.parameters.compression import DeltaReceiver, DeltaSender, ErrorFeedback, make_codec

LENGTH = 3000
KINDS = ["none", "fp16", "int8", "topk"]


def codec(kind: str):  # type: ignore[no-untyped-def]
    return make_codec(kind, 0.1, LENGTH, torch.float32)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "share"), [("none", 1.0), ("fp16", 0.5), ("int8", 0.26), ("topk", 0.21)])
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
    assert error < {"none": 1e-6, "fp16": 1e-5, "int8": 1e-4, "topk": 0.1}[kind]


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
