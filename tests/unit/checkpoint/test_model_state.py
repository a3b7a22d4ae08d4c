"""A model's weights by name, and their digest."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cordee.checkpoint import load_model_state, model_state, weights_sha256
from cordee.core.errors import CheckpointError


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(3, width)
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def test_parameters_and_persistent_buffers_are_there() -> None:
    state = model_state(Net())
    assert sorted(state) == [
        "layer.bias",
        "layer.weight",
        "norm.bias",
        "norm.num_batches_tracked",
        "norm.running_mean",
        "norm.running_var",
        "norm.weight",
    ]
    assert not any(tensor.requires_grad for tensor in state.values())


def test_loading_copies_into_the_same_parameters() -> None:
    source, target = Net(), Net()
    before = target.layer.weight
    load_model_state(target, model_state(source))
    assert target.layer.weight is before
    assert weights_sha256(model_state(target)) == weights_sha256(model_state(source))
    with torch.no_grad():
        source.layer.weight.add_(1)
    assert not torch.equal(source.layer.weight, target.layer.weight)


def test_tied_weights_stay_tied() -> None:
    source, target = Tied(), Tied()
    load_model_state(target, model_state(source))
    assert target.head.weight is target.embedding.weight
    assert torch.equal(target.head.weight, source.head.weight)


def test_each_mismatch_is_named_and_nothing_is_changed() -> None:
    model = Net()
    digest = weights_sha256(model_state(model))
    state = model_state(Net())
    state.pop("norm.bias")
    state["other"] = torch.zeros(1)
    state["layer.weight"] = torch.zeros(4, 2)
    state["layer.bias"] = state["layer.bias"].double()
    with pytest.raises(CheckpointError) as caught:
        load_model_state(model, state)
    assert str(caught.value) == (
        "the weights do not fit Net: 'norm.bias' is missing; 'other' is not in the model; "
        "'layer.weight' has shape (4, 2), the model needs (4, 3); "
        "'layer.bias' is torch.float64, the model needs torch.float32"
    )
    assert weights_sha256(model_state(model)) == digest


def test_many_mismatches_do_not_fill_the_screen() -> None:
    with pytest.raises(CheckpointError, match=r"; and 12 more$"):
        load_model_state(nn.Sequential(*(nn.Linear(1, 1) for _ in range(10))), {})


def test_lazy_modules() -> None:
    lazy = nn.LazyLinear(2)
    with pytest.raises(CheckpointError, match="'weight' has no shape yet"):
        model_state(lazy)
    load_model_state(lazy, model_state(nn.Linear(3, 2)))
    assert lazy(torch.ones(1, 3)).shape == (1, 2)


def test_extra_state_must_be_a_tensor() -> None:
    class Extra(nn.Module):
        def __init__(self, extra: Any) -> None:
            super().__init__()
            self.extra = extra

        def get_extra_state(self) -> Any:
            return self.extra

        def set_extra_state(self, extra: Any) -> None:
            self.extra = extra

    with pytest.raises(CheckpointError, match="'_extra_state' of Extra is a dict"):
        model_state(Extra({"a": 1}))
    target = Extra(torch.zeros(1))
    load_model_state(target, model_state(Extra(torch.ones(2))))
    assert target.extra.tolist() == [1.0, 1.0]


def test_a_module_that_refuses_is_quoted() -> None:
    class Fussy(nn.Linear):
        def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("not today")

    with pytest.raises(CheckpointError, match="cannot be loaded into Fussy: not today"):
        load_model_state(Fussy(1, 1), model_state(nn.Linear(1, 1)))


def test_the_digest_is_over_the_bytes_in_name_order() -> None:
    a, b = np.arange(5, dtype="<f4"), np.arange(12, dtype="<i8").reshape(3, 4)
    expected = hashlib.sha256(a.tobytes() + b.tobytes()).hexdigest()
    assert weights_sha256({"b": torch.from_numpy(b.copy()), "a": torch.from_numpy(a)}) == expected
    assert weights_sha256({"b": torch.from_numpy(b.T.copy()).t(), "a": torch.from_numpy(a)}) == expected
    assert weights_sha256({}) == hashlib.sha256().hexdigest()


@pytest.mark.parametrize("size", [0, 1, (4 << 20) - 1, 4 << 20, (4 << 20) + 3])
def test_the_digest_does_not_depend_on_pieces(size: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    assert weights_sha256({"x": data}) == hashlib.sha256(data.numpy().tobytes()).hexdigest()


def test_the_digest_of_every_kind_of_tensor() -> None:
    bf16 = torch.tensor([1.0, -2.0], dtype=torch.bfloat16)
    assert weights_sha256({"x": bf16}) == hashlib.sha256(b"\x80\x3f\x00\xc0").hexdigest()
    scalar = nn.Parameter(torch.tensor(1.0))
    assert weights_sha256({"x": scalar}) == hashlib.sha256(b"\x00\x00\x80\x3f").hexdigest()
    grid = torch.arange(16.0).reshape(4, 4)
    assert weights_sha256({"x": grid[1:3, ::2]}) == weights_sha256({"x": torch.tensor([[4.0, 6.0], [8.0, 10.0]])})
    value = torch.tensor([1 + 2j])
    assert weights_sha256({"x": value.conj()}) == weights_sha256({"x": torch.tensor([1 - 2j])})
    # -0.0 and 0.0 are equal numbers and different bits.
    assert weights_sha256({"x": torch.tensor(-0.0)}) != weights_sha256({"x": torch.tensor(0.0)})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_digest_does_not_depend_on_the_device() -> None:
    weight = torch.randn(100)
    assert weights_sha256({"x": weight.cuda()}) == weights_sha256({"x": weight})
