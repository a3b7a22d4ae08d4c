"""What compression left out of a worker's pushes is sent with those that count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cordee.checkpoint import State
from cordee.parameters.placement import make_layout
from cordee.strategies.parameter_server.client import ParameterClient
from cordee.strategies.parameter_server.messages import KeepResidual, PullResiduals, Push, Pushed, Residuals
from cordee.strategies.parameter_server.settings import ParameterServerSettings
from cordee.strategies.parameter_server.state import join_residuals, split_residuals

MODEL = nn.Linear(4, 4, bias=False)
LAYOUT = make_layout(MODEL, 1, can_split=True)
BIG = nn.Linear(16, 16)


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


def left_out_by(num_workers: int, num_servers: int) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Return what each worker has left out, by piece, and by worker and parameter."""
    layout = make_layout(BIG, num_servers, can_split=True)
    whole = [
        {
            name: torch.randn(p.numel(), generator=torch.Generator().manual_seed(index))
            for name, p in BIG.named_parameters()
        }
        for index in range(num_workers)
    ]
    found = []
    for piece in layout.pieces:
        of_piece = {}
        for index, own in reversed(list(enumerate(whole))):  # in whatever order they came
            kept = torch.zeros(piece.length)
            for one in piece.slices:
                at = one.offset - piece.start
                kept[at : at + one.length] = own[one.name][one.first : one.first + one.length]
            of_piece[f"worker-{index}"] = kept
        found.append(of_piece)
    return found, whole


@pytest.mark.parametrize("num_servers", [1, 3])
def test_what_is_saved_is_what_each_worker_of_the_resumed_run_begins_with(num_servers: int) -> None:
    found, _ = left_out_by(11, 2)  # so that "worker-10" is after "worker-2"
    saved = join_residuals(make_layout(BIG, 2, can_split=True), found, weight=1 / 11)
    again, _ = left_out_by(11, num_servers)
    for piece, expected in zip(make_layout(BIG, num_servers, can_split=True).pieces, again, strict=True):
        taken = split_residuals(saved, piece, 11, weight=1 / 11)
        assert taken.keys() == expected.keys()
        assert all(torch.equal(taken[name], expected[name]) for name in expected)


@pytest.mark.parametrize("weight", [None, 1.0], ids=["mean", "sum"])
def test_another_number_of_workers_begins_with_what_adds_up_to_the_same(weight: float | None) -> None:
    found, whole = left_out_by(3, 1)
    layout = make_layout(BIG, 1, can_split=True)
    saved = join_residuals(layout, found, weight or 1 / 3)
    taken = split_residuals(saved, layout.pieces[0], 2, weight or 1 / 2)
    total = sum((weight or 1 / 2) * left for left in taken.values())
    for one in layout.pieces[0].slices:
        expected = (weight or 1 / 3) * torch.stack([own[one.name] for own in whole]).sum(0)
        torch.testing.assert_close(total[one.offset : one.offset + one.length], expected)


def test_a_worker_that_did_not_give_all_of_it_and_residuals_of_other_strategies_are_left_out() -> None:
    found, _ = left_out_by(2, 2)
    del found[1]["worker-1"]
    layout = make_layout(BIG, 2, can_split=True)
    saved = join_residuals(layout, found, 0.5)
    assert saved.values["workers"] == 1
    of_other = State({"weight": torch.ones(4, 4), "sum.0": torch.ones(16)}, {})
    assert split_residuals(of_other, layout.pieces[0], 2, 0.5) == {}
    assert split_residuals(join_residuals(layout, [], 0.5), layout.pieces[0], 2, 0.5) == {}


def test_what_a_resumed_worker_sends_and_keeps_is_what_was_meant_from_the_beginning() -> None:
    class Keeping(Calls):
        """Keeps what workers leave out, as servers do."""

        kept: Tensor | None = None

        def call(self, server: int, message: Any, buffers: Any = (), receive: Any = None) -> Any:
            if isinstance(message, KeepResidual):
                self.kept = buffers[0].clone()
                return None
            if isinstance(message, PullResiduals):
                assert self.kept is not None
                return receive(Residuals((message.worker,)), (SimpleNamespace(torch=lambda: self.kept),))
            return super().call(server, message, buffers)

    calls, meant = Keeping(), torch.zeros(16)
    for first in (0, 3):
        client = ParameterClient(LAYOUT, ParameterServerSettings(compression="topk", topk=0.25), calls)  # type: ignore[arg-type]
        calls.codec = client._feedback[0].codec
        if first:
            client.take_residuals("worker-0")
        for unit in range(first, first + 3):
            gradient = torch.arange(16.0) + unit
            client.start_push(LAYOUT.pieces[0], gradient, Push(0, unit, unit, 0, 1, 4.0, 0, 0)).result()
            meant += gradient
        client.keep_residuals(first + 3)
    assert calls.kept is not None
    torch.testing.assert_close(calls.received + calls.kept, meant, rtol=0, atol=0)
