"""Random changes to training images, for a whole batch at once.

What happens to an image depends on the seed of the epoch and on its position in the epoch, not on the batch,
the shard or what was read before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cordee.core.errors import JobError, nearest
from cordee.data.hashing import hash_positions

_PADDING = 4  # pixels, as in the ResNet paper (He et al. 2015)
_KNOWN = ("crop", "flip")


class Augmentation:
    """Which changes to make: "crop" (pad by 4 zero pixels, cut out the old size anywhere) and "flip" (mirror)."""

    def __init__(self, names: Sequence[str], input_shape: tuple[int, ...]) -> None:
        for name in names:
            if name not in _KNOWN:
                raise JobError(f"data.augment: {name!r} is not known{nearest(name, _KNOWN)} Known: {', '.join(_KNOWN)}")
        if names and len(input_shape) != 3:
            raise JobError(
                f"data.augment = {list(names)} is for images of (channels, height, width), "
                f"the inputs of this data have the shape {input_shape}: remove data.augment"
            )
        self._crops = "crop" in names
        self._flips = "flip" in names

    def apply(self, images: Tensor, positions: Tensor, seed: int) -> Tensor:
        """Return the images changed; row i stands at `positions[i]` of the epoch that `seed` belongs to."""
        drawn = hash_positions(positions, seed)
        if self._crops:
            images = _cropped(images, drawn)
        if self._flips:
            images = _flipped(images, (drawn >> 40) & 1 == 1)
        return images


def _cropped(images: Tensor, drawn: Tensor) -> Tensor:
    places = 2 * _PADDING + 1
    down, right = (drawn & 0xFFFF) % places, ((drawn >> 16) & 0xFFFF) % places
    padded = F.pad(images, (_PADDING,) * 4)
    # Every window of the padded images as one strided view, of which a single gather copies those drawn.
    windows = padded.unfold(2, images.shape[2], 1).unfold(3, images.shape[3], 1)
    return windows[torch.arange(len(images)), :, down, right]


def _flipped(images: Tensor, is_flipped: Tensor) -> Tensor:
    return torch.where(is_flipped.view(-1, 1, 1, 1), images.flip(3), images)
