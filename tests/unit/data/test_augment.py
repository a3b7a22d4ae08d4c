from __future__ import annotations

import pytest
import torch

from cordee.core.errors import JobError
from cordee.data.augment import Augmentation


def images_of(num_images: int, dtype=torch.uint8, shape=(3, 12, 10)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 256, (num_images, *shape), generator=generator).to(dtype)


def crops_and_flips(image: torch.Tensor) -> list[torch.Tensor]:
    """All 81 crops of an image and of its mirror image, the slow way."""
    height, width = image.shape[1:]
    results = []
    for form in (image, image.flip(2)):
        padded = torch.nn.functional.pad(form, (4, 4, 4, 4))
        results += [padded[:, y : y + height, x : x + width] for y in range(9) for x in range(9)]
    return results


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_crop_and_flip_give_one_of_the_possible_images(dtype):
    images = images_of(40, dtype)
    changed = Augmentation(("crop", "flip"), (3, 12, 10)).apply(images, torch.arange(40), seed=1)
    assert changed.dtype == dtype and changed.shape == images.shape and changed.is_contiguous()
    for image, result in zip(images, changed):
        assert any(torch.equal(result, possible) for possible in crops_and_flips(image))


def test_flip_alone_mirrors_about_half():
    images = images_of(400)
    changed = Augmentation(("flip",), (3, 12, 10)).apply(images, torch.arange(400), seed=1)
    mirrored = [torch.equal(result, image.flip(2)) for image, result in zip(images, changed)]
    kept = [torch.equal(result, image) for image, result in zip(images, changed)]
    assert all(one != other for one, other in zip(mirrored, kept))
    assert 150 < sum(mirrored) < 250


def test_crop_alone_never_mirrors_and_reaches_every_corner():
    images = torch.zeros(3000, 1, 5, 5)
    images[:, 0, 2, 2] = 1.0
    changed = Augmentation(("crop",), (1, 5, 5)).apply(images, torch.arange(3000), seed=5)
    places = {tuple(place[1:].tolist()) for place in changed[:, 0].nonzero()}
    assert len(places) == 25  # a crop of 5 can put the middle pixel on any place, or outside


def test_change_depends_on_position_and_seed_only():
    images, augmentation = images_of(50), Augmentation(("crop", "flip"), (3, 12, 10))
    whole = augmentation.apply(images, torch.arange(100, 150), seed=9)
    part = augmentation.apply(images[20:30], torch.arange(120, 130), seed=9)
    assert torch.equal(whole[20:30], part)
    assert not torch.equal(whole, augmentation.apply(images, torch.arange(100, 150), seed=10))


def test_no_images_are_no_problem():
    assert len(Augmentation(("crop", "flip"), (3, 8, 8)).apply(torch.empty(0, 3, 8, 8), torch.arange(0), seed=0)) == 0


def test_only_images_can_be_augmented():
    with pytest.raises(JobError, match=r"is for images of \(channels, height, width\).* shape \(4,\)"):
        Augmentation(("flip",), (4,))
    with pytest.raises(JobError, match="'flop' is not known; did you mean 'flip'"):
        Augmentation(("flop",), (3, 8, 8))


def test_colors_change_by_channel_and_do_not_depend_on_the_batch() -> None:
    images = torch.randint(1, 256, (6, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    color, positions = Augmentation(["color"], (3, 4, 4)), torch.arange(40, 46)
    whole = color.apply(images, positions, 7)
    parts = [color.apply(images[i : i + 2], positions[i : i + 2], 7) for i in (0, 2, 4)]
    assert torch.equal(whole, torch.cat(parts)) and whole.dtype == torch.uint8
    dark = images // 4 + 40
    factors = color.apply(dark.float(), positions, 7) / dark
    assert float(factors.min()) >= 0.8 and float(factors.max()) <= 1.2
    assert float((factors - factors[:, :, :1, :1]).abs().max()) < 1e-6  # one of each channel
    assert len({round(float(factor), 5) for factor in factors[:, :, 0, 0].flatten()}) == 18
