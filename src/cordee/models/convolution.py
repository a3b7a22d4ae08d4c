"""The pieces that the convolutional networks share: normalised convolutions, the classifier, He's weights."""

from __future__ import annotations

import math

from torch import nn


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
