from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from cordee.core.errors import ModelError
from cordee.models import resnet
from cordee.models.resnet import SubsampleAndPad


@pytest.mark.parametrize(
    ("depth", "expected"),
    # torchvision's counts, which are those of the published ImageNet weights.
    [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032), (101, 44_549_160), (152, 60_192_808)],
)
def test_parameters_on_imagenet(num_parameters: Callable[..., int], depth: int, expected: int) -> None:
    assert num_parameters(resnet, input_shape=(3, 224, 224), num_classes=1000, depth=depth) == expected


@pytest.mark.parametrize(
    ("depth", "expected"),
    # Table 6 of the paper to two digits: 0.27, 0.46, 0.66, 0.85 and 1.7 million.
    [(20, 269_722), (32, 464_154), (44, 658_586), (56, 853_018), (110, 1_727_962)],
)
def test_parameters_on_cifar(num_parameters: Callable[..., int], depth: int, expected: int) -> None:
    assert num_parameters(resnet, input_shape=(3, 32, 32), num_classes=10, depth=depth) == expected


@pytest.mark.parametrize(
    ("depth", "shape"), [(18, (3, 32, 32)), (18, (1, 28, 28)), (18, (3, 65, 70)), (50, (3, 16, 16)), (20, (2, 9, 13))]
)
def test_trains_on_images_of_any_size(check_images: Callable[..., None], depth: int, shape: tuple[int, ...]) -> None:
    check_images(resnet, shape, depth=depth)


@pytest.mark.parametrize("depth", [20, 18, 50, 34, 110])
def test_depth_counts_the_layers_with_weights(depth: int) -> None:
    """Convolutions off the shortcuts and the classifier."""
    with torch.device("meta"):
        model = resnet(input_shape=(3, 32, 32), num_classes=10, depth=depth)
    layers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d | nn.Linear) and "shortcut" not in name
    ]
    assert len(layers) == depth


@pytest.mark.parametrize(
    ("stem", "side", "side_after"),
    [("auto", 64, 64), ("auto", 65, 17), ("imagenet", 64, 16), ("cifar", 65, 65), ("imagenet", 224, 56)],
)
def test_stem_follows_the_size_unless_named(stem: str, side: int, side_after: int) -> None:
    with torch.device("meta"):
        model = resnet(input_shape=(3, side, side), num_classes=10, stem=stem)  # type: ignore[arg-type]
        out = model.get_submodule("stem")(torch.empty(1, 3, side, side))
    assert out.shape == (1, 64, side_after, side_after)


def test_small_stem_makes_the_usual_cifar_resnet18(num_parameters: Callable[..., int]) -> None:
    assert num_parameters(resnet, input_shape=(3, 32, 32), num_classes=10, depth=18) == 11_173_962


def test_shortcut_a_subsamples_and_pads_with_zeros() -> None:
    x = torch.randn(2, 3, 5, 6)
    out = SubsampleAndPad(new_channels=4, stride=2)(x)
    assert out.shape == (2, 7, 3, 3)
    assert torch.equal(out[:, :3], x[:, :, ::2, ::2])
    assert not out[:, 3:].any()


def test_refusals() -> None:
    with pytest.raises(ModelError, match="depth = 19: it must be one of 18, 20, 32, 34, 44, 50, 56, 101, 110, 152"):
        resnet(input_shape=(3, 32, 32), num_classes=10, depth=19)
    with pytest.raises(ModelError, match="stem = 'big': it must be one of 'auto', 'imagenet', 'cifar'"):
        resnet(input_shape=(3, 32, 32), num_classes=10, stem="big")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r'depth 20 has no stem .imagenet.: set stem = "cifar", or depth to one of 18'):
        resnet(input_shape=(3, 32, 32), num_classes=10, depth=20, stem="imagenet")
