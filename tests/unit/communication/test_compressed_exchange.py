"""Gradients that are summed in a compressed form: what was sent and what is left add up to what was meant."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cordee.communication.compressed_sum import CompressedExchange
from cordee.communication.compression import CompressionSettings, ErrorFeedback

NOMINAL = 8


@pytest.fixture(autouse=True)
def _group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Exchanged:
    """An exchange over a parameter of 16 numbers, of which a quarter is sent."""

    def __init__(self) -> None:
        self.parameter = nn.Parameter(torch.zeros(16))
        settings = CompressionSettings.read("compression", {"use": "topk", "share": 0.25})

        def make(shapes: list[list[torch.Size]], dtypes: list[torch.dtype]) -> list[ErrorFeedback]:
            self.feedback = [settings.feedback(own, dtype) for own, dtype in zip(shapes, dtypes, strict=True)]
            return self.feedback

        exchange = CompressedExchange([self.parameter], 1, make)  # type: ignore[arg-type]
        self._reduce = partial(exchange.reduce, count_at=0, nominal_count=NOMINAL)

    def step(self, mean: Tensor, count: int) -> Tensor:
        """Exchange the gradient of a batch of `count` samples; return what comes out."""
        self.parameter.grad = mean * (count / NOMINAL)
        self._reduce([float(count)])
        assert self.parameter.grad is not None
        return self.parameter.grad.clone()

    @property
    def left(self) -> Tensor:
        assert self.feedback[0].left is not None
        return self.feedback[0].left


def test_what_is_left_of_a_batch_is_not_scaled_with_a_smaller_one() -> None:
    exchanged, means = Exchanged(), torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    sent = torch.zeros(16)
    for mean, count in zip(means, (8, 8, 1, 3), strict=True):
        sent += exchanged.step(mean, count)
    torch.testing.assert_close(sent + exchanged.left, means.sum(0))


def test_nothing_of_what_is_left_goes_with_a_batch_that_does_not_count() -> None:
    exchanged = Exchanged()
    exchanged.step(torch.arange(16.0), NOMINAL)
    left = exchanged.left.clone()
    assert left.any()
    exchanged.step(torch.zeros(16), 0)
    assert torch.equal(exchanged.left, left), "the step is left out, and what was sent in it would be lost"
