"""Whether two hosts have the same data: a short text of it that costs a few samples to make."""

from __future__ import annotations

import hashlib

import torch

from cordee.core import Batch
from cordee.core.errors import DataError
from cordee.data.source import Source, Splits

NUM_LOOKED_AT = 16  # samples of each set, spread over it


def fingerprint(splits: Splits) -> str:
    """Return how many samples there are and a hash of some of them, in words.

    Samples that are read differently each time (a data set's own augmentation), and data that grows or has no length,
    are not compared.
    """
    parts = [f"train: {_describe(splits.train)}"]
    if splits.test is not None:
        parts.append(f"test: {_describe(splits.test)}")
    return ", ".join(parts)


def check_same(expected: str, splits: Splits) -> None:
    """Raise DataError if this host's data are not those of the run."""
    found = fingerprint(splits)
    if found != expected:
        raise DataError(
            f"the data of this host are not those of the run: here they are {found}; there {expected}. Copy the run's "
            "data here, and say where they are with --data-root"
        )


def _describe(source: Source) -> str:
    count = source.num_samples
    if count is None:
        return "samples that are not counted"
    positions = torch.linspace(0, count - 1, min(count, NUM_LOOKED_AT), dtype=torch.float64).round().long()
    first, second = _hash(source.gather(positions)), _hash(source.gather(positions))
    return f"{count} samples" + (f" ({first})" if first == second else "")


def _hash(batch: Batch) -> str:
    digest = hashlib.sha256()
    for tensor in (batch.inputs, batch.targets):
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]
