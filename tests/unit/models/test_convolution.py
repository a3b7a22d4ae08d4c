from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from cordee.models.building import conv_norm, initialise_he


@pytest.mark.parametrize("groups", [1, 2, 64])
def test_he_weights_have_variance_two_over_fan_out(groups: int) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(64, 64, 5, groups=groups)
    initialise_he(conv)
    expected = math.sqrt(2 * groups / (64 * 25))
    # At least 1600 weights: the deviation of their deviation is below 2 %; 8 % is more than four of them.
    assert conv.weight.std().item() == pytest.approx(expected, rel=0.08)
    assert conv.bias is not None
    assert not conv.bias.any()


@pytest.mark.parametrize(
    ("kernel", "stride", "side"), [(1, 1, 7), (3, 1, 7), (5, 1, 7), (3, 2, 4), (5, 2, 4), (1, 2, 4)]
)
def test_conv_norm_keeps_the_size_up_to_its_stride(kernel: int, stride: int, side: int) -> None:
    out = conv_norm(2, 3, kernel=kernel, stride=stride)(torch.randn(2, 2, 7, 7))
    assert out.shape == (2, 3, side, side)
    assert (out >= 0).all()
