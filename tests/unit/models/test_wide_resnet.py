from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cordee.core.errors import ModelError
from cordee.models import wide_resnet
from cordee.models.resnet import PreActivationBlock


@pytest.mark.parametrize(
    ("depth", "widen_factor", "millions", "expected"),
    # Table 4 of the paper in millions, to the digit it gives, and the exact counts.
    [
        (28, 10, 36.5, 36_479_194),
        (40, 4, 8.9, 8_949_210),
        (16, 8, 11.0, 10_961_370),
        (40, 2, 2.2, 2_243_546),
    ],
)
def test_parameters(
    num_parameters: Callable[..., int], depth: int, widen_factor: int, millions: float, expected: int
) -> None:
    arguments = {"input_shape": (3, 32, 32), "num_classes": 10, "depth": depth, "widen_factor": widen_factor}
    count = num_parameters(wide_resnet, **arguments)
    assert count == expected
    assert round(count / 1e6, 1) == millions


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 8, 8), (2, 9, 14)])
def test_trains_on_images_of_any_size(check_images: Callable[..., None], shape: tuple[int, ...]) -> None:
    check_images(wide_resnet, shape, depth=10, widen_factor=2, dropout=0.3)


def test_block_of_unchanged_shape_adds_its_input() -> None:
    block = PreActivationBlock(4, 4, stride=1, dropout=0.0)
    torch.nn.init.zeros_(block.conv2.weight)
    x = torch.randn(2, 4, 5, 5)
    assert torch.equal(block(x), x)
    assert block.projection is None


def test_block_of_new_shape_projects_its_activation() -> None:
    block = PreActivationBlock(4, 6, stride=2, dropout=0.0)
    torch.nn.init.zeros_(block.conv2.weight)
    x = torch.randn(2, 4, 5, 5)
    assert block.projection is not None
    assert torch.equal(block(x), block.projection(torch.relu(block.norm1(x))))


@pytest.mark.parametrize("depth", [4, 0, -2, 17, 20])
def test_depth_must_be_6n_plus_4(depth: int) -> None:
    with pytest.raises(ModelError, match=rf"depth = {depth}: it must be 6n \+ 4, such as 10, 16, 22"):
        wide_resnet(input_shape=(3, 32, 32), num_classes=10, depth=depth)


def test_widen_factor_must_be_positive() -> None:
    with pytest.raises(ModelError, match="widen_factor = 0: it must be 1 or more"):
        wide_resnet(input_shape=(3, 32, 32), num_classes=10, widen_factor=0)
