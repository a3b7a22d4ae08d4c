"""Ready transforms of images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from table_files import load
from test_images import folders
from test_tables import everything, refused

from cordee.core.errors import JobError
from cordee.data import transforms as T


def image(height: int, width: int) -> Image.Image:
    """Return an image in which each pixel says where it is: red down, green to the right."""
    down, right = np.mgrid[:height, :width]
    return Image.fromarray(np.stack([down, right, np.full_like(down, 7)], -1).astype(np.uint8))


def places(changed: Image.Image) -> tuple[int, int, int, int]:
    """Return top, left, bottom and right of the part that an image is."""
    pixels = np.asarray(changed)
    return (*pixels[0, 0, :2].tolist(), *pixels[-1, -1, :2].tolist())


def test_what_is_not_random() -> None:
    assert T.Resize((8, 4))(image(20, 30)).size == (4, 8)
    assert T.Resize(10)(image(20, 30)).size == (15, 10)
    assert T.Resize(10)(image(30, 20)).size == (10, 15)
    assert places(T.CenterCrop((4, 6))(image(10, 20))) == (3, 7, 6, 12)
    assert np.asarray(T.CenterCrop(4)(image(2, 4)))[[0, 3]].sum() == 0  # black is added
    assert T.Grayscale()(image(4, 4)).mode == "L"
    assert T.Grayscale(3)(image(4, 4)).mode == "RGB"


def test_tensors() -> None:
    found = T.ToTensor()(image(3, 5))
    assert found.shape == (3, 3, 5)
    torch.testing.assert_close(found[1, 0], torch.arange(5) / 255)
    assert T.ToTensor()(Image.fromarray(np.full((2, 2), 70_000, dtype=np.int32))).max() == 70_000
    normalized = T.Normalize((0.5, 0.0, 0.0), (0.25, 1.0, 2.0))(torch.ones(3, 2, 2))
    torch.testing.assert_close(normalized[:, 0, 0], torch.tensor([2.0, 1.0, 0.5]))
    erased = T.RandomErasing(p=1.0, scale=(0.25, 0.25), ratio=(1.0, 1.0))(torch.ones(3, 8, 8))
    assert int((erased == 0).sum()) == 3 * 16


def test_random_parts_are_parts_of_the_image_and_all_places_come_up() -> None:
    torch.manual_seed(0)
    crops = {places(T.RandomCrop(4)(image(6, 5))) for _ in range(200)}
    assert crops == {(top, left, top + 3, left + 3) for top in range(3) for left in range(2)}
    assert T.RandomCrop(6, padding=1)(image(6, 6)).size == (6, 6)
    parts = T.RandomResizedCrop(8, scale=(0.2, 0.5))
    for _ in range(200):
        top, left, height, width = parts._part(60, 40)
        assert 0 <= top <= 40 - height and 0 <= left <= 60 - width
        assert 0.18 <= height * width / 2400 <= 0.53
        assert 0.68 <= width / height <= 1.5  # sides are rounded
    assert parts._part(100, 1) == (0, 49, 1, 1)  # nothing of that form fits: the middle
    assert parts(image(40, 60)).size == (8, 8)


def test_flips_and_colours() -> None:
    torch.manual_seed(0)
    assert places(T.RandomHorizontalFlip(p=1.0)(image(4, 6))) == (0, 5, 3, 0)
    assert places(T.RandomVerticalFlip(p=1.0)(image(4, 6))) == (3, 0, 0, 5)
    assert places(T.RandomHorizontalFlip(p=0.0)(image(4, 6))) == (0, 0, 3, 5)
    flipped = [places(T.RandomHorizontalFlip()(image(4, 6)))[1] for _ in range(400)]
    assert 150 < flipped.count(5) < 250
    gray = Image.new("RGB", (2, 2), (100, 100, 100))
    values = [np.asarray(T.ColorJitter(brightness=0.5)(gray))[0, 0, 0] for _ in range(100)]
    assert 49 <= min(values) < 70 and 130 < max(values) <= 151
    assert T.RandomRotation(30)(image(4, 4)).size == (4, 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: T.Resize(0), "Resize: size = 0"),
        (lambda: T.CenterCrop((3, 4, 5)), "height, width"),  # type: ignore[arg-type]
        (lambda: T.RandomResizedCrop(4, scale=(1.0, 0.1)), "scale = (1.0, 0.1)"),
        (lambda: T.Normalize((0.5,), (0.0,)), "std no 0"),
        (lambda: T.Normalize((0.5,), (1.0,))(image(4, 4)), "put ToTensor() before it"),
        (lambda: T.RandomCrop(9)(image(4, 4)), "put Resize before it"),
        (lambda: T.Grayscale(2), "must be 1 or 3"),
    ],
)
def test_mistakes_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(JobError) as caught:
        make()
    assert message in str(caught.value)


def test_the_test_set_has_a_transform_of_its_own(tmp_path: Path) -> None:
    train, test = folders(tmp_path / "train", cat=3, dog=3), folders(tmp_path / "test", cat=1, dog=1)
    ready = "cordee.data.transforms:imagenet_"
    keys = {"transform": f"{ready}train", "test_transform": f"{ready}test"}
    splits = load("image-folder", path=train, test=test, **keys)
    assert splits.input_shape == (3, 224, 224)
    (x, _), (again, _) = everything(splits.train), everything(splits.train)
    assert torch.equal(x, again)
    assert splits.test is not None
    expected = T.imagenet_test(Image.open(test / "cat" / "0.png"))
    assert torch.equal(everything(splits.test)[0][0], expected)


def test_a_test_transform_needs_a_test_set(tmp_path: Path) -> None:
    train = folders(tmp_path, cat=2, dog=2)
    name = "cordee.data.transforms:imagenet_test"
    refused("data.test_transform .* data.test", JobError, "image-folder", path=train, test_transform=name)
