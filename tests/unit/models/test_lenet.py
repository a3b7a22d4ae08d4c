from __future__ import annotations

from collections.abc import Callable

import pytest

from cordee.core.errors import ModelError
from cordee.models import lenet


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 16, 16), (2, 16, 45), (3, 33, 31)])
def test_trains_on_images_of_any_size(check_images: Callable[..., None], shape: tuple[int, ...]) -> None:
    check_images(lenet, shape)


@pytest.mark.parametrize(
    ("shape", "expected"),
    # 61,706 is the usual count for LeNet-5 on 32×32 grey images.
    [((1, 28, 28), 44_426), ((1, 32, 32), 61_706), ((3, 32, 32), 62_006)],
)
def test_parameters(num_parameters: Callable[..., int], shape: tuple[int, ...], expected: int) -> None:
    assert num_parameters(lenet, input_shape=shape, num_classes=10) == expected


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 15, 28), (1, 28, 15)])
def test_smallest_image_is_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match=f"at least 16×16 pixels, the data has {shape[1]}×{shape[2]}"):
        lenet(input_shape=shape, num_classes=10)
