"""Seeds derived from what they are for.

Every random stream of a run is a function of the job's seed and of its place in the run (the epoch's order,
a batch's crops, a step's dropout). Nothing random has to be saved: a resumed run, or another worker, derives
the same stream again.
"""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """Return a seed of 63 bits that depends on every part and on their order."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
