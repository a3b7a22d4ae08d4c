"""Wide residual networks of Zagoruyko and Komodakis (arXiv:1605.07146)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from cordee.core.errors import ModelError
from cordee.models.arguments import check_at_least, check_dropout, check_image_shape
from cordee.models.convolution import classifier, initialise_he

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
    for stage, stage_width in enumerate(_STAGE_WIDTHS, start=1):
        for block in range(1, (depth - 4) // 6 + 1):
            stride = 2 if stage > 1 and block == 1 else 1
            out_channels = stage_width * widen_factor
            model.add_module(
                f"stage{stage}_block{block}", PreActivationBlock(in_channels, out_channels, stride, dropout)
            )
            in_channels = out_channels
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
