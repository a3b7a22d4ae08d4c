"""What compression left out of a worker's pushes is sent with those that count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cordee.parameters.placement import make_layout
from cordee.strategies.parameter_server.client import ParameterClient
from cordee.strategies.parameter_server.messages import Push, Pushed
from cordee.strategies.parameter_server.settings import ParameterServerSettings

MODEL = nn.Linear(4, 4, bias=False)
LAYOUT = make_layout(MODEL, 1, can_split=True)


class Calls:
    """A server that refuses what is not finite, and adds up what counts."""

    def __init__(self) -> None:
        self.received = torch.zeros(16)
        self.codec: Any = None

    def call(self, server: int, push: Push, buffers: list[Tensor]) -> Pushed:
        if not all(bool(torch.isfinite(one).all()) for one in buffers):
            return Pushed("refused")
        if push.count:
            self.received += self.codec.decode(buffers)
        return Pushed("applied")


@pytest.mark.parametrize(("count", "value"), [(0.0, 0.0), (4.0, float("nan"))])
def test_a_push_that_does_not_count_takes_nothing_with_it(count: float, value: float) -> None:
    settings = ParameterServerSettings(compression="topk", topk=0.25)
    calls = Calls()
    client = ParameterClient(LAYOUT, settings, calls)  # type: ignore[arg-type]
    calls.codec = client._feedback[0].codec
    meant = torch.zeros(16)
    for unit, (num, gradient) in enumerate(
        [(4.0, torch.arange(16.0)), (count, torch.full((16,), value)), (4.0, torch.ones(16))]
    ):
        client.start_push(LAYOUT.pieces[0], gradient, Push(0, unit, unit, 0, 1, num, 0, 0)).result()
        meant += gradient if unit != 1 else 0.0
    left = client._feedback[0].left
    assert left is not None
    torch.testing.assert_close(calls.received + left, meant)


def test_a_unit_that_another_worker_was_faster_with_takes_nothing_with_it() -> None:
    class Slower(Calls):
        def call(self, server: int, push: Push, buffers: list[Tensor]) -> Pushed:
            return Pushed("known") if push.unit == 1 else super().call(server, push, buffers)

    calls = Slower()
    client = ParameterClient(LAYOUT, ParameterServerSettings(compression="topk", topk=0.25), calls)  # type: ignore[arg-type]
    calls.codec = client._feedback[0].codec
    for unit, gradient in enumerate([torch.arange(16.0), torch.full((16,), 9.0), torch.ones(16)]):
        client.start_push(LAYOUT.pieces[0], gradient, Push(0, unit, unit, 0, 1, 4.0, 0, 0)).result()
    left = client._feedback[0].left
    assert left is not None
    torch.testing.assert_close(calls.received + left, torch.arange(16.0) + torch.ones(16))
