"""What builders of models share: checks of their arguments, and pieces of convolutional networks.

Each check raises `ModelError` naming the model, the value and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch import nn

from cordee.core.errors import ModelError


def check_image_shape(model: str, input_shape: Sequence[int], min_side: int = 1) -> tuple[int, int, int]:
    """Return (channels, height, width), or say which samples the model takes."""
    if len(input_shape) != 3 or min(input_shape) < 1:
        raise ModelError(
            f"model '{model}' takes images of shape (channels, height, width), the data has samples of shape "
            f"{tuple(input_shape)}: choose another model or data"
        )
    channels, height, width = input_shape
    if min(height, width) < min_side:
        raise ModelError(
            f"model '{model}' takes images of at least {min_side}×{min_side} pixels, the data has "
            f"{height}×{width}: choose another model or enlarge the images"
        )
    return channels, height, width


def check_at_least(model: str, name: str, value: int, smallest: int = 1) -> None:
    if value < smallest:
        raise ModelError(f"model '{model}' cannot have {name} = {value}: it must be {smallest} or more")


def check_dropout(model: str, value: float) -> None:
    if not 0.0 <= value < 1.0:
        raise ModelError(f"model '{model}' cannot have dropout = {value}: it must be at least 0 and less than 1")


def check_choice(model: str, name: str, value: object, allowed: Iterable[object]) -> None:
    choices = list(allowed)
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ModelError(f"model '{model}' cannot have {name} = {value!r}: it must be one of {listed}")


# Normalised convolutions, the classifier, He's weights.


def conv_norm(
    in_channels: int, out_channels: int, *, kernel: int, stride: int = 1, groups: int = 1, relu: bool = True
) -> nn.Sequential:
    """A convolution that keeps the size (divided by `stride`, rounded up), batch norm, and maybe a ReLU.

    No bias: the norm after it has one.
    """
    layers: list[nn.Module] = [
        nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(out_channels),
    ]
    if relu:
        layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers)


def classifier(channels: int, num_classes: int, dropout: float = 0.0) -> nn.Sequential:
    """The mean over all pixels, maybe dropout, and a linear layer to the classes."""
    layers: list[nn.Module] = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    if dropout > 0.0:
        layers.append(nn.Dropout(dropout))
    layers.append(nn.Linear(channels, num_classes))
    return nn.Sequential(*layers)


def initialise_he(model: nn.Module) -> None:
    """Draw every convolution from He's normal distribution, with the variance kept in the backward pass.

    The variance is 2 / fan-out (He et al. 2015, arXiv:1502.01852). Batch norms are left at scale 1 and shift
    0, linear layers at PyTorch's uniform distribution.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            # torch's own kaiming_normal_ ignores the groups, which makes the weights of a depthwise
            # convolution too small by the square root of its number of channels.
            fan_out = module.out_channels * math.prod(module.kernel_size) // module.groups
            nn.init.normal_(module.weight, std=math.sqrt(2.0 / fan_out))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
