"""Pictures as PNG files, of tensors and arrays."""

from __future__ import annotations

import struct
import zlib
from typing import Any

from cordee.core.errors import TrainingError

MOST_BYTES = 256 << 10  # of a picture as PNG: it travels with the events of a run
_CHANNELS = {1: 0, 3: 2, 4: 6}  # PNG's colour types


def encode_png(picture: Any) -> bytes:
    """Return a picture as PNG: height × width, or with 1, 3 or 4 channels first or last.

    Floating-point values are from 0 to 1, whole ones from 0 to 255. Raises TrainingError for anything else.
    """
    import numpy as np

    array = np.asarray(picture.detach().cpu() if hasattr(picture, "detach") else picture)
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3:
        raise TrainingError(f"a picture has 2 or 3 dimensions, not the shape {array.shape}")
    if array.shape[-1] not in _CHANNELS and array.shape[0] in _CHANNELS:
        array = array.transpose(1, 2, 0)
    if array.shape[-1] not in _CHANNELS or 0 in array.shape:
        raise TrainingError(f"a picture has 1, 3 or 4 channels, not the shape {array.shape}")
    if array.dtype.kind == "f":
        if not np.isfinite(array).all():
            raise TrainingError("a picture has values that are not finite")
        array = (array.clip(0.0, 1.0) * 255.0).round()
    elif array.dtype.kind not in "uib":
        raise TrainingError(f"a picture has numbers, not values of type {array.dtype}")
    elif array.dtype.kind == "b":
        array = array * 255
    pixels = array.clip(0, 255).astype(np.uint8)
    height, width, channels = pixels.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)  # no filter
    header = struct.pack(">IIBBBBB", width, height, 8, _CHANNELS[channels], 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    png = b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in chunks)
    if len(png) > MOST_BYTES:
        raise TrainingError(f"a picture of {len(png):,} bytes as PNG is larger than {MOST_BYTES:,}: log a smaller one")
    return png


def size_of_png(png: bytes) -> tuple[int, int, int]:
    """Return height, width and number of channels."""
    width, height, _, kind = struct.unpack(">IIBB", png[16:26])
    return height, width, {number: channels for channels, number in _CHANNELS.items()}[kind]


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
