"""The rows of a batch that is already made: how many there are, some of them, and whether two workers have the same."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cordee.core.errors import DataError

# What a batch may hold that belongs to no sample, and is left whole.
_WITHOUT_ROWS = (str, bytes, int, float, complex, type(None), np.generic, Path, torch.dtype, torch.device, torch.Size)
_SAMPLED = 64  # numbers of a tensor that are compared: telling batches apart must cost microseconds


class BatchCutter:
    """Cuts batches of one loader. Refuses what it cannot tell to be, or not to be, one row for each sample."""

    def __init__(self) -> None:
        self._is_by_sample: dict[str, bool] = {}  # of lists that could be told, by where they are in the batch

    def count(self, batch: Any) -> int:
        """Return how many samples a batch has: the rows of its tensors and arrays, which must be as many each."""
        place, length = next(_lengths(batch, "batch"), ("", None))
        if length is None:
            raise DataError(
                f"a batch is a {type(batch).__name__} without a tensor; it must be a tensor or an array, or a tuple, "
                "list or dict of them"
            )
        self._first, self._num_all = place, length
        return length

    def cut(self, batch: Any, first: int, end: int) -> Any:
        """Return rows [first, end) of everything in the batch that was counted last."""
        return self._cut(batch, first, end, "batch")

    def _cut(self, value: Any, first: int, end: int, place: str) -> Any:
        if isinstance(value, (Tensor, np.ndarray)):
            if not value.ndim:
                return value
            if len(value) != self._num_all:
                raise DataError(
                    f"{place} has {len(value)} rows and {self._first} has {self._num_all}: each worker takes its rows "
                    "of a batch, so every tensor in it needs a row for each sample. Keep what has none out of the "
                    "batch, or use a DataLoader with a data set of samples, of which each worker reads its own"
                )
            return value[first:end]
        if isinstance(value, dict):
            return {key: self._cut(part, first, end, f"{place}[{key!r}]") for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            if self._has_entry_for_each_sample(value, place):
                return value[first:end]
            parts = [self._cut(part, first, end, f"{place}[{number}]") for number, part in enumerate(value)]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if isinstance(value, _WITHOUT_ROWS):
            return value
        raise DataError(
            f"{place} is a {type(value).__name__}, of which a worker cannot take its samples: give tensors, arrays, "
            "or tuples, lists and dicts of them, or use a DataLoader with a data set of samples"
        )

    def _has_entry_for_each_sample(self, values: Any, place: str) -> bool:
        """Whether a list holds a text, a tensor or whatever for each sample, rather than tensors with rows for all."""
        if place == "batch":
            return False
        lengths = {length for number, value in enumerate(values) for _, length in _lengths(value, str(number))}
        if len(values) != self._num_all:
            if lengths == {self._num_all}:
                self._is_by_sample[place] = False
            return False
        if lengths != {self._num_all}:
            if lengths:
                self._is_by_sample[place] = True
            return True
        if place not in self._is_by_sample:
            raise DataError(
                f"{place} has {len(values)} entries, as many as the batch has samples, and each has as many rows: is "
                "it an entry for each sample, or rows? Give a dict of tensors, or stack them to one tensor"
            )
        return self._is_by_sample[place]


def fingerprint_rows(batch: Any) -> int:
    """Return a number that differs if workers have different batches; random changes of the inputs do not count.

    Looks at the shapes, and at a sample of the whole numbers (labels, tokens), or of all numbers if there are none.
    """
    tensors = [torch.as_tensor(value) for value in _tensors(batch)]
    whole = [tensor for tensor in tensors if not (tensor.is_floating_point() or tensor.is_complex())]
    digest = zlib.crc32(str([tuple(tensor.shape) for tensor in tensors]).encode())
    for tensor in whole or tensors:
        numbers = tensor.detach().reshape(-1)
        sample = numbers[:: max(1, -(-len(numbers) // _SAMPLED))].cpu().contiguous()
        digest = zlib.crc32(sample.view(torch.uint8).numpy().tobytes(), digest) if len(sample) else digest
    return digest


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, (Tensor, np.ndarray)):
        if not (isinstance(value, np.ndarray) and value.dtype.kind in "OUSMmV"):
            yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def _lengths(value: Any, place: str) -> Iterator[tuple[str, int]]:
    """Give each tensor or array with rows, and how many."""
    if isinstance(value, (Tensor, np.ndarray)):
        if value.ndim:
            yield place, len(value)
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _lengths(part, f"{place}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            yield from _lengths(part, f"{place}[{number}]")
