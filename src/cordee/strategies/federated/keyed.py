"""Random numbers that nobody foresees without their key: of SHAKE-256, for noise and for who is drawn.

torch's generator takes 32 bits of a seed: whoever has the sum, and all but one update, finds the seed by trying all of
them, and takes the noise off. What is drawn here follows from all bits of the key.
"""

from __future__ import annotations

import hashlib
from typing import Any, TypeAlias

import numpy as np

Numbers: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
_CHUNK = 1 << 18  # numbers that are made at once
_BITS = 53  # of a number from 0 to 1


def uniforms(count: int, key: int, *place: int | str) -> Numbers:
    """Return numbers of [0, 1), the same for the same key and place."""
    chunks = [_words(min(_CHUNK, count - start), key, *place, start) * 2.0**-_BITS for start in range(0, count, _CHUNK)]
    return np.concatenate(chunks) if chunks else np.zeros(0)


def normals(count: int, key: int, *place: int | str) -> Numbers:
    """Return normal numbers of deviation 1 (Box and Muller), the same for the same key and place."""
    half = -(-count // 2)
    radius = np.sqrt(-2.0 * np.log1p(-uniforms(half, key, *place, "radius")))
    angle = 2.0 * np.pi * uniforms(half, key, *place, "angle")
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def _words(count: int, key: int, *place: int | str) -> Numbers:
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in (key, *place))
    stream = hashlib.shake_256(text.encode()).digest(8 * count)
    return (np.frombuffer(stream, "<u8") >> np.uint64(64 - _BITS)).astype(np.float64)
