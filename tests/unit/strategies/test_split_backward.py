"""Backward passes in two parts: inputs first, parameters later, whatever places share a parameter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.nn import functional

from cordee.core.passes import PASSES, PassKind
from cordee.strategies.pipeline.split_backward import SplittableStage, join_groups, own_gradients


class Layer(nn.Module):
    """A weight that other layers have too, and a bias."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4))
        self.weight = weight

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.linear(torch.tanh(inputs), self.weight, self.bias)


@pytest.mark.parametrize("num_weights", [1, 2, 4])  # of four layers
@pytest.mark.parametrize("comes_last", [False, True])
def test_gradients_of_a_weight_of_several_layers(num_weights: int, comes_last: bool) -> None:
    """torch alone fails where two layers with one weight have another layer between them."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(4, 4)) for _ in range(num_weights)]
    model = nn.Sequential(*(Layer(weights[place % num_weights]) for place in range(4)))
    parameters = sorted(model.parameters(), key=lambda parameter: parameter.ndim, reverse=not comes_last)
    inputs = torch.randn(3, 4, requires_grad=True)
    expected = torch.autograd.grad(model(inputs).square().sum(), [inputs, *parameters])

    (found, *_), groups = stage_backward_input([model(inputs).square().sum()], None, [inputs], iter(parameters))
    groups = join_groups(groups)
    stage_backward_weight(iter(parameters), groups)
    torch.testing.assert_close([found, *(parameter.grad for parameter in parameters)], list(expected))
    assert len(groups) == (4 if num_weights == 4 else 1)


@pytest.mark.parametrize("comes_last", [False, True])
def test_gradient_of_an_offset_of_several_layers_is_counted_once(comes_last: bool) -> None:
    """torch alone counts it twice, without a message: there is nothing to free between sums."""
    torch.manual_seed(0)
    shared, own = nn.Parameter(torch.randn(4)), [nn.Parameter(torch.randn(4)) for _ in range(3)]
    parameters = [*own, shared] if comes_last else [shared, *own]
    inputs = torch.randn(3, 4, requires_grad=True)

    def compute() -> Tensor:
        outputs = inputs
        for offset in own:
            outputs = outputs + (offset + shared)
        return outputs.square().sum()

    expected = torch.autograd.grad(compute(), [inputs, *parameters])
    (found, *_), groups = stage_backward_input([compute()], None, [inputs], iter(parameters))
    stage_backward_weight(iter(parameters), join_groups(groups))
    torch.testing.assert_close([found, *(parameter.grad for parameter in parameters)], list(expected))


@pytest.mark.parametrize("shape", [(4,), (3, 4)])
def test_gradients_are_in_memory_of_their_own(shape: tuple[int, ...]) -> None:
    """torch alone lets two parameters that are added to each other have one gradient, or that of what is sent on."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape)) for _ in range(2)]
    batches = [torch.randn(3, 4, requires_grad=True) for _ in range(3)]

    def compute(inputs: Tensor) -> Tensor:
        return (inputs + (parameters[0] + parameters[1])).square().sum()

    expected = torch.autograd.grad(sum(compute(inputs) for inputs in batches), [*batches, *parameters])
    sent = []
    for inputs in batches:
        (found, *_), groups = stage_backward_input([compute(inputs)], None, [inputs], iter(parameters))
        own_gradients(groups)
        stage_backward_weight(iter(parameters), groups)
        sent.append(found)
    torch.testing.assert_close([*sent, *(parameter.grad for parameter in parameters)], list(expected))


def test_passes_are_recorded_while_that_is_on_and_nothing_else_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = SplittableStage.__new__(SplittableStage)
    stage.stage_index, stage.backward_state = 3, {}
    for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
        monkeypatch.setattr(PipelineStage, name, lambda self, chunk, *rest, **keywords: (chunk, rest, keywords))

    def run() -> list[object]:
        passed = [stage.forward_one_chunk(5, (1,), save_forward_output=False), stage.backward_one_chunk(5, loss=2)]
        stage.backward_weight_one_chunk(5)
        return passed

    before = run()
    assert not PASSES.take()
    PASSES.begin()
    assert run() == before == [(5, ((1,),), {"save_forward_output": False}), (5, (), {"loss": 2})]
    rows = PASSES.take()
    assert [tuple(rows[place : place + 3]) for place in range(0, len(rows), 5)] == [(kind, 3, 5) for kind in PassKind]
    assert not PASSES.is_on
