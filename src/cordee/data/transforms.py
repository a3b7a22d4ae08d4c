"""Ready transforms of images: those that torchvision's users expect, with Pillow and torch alone.

A transform is given an image as Pillow has it, or from `ToTensor` on a tensor (channels, height, width), and returns
it changed. Random numbers are torch's, which are seeded for each sample: a sample is changed in the same way on any
number of workers. Sizes and places are (height, width).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cordee.core.errors import JobError
from cordee.data.storage import require_package

Size = int | tuple[int, int]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_TRIES = 10  # to find a part of the area and the form that were drawn


class Compose:
    """One transform after the other."""

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = tuple(transforms)

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


class Resize:
    """Brings an image to (height, width), or with one number its shorter side to this length."""

    def __init__(self, size: Size) -> None:
        self.size = size if isinstance(size, int) else _pair("Resize", size)
        _pair("Resize", size)

    def __call__(self, image: Any) -> Any:
        if not isinstance(self.size, int):
            return _resized(image, self.size)
        width, height = image.size
        longer = int(self.size * max(width, height) / min(width, height))
        return _resized(image, (self.size, longer) if height <= width else (longer, self.size))


class CenterCrop:
    """Cuts out the middle; where the image is smaller, black is added around it."""

    def __init__(self, size: Size) -> None:
        self.size = _pair("CenterCrop", size)

    def __call__(self, image: Any) -> Any:
        (height, width), (own_width, own_height) = self.size, image.size
        return _cut(image, round((own_height - height) / 2), round((own_width - width) / 2), height, width)


class RandomCrop:
    """Cuts out a part of this size anywhere, after `padding` black pixels were added at each side."""

    def __init__(self, size: Size, padding: int = 0) -> None:
        self.size, self.padding = _pair("RandomCrop", size), padding

    def __call__(self, image: Any) -> Any:
        (height, width), (own_width, own_height) = self.size, image.size
        down, right = own_height + 2 * self.padding - height, own_width + 2 * self.padding - width
        if down < 0 or right < 0:
            raise JobError(
                f"RandomCrop: an image of {own_height} × {own_width} (height × width) with {self.padding} pixels of "
                f"padding has no part of {height} × {width}: put Resize before it, or set padding"
            )
        return _cut(image, _whole_number(down) - self.padding, _whole_number(right) - self.padding, height, width)


class RandomResizedCrop:
    """Cuts out a part of random area and form anywhere, and brings it to (height, width).

    `scale` is the range of the share of the area, `ratio` that of width by height.
    """

    def __init__(
        self, size: Size, scale: tuple[float, float] = (0.08, 1.0), ratio: tuple[float, float] = (3 / 4, 4 / 3)
    ) -> None:
        self.size = _pair("RandomResizedCrop", size)
        self.scale, self.ratio = (
            _range("RandomResizedCrop", "scale", scale),
            _range("RandomResizedCrop", "ratio", ratio),
        )

    def __call__(self, image: Any) -> Any:
        return _resized(_cut(image, *self._part(*image.size)), self.size)

    def _part(self, own_width: int, own_height: int) -> tuple[int, int, int, int]:
        """Return top, left, height and width of the part."""
        for _ in range(_TRIES):
            area = own_width * own_height * _number(*self.scale)
            form = math.exp(_number(math.log(self.ratio[0]), math.log(self.ratio[1])))
            width, height = round(math.sqrt(area * form)), round(math.sqrt(area / form))
            if 0 < width <= own_width and 0 < height <= own_height:
                return _whole_number(own_height - height), _whole_number(own_width - width), height, width
        # The largest part in the middle whose form is in the range.
        form = min(max(own_width / own_height, self.ratio[0]), self.ratio[1])
        width = max(1, min(own_width, round(own_height * form)))
        height = max(1, min(own_height, round(own_width / form)))
        return (own_height - height) // 2, (own_width - width) // 2, height, width


class RandomHorizontalFlip:
    """Mirrors left and right with this probability."""

    def __init__(self, p: float = 0.5) -> None:
        self.p = p

    def __call__(self, image: Any) -> Any:
        transpose = require_package("PIL.Image", "changing images", "images").Transpose
        return image.transpose(transpose.FLIP_LEFT_RIGHT) if _number(0, 1) < self.p else image


class RandomVerticalFlip:
    """Mirrors top and bottom with this probability."""

    def __init__(self, p: float = 0.5) -> None:
        self.p = p

    def __call__(self, image: Any) -> Any:
        transpose = require_package("PIL.Image", "changing images", "images").Transpose
        return image.transpose(transpose.FLIP_TOP_BOTTOM) if _number(0, 1) < self.p else image


class RandomRotation:
    """Turns by an angle from -degrees to degrees around the middle; what is uncovered is black."""

    def __init__(self, degrees: float) -> None:
        self.degrees = degrees

    def __call__(self, image: Any) -> Any:
        return image.rotate(_number(-self.degrees, self.degrees))


class ColorJitter:
    """Multiplies brightness, contrast and saturation by factors from 1 - value to 1 + value, in this order."""

    def __init__(self, brightness: float = 0.0, contrast: float = 0.0, saturation: float = 0.0) -> None:
        self.brightness, self.contrast, self.saturation = brightness, contrast, saturation

    def __call__(self, image: Any) -> Any:
        enhance = require_package("PIL.ImageEnhance", "changing images", "images")
        kinds = (
            (enhance.Brightness, self.brightness),
            (enhance.Contrast, self.contrast),
            (enhance.Color, self.saturation),
        )
        for kind, value in kinds:
            if value:
                image = kind(image).enhance(_number(max(0.0, 1 - value), 1 + value))
        return image


class Grayscale:
    """Makes an image gray, of 1 or of 3 equal channels."""

    def __init__(self, channels: int = 1) -> None:
        if channels not in (1, 3):
            raise JobError(f"Grayscale: channels = {channels} must be 1 or 3")
        self.channels = channels

    def __call__(self, image: Any) -> Any:
        gray = image.convert("L")
        return gray if self.channels == 1 else gray.convert("RGB")


class ToTensor:
    """Makes a tensor of float32 of an image. Bytes become numbers from 0 to 1, other pixels stay as they are."""

    def __call__(self, image: Any) -> Tensor:
        pixels = np.asarray(image)
        pixels = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
        found = torch.from_numpy(pixels.astype(np.float32))
        return found.div_(255) if pixels.dtype == np.uint8 else found


class Normalize:
    """Subtracts a mean from each channel of a tensor and divides by a deviation."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        if len(mean) != len(std) or 0 in std:
            raise JobError(f"Normalize: mean = {list(mean)} and std = {list(std)} must have as many numbers, std no 0")
        self.mean, self.std = torch.tensor(mean)[:, None, None], torch.tensor(std)[:, None, None]

    def __call__(self, image: Tensor) -> Tensor:
        if not isinstance(image, Tensor) or image.shape[0] != len(self.mean):
            what = f"{image.shape[0]} channels" if isinstance(image, Tensor) else f"a {type(image).__name__}"
            raise JobError(f"Normalize has {len(self.mean)} channels and is given {what}: put ToTensor() before it")
        return (image - self.mean) / self.std


class RandomErasing:
    """With this probability sets a rectangle of a tensor to 0. `scale` and `ratio` as in RandomResizedCrop."""

    def __init__(
        self, p: float = 0.5, scale: tuple[float, float] = (0.02, 0.33), ratio: tuple[float, float] = (0.3, 3.3)
    ) -> None:
        self.p, self._crop = p, RandomResizedCrop(1, scale, ratio)

    def __call__(self, image: Tensor) -> Tensor:
        if _number(0, 1) >= self.p:
            return image
        top, left, height, width = self._crop._part(image.shape[2], image.shape[1])
        image = image.clone()
        image[:, top : top + height, left : left + width] = 0
        return image


def imagenet_train(image: Any) -> Tensor:
    """What networks for ImageNet are usually trained with: a random part as 224 × 224, mirrored, normalised."""
    changed: Tensor = _IMAGENET_TRAIN(image)
    return changed


def imagenet_test(image: Any) -> Tensor:
    """What they are tested with: the middle 224 × 224 of an image whose shorter side is 256, normalised."""
    changed: Tensor = _IMAGENET_TEST(image)
    return changed


def _resized(image: Any, size: tuple[int, int]) -> Any:
    pillow = require_package("PIL.Image", "changing images", "images")
    return image.resize((size[1], size[0]), pillow.Resampling.BILINEAR)


def _cut(image: Any, top: int, left: int, height: int, width: int) -> Any:
    return image.crop((left, top, left + width, top + height))  # Pillow adds black where there is no image


def _number(low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand(()))


def _whole_number(largest: int) -> int:
    return int(torch.randint(largest + 1, ()))


def _pair(what: str, size: Any) -> tuple[int, int]:
    found = (size, size) if isinstance(size, int) else tuple(size)
    if len(found) != 2 or not all(isinstance(side, int) and side > 0 for side in found):
        raise JobError(f"{what}: size = {size!r} must be a whole number of at least 1, or (height, width)")
    return found


def _range(what: str, name: str, value: tuple[float, float]) -> tuple[float, float]:
    low, high = value
    if not 0 < low <= high:
        raise JobError(f"{what}: {name} = {value} must be two numbers above 0, the smaller first")
    return low, high


_TO_IMAGENET = (ToTensor(), Normalize(IMAGENET_MEAN, IMAGENET_STD))
_IMAGENET_TRAIN = Compose([RandomResizedCrop(224), RandomHorizontalFlip(), *_TO_IMAGENET])
_IMAGENET_TEST = Compose([Resize(256), CenterCrop(224), *_TO_IMAGENET])
