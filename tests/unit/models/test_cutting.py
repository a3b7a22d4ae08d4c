"""Where chains are cut: pure decisions, and what becomes of users' models."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from cordee.core.errors import JobError, ModelError
from cordee.models import fbnet, gpt, lenet, mlp, resnet, wide_resnet
from cordee.models.cutting import Chain, cut_by_hand, cut_by_time, make_chain


@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=8), st.integers(1, 8))
def test_no_other_cut_is_faster(times: list[float], num_stages: int) -> None:
    num_stages = min(num_stages, len(times))
    counts = cut_by_time(times, num_stages)
    assert len(counts) == num_stages and sum(counts) == len(times) and min(counts) >= 1

    def slowest(ends: tuple[int, ...]) -> float:
        edges = (0, *ends, len(times))
        return max(sum(times[a:b]) for a, b in itertools.pairwise(edges))

    own = tuple(itertools.accumulate(counts))[:-1]
    best = min(slowest(ends) for ends in itertools.combinations(range(1, len(times)), num_stages - 1))
    assert slowest(own) == pytest.approx(best, abs=1e-9)


def test_layers_that_allow_it_are_cut_evenly() -> None:
    assert cut_by_time([1.0] * 10, 4) == [2, 3, 3, 2] or max(cut_by_time([1.0] * 10, 4)) == 3
    assert cut_by_time([1.0] * 12, 4) == [3, 3, 3, 3]
    assert cut_by_time([5.0, 1.0, 1.0, 1.0, 1.0, 1.0], 2) == [1, 5]


def test_by_hand() -> None:
    blocks = [["conv1.0"], ["conv1.2"], ["flatten"], ["linear1", "relu"], ["linear2"]]
    assert cut_by_hand(blocks, [["conv1", "flatten"], ["linear?", "relu"]]) == [3, 2]
    assert cut_by_hand(blocks, [["conv1.0"], ["conv1.2", "fl*"], ["linear1", "relu", "linear2"]]) == [1, 2, 2]


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ([["a"], ["b"]], "puts block 'c' in no stage"),
        ([["a", "b"], ["b", "c"]], "puts block 'b' in stages 0, 1"),
        ([["a", "c"], ["b"]], "puts block 'c' into stage 0 after one of stage 1"),
        ([["a", "b", "c"], ["d"]], "names 'd', which no block has"),
        ([["b", "c"], ["a"]], "puts block 'b' into stage 0 after one of stage 1"),
        ([[], ["a", "b", "c"]], "gives stage 0 no blocks"),
    ],
)
def test_by_hand_refuses(placement: list[list[str]], message: str) -> None:
    with pytest.raises(JobError, match=message):
        cut_by_hand([["a"], ["b"], ["c"]], placement)


def test_by_hand_refuses_to_cut_a_block_apart() -> None:
    with pytest.raises(JobError, match="puts 'b' and 'c' into different stages, and they cannot be cut apart"):
        cut_by_hand([["a"], ["b", "c"]], [["a", "b"], ["c"]])


IMAGES = torch.randn(2, 3, 32, 32)
TOKENS = torch.randint(0, 20, (2, 8))


def check_chain(model: nn.Module, inputs: Tensor) -> Chain:
    """The blocks one after the other are the model, and shapes are known for any number of samples."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    chain = make_chain(model, inputs)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()), "left as it was"
    assert model.training
    values = inputs[torch.arange(5) % len(inputs)]
    expected = model(values)
    for block, wire in zip(chain.blocks, chain.wires, strict=True):
        values = block(values)
        assert wire.shape(5) == tuple(values.shape) and wire.dtype == values.dtype
    assert torch.equal(values, expected)
    used = {id(parameter) for block in chain.blocks for parameter in block.parameters()}
    assert used == {id(parameter) for parameter in model.parameters()}
    return chain


@pytest.mark.parametrize(
    ("model", "inputs", "least"),
    [
        (mlp(input_shape=(3, 32, 32), num_classes=4, hidden=(8, 8)), IMAGES, 6),
        (lenet(input_shape=(3, 32, 32), num_classes=4), IMAGES, 10),
        (resnet(input_shape=(3, 32, 32), num_classes=4, depth=20), IMAGES, 11),
        (wide_resnet(input_shape=(3, 32, 32), num_classes=4, depth=10, widen_factor=1), IMAGES, 5),
        (fbnet(input_shape=(3, 32, 32), num_classes=4, width=0.25), IMAGES, 20),
        (gpt(input_shape=(8,), num_classes=20, num_layers=3, embedding_width=8, num_heads=2), TOKENS, 5),
    ],
    ids=["mlp", "lenet", "resnet", "wide_resnet", "fbnet", "gpt"],
)
def test_built_in_models(model: nn.Module, inputs: Tensor, least: int) -> None:
    assert len(check_chain(model, inputs).blocks) >= least


class Residual(nn.Module):
    """A forward of its own: a loop over layers with skips, a functional dropout, a weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, bias=False)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3)])
        self.last = nn.Linear(8, 6, bias=False)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs.flatten(1))
        for layer in self.layers:
            hidden = hidden + F.relu(layer(hidden))
        hidden = F.dropout(hidden * self.scale, 0.0, self.training)
        return F.linear(self.last(hidden), self.first.weight)


class AsksShapes(Residual):
    """What depends on shapes cannot be followed with torch.fx, and can with torch.export."""

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.shape[1] != 6:
            raise ValueError("six numbers, please")
        return super().forward(inputs)


class AsksValues(Residual):
    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.sum() > 0:
            inputs = -inputs
        return super().forward(inputs)


class LongSkip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(6, 3), nn.Linear(3, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.cat([inputs, self.up(torch.relu(self.down(inputs)))], 1)


@pytest.mark.parametrize("kind", [Residual, AsksShapes])
def test_traced_models(kind: type[Residual]) -> None:
    chain = check_chain(kind(), torch.randn(2, 6))
    assert len(chain.blocks) >= 5  # each layer with its skip, at least


class OtherwiseForOne(nn.Module):
    """torch.export follows what is done with two samples or more."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        return self.last(hidden * 2 if inputs.shape[0] == 1 else hidden)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (AsksShapes, "Expected more than 1 value per channel"),
        (OtherwiseForOne, "with a single sample the traced model"),
    ],
)
def test_a_single_sample_that_the_graph_is_not_for_is_refused(kind: type[nn.Module], words: str) -> None:
    for example in (torch.randn(1, 6), torch.randn(2, 6)):
        first = make_chain(kind(), example).blocks[0]
        first(torch.randn(2, 6))
        with pytest.raises(ValueError, match=words):
            first(torch.randn(1, 6))


def test_a_single_sample_that_is_computed_alike_is_taken() -> None:
    model = AsksShapes()
    model.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
    values = inputs = torch.randn(1, 6)
    for block in make_chain(model, torch.randn(2, 6)).blocks:
        values = block(values)
    assert torch.equal(values, model(inputs))


def test_what_a_value_decides_cannot_be_cut(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelError, match=r"AsksValues cannot be traced.*test_cutting.py:\d+.*if inputs.sum\(\) > 0"):
        make_chain(AsksValues(), torch.randn(2, 6))
    assert capfd.readouterr() == ("", ""), "torch prints the graph that it could not export"


def test_a_skip_around_everything_leaves_one_block() -> None:
    chain = make_chain(LongSkip(), torch.randn(2, 6))
    assert len(chain.blocks) == 1
    assert chain.bond == "the input 'inputs' is needed again by 'cat'"


def test_a_module_used_twice_is_computed_twice() -> None:
    relu, linear = nn.ReLU(), nn.Linear(6, 6)
    chain = check_chain(nn.Sequential(linear, relu, linear, relu), torch.randn(2, 6))
    assert [block.name for block in chain.blocks] == ["0", "1", "2", "3"]


class AddsOne(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.add_(1.0)


class Pair(nn.Module):
    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, inputs


class Sum(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


def test_what_cannot_be_cut_apart_stays_together() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), AddsOne(), Pair(), Sum())
    chain = make_chain(model, torch.randn(2, 6))
    assert [(block.name, len(block.modules)) for block in chain.blocks] == [("0", 2), ("2", 2), ("4", 2)]
    with pytest.raises(ModelError, match="block '0' at the end of the model does not give a tensor"):
        make_chain(nn.Sequential(Pair()), torch.randn(2, 6))


def test_hooks_of_what_is_cut_open_would_not_run() -> None:
    layers = [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2)]
    model = nn.Sequential(*layers)
    assert [block.name for block in make_chain(model, torch.randn(2, 4)).blocks] == ["0", "1.0", "1.1", "2"]
    handle = layers[1].register_forward_hook(lambda module, inputs, outputs: 2 * outputs)
    chain = make_chain(model, torch.randn(2, 4))
    assert [block.name for block in chain.blocks] == ["0", "1", "2"]
    inputs = torch.randn(3, 4)
    outputs = inputs
    for block in chain.blocks:
        outputs = block(outputs)
    torch.testing.assert_close(outputs, model(inputs))
    handle.remove()
    for register in (
        model.register_forward_hook,
        model.register_forward_pre_hook,
        model.register_full_backward_hook,
        model.register_full_backward_pre_hook,
    ):
        handle = register(lambda *arguments: None)
        with pytest.raises(ModelError, match="has a hook, which does not run"):
            make_chain(model, torch.randn(2, 4))
        handle.remove()
