from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from cordee.core.errors import ModelError
from cordee.models import mlp


@pytest.mark.parametrize("shape", [(4,), (1, 8, 8), (3, 5, 7), (2, 3, 4, 5)])
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "tanh"])
def test_takes_samples_of_any_shape(check_images: Callable[..., None], shape: tuple[int, ...], activation: str) -> None:
    check_images(mlp, shape, activation=activation, hidden=(6, 5))


@pytest.mark.parametrize(
    ("hidden", "expected"),
    [((), 785 * 10), ((128,), 785 * 128 + 129 * 10), ((300, 100), 785 * 300 + 301 * 100 + 101 * 10)],
)
def test_parameters(num_parameters: Callable[..., int], hidden: tuple[int, ...], expected: int) -> None:
    assert num_parameters(mlp, input_shape=(1, 28, 28), num_classes=10, hidden=hidden) == expected


def test_without_hidden_layers_is_linear() -> None:
    model = mlp(input_shape=(4,), num_classes=3, hidden=())
    x = torch.randn(5, 4)
    linear = model.get_submodule("classifier")
    assert torch.equal(model(x), linear(x))


def test_dropout_follows_every_hidden_layer() -> None:
    model = mlp(input_shape=(4,), num_classes=3, hidden=(8, 8), dropout=0.25)
    assert [module.p for module in model.modules() if isinstance(module, nn.Dropout)] == [0.25, 0.25]


def test_refusals() -> None:
    with pytest.raises(ModelError, match="a width in hidden = 0: it must be 1 or more"):
        mlp(input_shape=(4,), num_classes=3, hidden=(8, 0))
    with pytest.raises(ModelError, match=r"activation = 'step'.* 'relu', 'gelu', 'silu', 'tanh'"):
        mlp(input_shape=(4,), num_classes=3, activation="step")  # type: ignore[arg-type]
    for shape in [(), (0,), (3, 0)]:
        with pytest.raises(ModelError, match="every size must be 1 or more"):
            mlp(input_shape=shape, num_classes=3)
