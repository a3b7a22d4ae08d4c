"""The multi-layer perceptron."""

from __future__ import annotations

import math
from typing import Literal

from torch import nn

from cordee.core.errors import ModelError
from cordee.models.building import check_at_least, check_choice, check_dropout

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}


def mlp(
    *,
    input_shape: tuple[int, ...],
    num_classes: int,
    hidden: tuple[int, ...] = (128,),
    dropout: float = 0.0,
    activation: Literal["relu", "gelu", "silu", "tanh"] = "relu",
) -> nn.Sequential:
    """Build linear layers of the widths `hidden`, each with activation and dropout, and one to the classes.

    Samples of any shape are flattened. No hidden layer, `hidden = ()`, is softmax regression. The weights
    are PyTorch's own for linear layers: uniform within ±1/√(inputs).
    """
    if not input_shape or min(input_shape) < 1:
        raise ModelError(f"model 'mlp' cannot take samples of shape {tuple(input_shape)}: every size must be 1 or more")
    check_at_least("mlp", "num_classes", num_classes)
    for width in hidden:
        check_at_least("mlp", "a width in hidden", width)
    check_dropout("mlp", dropout)
    check_choice("mlp", "activation", activation, _ACTIVATIONS)

    model = nn.Sequential()
    model.add_module("flatten", nn.Flatten())
    inputs = math.prod(input_shape)
    for index, width in enumerate(hidden, start=1):
        model.add_module(f"linear{index}", nn.Linear(inputs, width))
        model.add_module(f"activation{index}", _ACTIVATIONS[activation]())
        if dropout > 0.0:
            model.add_module(f"dropout{index}", nn.Dropout(dropout))
        inputs = width
    model.add_module("classifier", nn.Linear(inputs, num_classes))
    return model
