"""Cutting parameters among servers: equal sizes, nothing lost, whole parameters where the optimizer needs them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cordee.core.errors import JobError
from cordee.models import BUILTIN_MODELS
from cordee.parameters.placement import ALIGNMENT, GRANULE, cut, make_layout
from cordee.strategies.parameter_server.state import adopt_flat, flatten_parameters

SHAPES = {"gpt": ((16,), 50)}


def build(name: str) -> nn.Module:
    if name == "gpt":
        return BUILTIN_MODELS[name](input_shape=(16,), num_classes=50)
    shape = (784,) if name == "mlp" else (1, 28, 28) if name == "lenet" else (3, 32, 32)
    return BUILTIN_MODELS[name](input_shape=shape, num_classes=10)


@pytest.mark.parametrize("name", sorted(BUILTIN_MODELS))
def test_servers_of_every_built_in_model_have_nearly_equal_bytes(name: str) -> None:
    model = build(name)
    for num_servers in (2, 3, 4, 8):
        layout = make_layout(model, num_servers, can_split=True)
        sizes = [sum(piece.length for piece in layout.of_server(server)) for server in range(num_servers)]
        assert max(sizes) <= 1.1 * sum(sizes) / num_servers
        held = sum(one.length for piece in layout.pieces for one in piece.slices)
        assert held == sum(p.numel() for p in model.parameters())


parameters = st.lists(st.lists(st.integers(1, 40), min_size=0, max_size=3), min_size=1, max_size=12)


@given(parameters, st.integers(1, 6), st.booleans())
def test_every_number_is_on_one_server_and_in_order(shapes: list[list[int]], num_servers: int, can_split: bool) -> None:
    named = [(f"p{index}", tuple(shape)) for index, shape in enumerate(shapes)]
    try:
        servers = cut(named, num_servers, can_split=can_split)
    except JobError:
        assert num_servers > 1
        return
    slices = [one for owned in servers for one in owned]
    assert all(owned for owned in servers)
    offset = 0
    for one in slices:
        assert one.offset >= offset
        assert (one.offset - one.first) % ALIGNMENT == 0
        offset = one.offset + one.length
    found: dict[str, list[int]] = {}
    for one in slices:
        found.setdefault(one.name, []).extend(range(one.first, one.first + one.length))
        assert can_split or one.is_whole
        assert one.first % GRANULE == 0 or one.first == 0
    assert found == {name: list(range(math.prod(shape))) for name, shape in named}


def test_too_many_servers_are_refused() -> None:
    with pytest.raises(JobError, match=r"servers = 3 is too many for 2 parameters, .* use at most 2"):
        cut([("a", (5,)), ("b", (5,))], 3, can_split=False)


def test_mixed_types_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(JobError, match="parameters of one type"):
        make_layout(model, 1, can_split=True)


def test_a_model_computes_the_same_on_flat_vectors() -> None:
    model = build("lenet")
    inputs = torch.randn(4, 1, 28, 28)
    before = model(inputs)
    layout = make_layout(model, 3, can_split=True)
    flat = flatten_parameters(model, layout)
    gradient = torch.zeros_like(flat)
    adopt_flat(model, layout, flat, gradient)
    assert torch.equal(model(inputs), before)
    model(inputs).sum().backward()
    assert float(gradient.abs().sum()) > 0
