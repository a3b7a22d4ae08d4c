"""A piece is pushed when its gradient is complete, and not before, whatever the graph looks like."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cordee.core.errors import TrainingError
from cordee.parameters.placement import Piece, make_layout
from cordee.strategies.parameter_server.push_watch import PushWatch
from cordee.strategies.parameter_server.state import adopt_flat, flatten_parameters

WIDTH = 32


class Net(nn.Module):
    """Three layers and one that is left out. How they are put together is for each test to say."""

    def __init__(self, way: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.shared, self.last, self.unused = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.way = way

    def forward(self, inputs: Tensor) -> Tensor:
        return self.way(self, inputs)


def plain(net: Net, inputs: Tensor) -> Tensor:
    return net.last(net.shared(net.first(inputs)))  # type: ignore[no-any-return]


def used_twice(net: Net, inputs: Tensor) -> Tensor:
    return net.last(net.shared(net.shared(net.first(inputs)).tanh()))  # type: ignore[no-any-return]


def checkpointed(net: Net, inputs: Tensor, *, reentrant: bool) -> Tensor:
    hidden = checkpoint(net.shared, net.first(inputs), use_reentrant=reentrant).tanh()
    hidden = checkpoint(net.shared, hidden, use_reentrant=reentrant).tanh()
    return net.last(net.shared(hidden))  # type: ignore[no-any-return]


WAYS = {
    "plain": plain,
    "used twice": used_twice,
    "checkpoint": lambda net, inputs: checkpointed(net, inputs, reentrant=False),
    "re-entrant checkpoint": lambda net, inputs: checkpointed(net, inputs, reentrant=True),
}


class Pushes:
    """Takes note of what is pushed, and when."""

    def __init__(self, net: Net, num_pieces: int = 4) -> None:
        layout = make_layout(net, num_pieces, can_split=True)
        self.gradient = torch.zeros(layout.length)
        adopt_flat(net, layout, flatten_parameters(net, layout), self.gradient)
        self.sent: dict[int, tuple[Tensor, tuple[int, ...]]] = {}
        self.watch = PushWatch(net, layout, self._take)
        self.pieces = layout.pieces

    def _take(self, piece: Piece) -> None:
        assert piece.index not in self.sent
        self.sent[piece.index] = (self.gradient[piece.start : piece.stop].clone(), self.watch.unused(piece))


@pytest.mark.parametrize("num_passes", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_pushed_is_complete(way: str, num_passes: int) -> None:
    torch.manual_seed(0)
    net = Net(WAYS[way])
    pushes = Pushes(net)
    for _ in range(2):  # units
        pushes.sent.clear()
        pushes.gradient.zero_()
        pushes.watch.begin()
        for turn in range(num_passes):
            outputs = net(torch.randn(8, WIDTH))
            if turn == num_passes - 1:
                pushes.watch.expect(outputs)
            outputs.square().mean().backward()
        early = set(pushes.sent)
        pushes.watch.end()
        assert len(pushes.sent) == len(pushes.pieces)
        for piece in pushes.pieces:
            sent, unused = pushes.sent[piece.index]
            assert torch.equal(sent, pushes.gradient[piece.start : piece.stop])
            assert {piece.slices[at].name.split(".")[0] for at in unused} <= {"unused"}
        assert any(pushes.sent[piece.index][1] for piece in pushes.pieces)
        assert early == (set() if way == "re-entrant checkpoint" else {0, 1, 2})


def test_a_gradient_that_changes_after_it_was_sent_is_an_error() -> None:
    """A backward pass inside a hook cannot be foreseen."""
    net = Net(plain)
    pushes = Pushes(net)

    def again(gradient: Tensor) -> None:
        with torch.enable_grad():
            net.last(torch.ones(1, WIDTH)).sum().backward()

    pushes.watch.begin()
    hidden = net.shared(net.first(torch.ones(2, WIDTH)))
    hidden.register_hook(again)
    outputs = net.last(hidden * 1.0)
    pushes.watch.expect(outputs)
    with pytest.raises(TrainingError, match=r"the gradient of 'last\.(weight|bias)' changed after it was sent"):
        outputs.sum().backward()
