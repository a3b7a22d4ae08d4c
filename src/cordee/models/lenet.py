"""LeNet-5 in its modern form: ReLU for the sigmoids, a linear output for the radial one."""

from __future__ import annotations

from torch import nn

from cordee.models.building import check_at_least, check_image_shape

# 16 → 12 → 6 → 2 → 1: what is left for the second pooling is exactly its window.
_MIN_SIDE = 16


def lenet(*, input_shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
    """Build two 5×5 convolutions (6 and 16 filters), each with 2×2 average pooling, and 120–84–classes.

    After LeCun et al., "Gradient-based learning applied to document recognition", 1998. The convolutions are
    not padded, so images must have at least 16×16 pixels; 28×28 grey images and 10 classes make 44,426
    parameters. The weights are PyTorch's own: uniform within ±1/√(inputs of a neuron).
    """
    channels, height, width = check_image_shape("lenet", input_shape, min_side=_MIN_SIDE)
    check_at_least("lenet", "num_classes", num_classes)

    model = nn.Sequential()
    model.add_module("conv1", nn.Sequential(nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.AvgPool2d(2)))
    model.add_module("conv2", nn.Sequential(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.AvgPool2d(2)))
    model.add_module("flatten", nn.Flatten())
    features = 16 * _side_left(height) * _side_left(width)
    model.add_module("linear1", nn.Sequential(nn.Linear(features, 120), nn.ReLU()))
    model.add_module("linear2", nn.Sequential(nn.Linear(120, 84), nn.ReLU()))
    model.add_module("classifier", nn.Linear(84, num_classes))
    return model


def _side_left(side: int) -> int:
    """Return the pixels left of `side` after both convolutions and poolings."""
    return ((side - 4) // 2 - 4) // 2
