"""Residual networks of He et al. (arXiv:1512.03385), and wide ones of Zagoruyko and Komodakis (arXiv:1605.07146)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from cordee.core.errors import ModelError
from cordee.models.building import (
    check_at_least,
    check_choice,
    check_dropout,
    check_image_shape,
    classifier,
    conv_norm,
    initialise_he,
)

# Table 1 of the paper: blocks in each of the four stages.
_IMAGENET_STAGES: dict[int, tuple[int, ...]] = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
_FIRST_BOTTLENECK_DEPTH = 50
# Section 4.2: three stages of n blocks of two layers, 6n + 2 layers in all.
_CIFAR_STAGES: dict[int, tuple[int, ...]] = {depth: ((depth - 2) // 6,) * 3 for depth in (20, 32, 44, 56, 110)}
_LARGEST_SMALL_SIDE = 64


def resnet(
    *,
    input_shape: tuple[int, ...],
    num_classes: int,
    depth: int = 18,
    stem: Literal["auto", "imagenet", "cifar"] = "auto",
) -> nn.Sequential:
    """Build the ResNet of `depth` layers; the depth also picks the family.

    18, 34, 50, 101 and 152 are the ImageNet networks: 64 to 512 channels (2048 from depth 50), 1×1
    projections where the shape changes. 20, 32, 44, 56 and 110 are the CIFAR networks of section 4.2: 16 to
    64 channels, shortcuts without parameters.

    `stem` is what comes before the blocks: "imagenet" a 7×7 convolution and max-pooling, which shrink the
    image four times, "cifar" a 3×3 convolution that keeps its size. "auto" takes "cifar" when the shorter
    side has at most 64 pixels. The CIFAR networks have no other stem.

    Convolutions are initialised after He et al. (`initialise_he`).
    """
    channels, height, width = check_image_shape("resnet", input_shape)
    check_at_least("resnet", "num_classes", num_classes)
    check_choice("resnet", "depth", depth, sorted([*_IMAGENET_STAGES, *_CIFAR_STAGES]))
    check_choice("resnet", "stem", stem, ("auto", "imagenet", "cifar"))
    widths: tuple[int, ...]
    if depth in _CIFAR_STAGES:
        if stem == "imagenet":
            raise ModelError(
                f"model 'resnet' of depth {depth} has no stem 'imagenet': set stem = \"cifar\", or depth to "
                f"one of {', '.join(map(str, _IMAGENET_STAGES))}"
            )
        stem = "cifar"
        stages, widths, make_block = _CIFAR_STAGES[depth], (16, 32, 64), _padded_block
    else:
        if stem == "auto":
            stem = "cifar" if min(height, width) <= _LARGEST_SMALL_SIDE else "imagenet"
        stages, widths, make_block = _IMAGENET_STAGES[depth], (64, 128, 256, 512), _basic_block
        if depth >= _FIRST_BOTTLENECK_DEPTH:
            widths, make_block = (256, 512, 1024, 2048), _bottleneck_block
    stem_width = 16 if depth in _CIFAR_STAGES else 64
    if stem == "imagenet":
        first = conv_norm(channels, stem_width, kernel=7, stride=2)
        first.append(nn.MaxPool2d(3, stride=2, padding=1))
    else:
        first = conv_norm(channels, stem_width, kernel=3)
    model = nn.Sequential()
    model.add_module("stem", first)
    last = _add_stages(model, stem_width, stages, widths, make_block)
    model.add_module("classifier", classifier(last, num_classes))
    initialise_he(model)
    return model


class ResidualBlock(nn.Module):
    """ReLU(residual(x) + shortcut(x))."""

    def __init__(self, residual: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.residual = residual
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.residual(x) + self.shortcut(x), inplace=True)


class SubsampleAndPad(nn.Module):
    """The paper's shortcut A: every `stride`-th pixel, and zeros for the channels that are new."""

    def __init__(self, new_channels: int, stride: int) -> None:
        super().__init__()
        self.new_channels = new_channels
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        pixels = x[:, :, :: self.stride, :: self.stride]
        return F.pad(pixels, (0, 0, 0, 0, 0, self.new_channels))

    def extra_repr(self) -> str:
        return f"new_channels={self.new_channels}, stride={self.stride}"


def _add_stages(
    model: nn.Sequential,
    in_channels: int,
    stages: tuple[int, ...],
    widths: tuple[int, ...],
    make_block: Callable[[int, int, int], nn.Module],
) -> int:
    """Append the blocks, the first of each stage but the first halving the image; return the last width."""
    for stage, (num_blocks, width) in enumerate(zip(stages, widths), start=1):
        for block in range(1, num_blocks + 1):
            stride = 2 if stage > 1 and block == 1 else 1
            model.add_module(f"stage{stage}_block{block}", make_block(in_channels, width, stride))
            in_channels = width
    return in_channels


def _basic_block(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    return ResidualBlock(
        _two_convolutions(in_channels, out_channels, stride), _projection(in_channels, out_channels, stride)
    )


def _bottleneck_block(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    inner = out_channels // 4
    residual = nn.Sequential(
        conv_norm(in_channels, inner, kernel=1),
        # The paper strides in the 1×1 convolution before; here every pixel gets used, as is usual today.
        conv_norm(inner, inner, kernel=3, stride=stride),
        conv_norm(inner, out_channels, kernel=1, relu=False),
    )
    return ResidualBlock(residual, _projection(in_channels, out_channels, stride))


def _padded_block(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    is_same_shape = in_channels == out_channels and stride == 1
    shortcut = nn.Identity() if is_same_shape else SubsampleAndPad(out_channels - in_channels, stride)
    return ResidualBlock(_two_convolutions(in_channels, out_channels, stride), shortcut)


def _two_convolutions(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    return nn.Sequential(
        conv_norm(in_channels, out_channels, kernel=3, stride=stride),
        conv_norm(out_channels, out_channels, kernel=3, relu=False),
    )


def _projection(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    if in_channels == out_channels and stride == 1:
        return nn.Identity()
    return conv_norm(in_channels, out_channels, kernel=1, stride=stride, relu=False)


_STAGE_WIDTHS = (16, 32, 64)


def wide_resnet(
    *,
    input_shape: tuple[int, ...],
    num_classes: int,
    depth: int = 16,
    widen_factor: int = 4,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Build WRN-`depth`-`widen_factor`: three stages of (depth − 4) / 6 blocks, `widen_factor` times as wide.

    `dropout` is between the two convolutions of each block. The network is made for small images: it keeps
    their size up to the second stage and halves it twice, whatever it is.

    Convolutions are initialised after He et al. (`initialise_he`).
    """
    channels, _, _ = check_image_shape("wide_resnet", input_shape)
    check_at_least("wide_resnet", "num_classes", num_classes)
    check_at_least("wide_resnet", "widen_factor", widen_factor)
    check_dropout("wide_resnet", dropout)
    if depth < 10 or (depth - 4) % 6 != 0:
        raise ModelError(
            f"model 'wide_resnet' cannot have depth = {depth}: it must be 6n + 4, such as 10, 16, 22, 28, 34, 40"
        )

    model = nn.Sequential()
    in_channels = _STAGE_WIDTHS[0]
    model.add_module("stem", nn.Conv2d(channels, in_channels, 3, padding=1, bias=False))
    widths = tuple(width * widen_factor for width in _STAGE_WIDTHS)
    make_block = functools.partial(PreActivationBlock, dropout=dropout)
    in_channels = _add_stages(model, in_channels, ((depth - 4) // 6,) * 3, widths, make_block)
    model.add_module("norm", nn.Sequential(nn.BatchNorm2d(in_channels), nn.ReLU(inplace=True)))
    model.add_module("classifier", classifier(in_channels, num_classes))
    initialise_he(model)
    return model


class PreActivationBlock(nn.Module):
    """Twice norm, ReLU and 3×3 convolution, added to the input.

    Where the shape changes, a 1×1 convolution of the first activation takes the place of the input.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.projection: nn.Module | None = None
        if in_channels != out_channels or stride != 1:
            self.projection = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        activated = F.relu(self.norm1(x), inplace=True)
        shortcut = x if self.projection is None else self.projection(activated)
        residual = self.dropout(F.relu(self.norm2(self.conv1(activated)), inplace=True))
        out: Tensor = shortcut + self.conv2(residual)
        return out
