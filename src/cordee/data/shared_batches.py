"""A script's own batches, shared out: each worker gets its part of every one of them."""

from __future__ import annotations

import copy
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from cordee.core.errors import DataError
from cordee.core.seeds import derive_seed
from cordee.core.shards import shard_part

# Samplers that draw from `generator` and from nothing else. Not their subclasses, which may do as they like.
_DRAWN_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class Share(NamedTuple):
    """How many samples of a batch this worker has, and how many there are."""

    num_own: int
    num_all: int


class Pass:
    """One iteration over batches that has begun and has not ended: which batch the script has of it."""

    def __init__(self, batches: SharedBatches, begun_at: int) -> None:
        self.batches = batches
        self.begun_at = begun_at  # how many batches the script had been given by then, of any loader
        self.given_at = begun_at  # the same when it was given the last one of this iteration
        self.share = Share(1, 1)


class Progress:
    """What a script has been given of all its loaders: the iterations that are open, and a digest of the batches."""

    def __init__(self) -> None:
        self.open: list[Pass] = []
        self.num_given = 0
        self.digest = 0  # of everything given so far; the same on all workers, or they do not have the same batches
        self.num_unnoticed = 0  # batches of the latest loops in which this worker stood in, and was not asked whether

    def begin(self) -> None:
        """Record that an iteration begins: what was given before, of loops that have ended, has been used."""
        if not self.open:
            self.num_unnoticed = 0

    def record(self, one: Pass, share: Share, fingerprint: int) -> None:
        self.num_given += 1
        self.num_unnoticed += not share.num_own
        one.batches.is_noticed = False
        one.share, one.given_at = share, self.num_given
        one.batches.share = share
        self.digest = zlib.crc32(f"{one.batches.number} {share.num_all} {fingerprint}".encode(), self.digest)


class SharedBatches:
    """Iterates over this worker's share of each batch. `share` describes the batch given last.

    A worker that has no sample of a batch (a last one that is smaller than the team) is given the batch's
    first sample, and its share says 0: it computes like the others, and its gradient weighs nothing.
    Attributes of the script's own batches, `dataset` say, are those of this object too.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        worker_index: int,
        num_workers: int,
        seed: int,
        *,
        number: int = 0,
        progress: Progress | None = None,
    ) -> None:
        self.number = number  # among the loaders of a script
        self.is_noticed = False  # that the present batch has no sample for this worker
        self.share = Share(1, 1)
        self._batches = batches
        self._worker_index = worker_index
        self._num_workers = num_workers
        self._progress = progress or Progress()
        self._cutter = BatchCutter()
        self._epoch = 0
        self._own_loader: tuple[DataLoader[Any], _OwnIndices] | None = None
        if isinstance(batches, DataLoader) and _gives_indices(batches):
            sampler: Any = batches.batch_sampler
            drawn = _with_generator(sampler)
            if drawn is not None or num_workers > 1:
                order: Callable[[torch.Generator], Iterable[Any]] = drawn or (lambda generator: sampler)
                indices = _OwnIndices(order, derive_seed(seed, "loader", number) if number else seed, self._range)
                self._own_loader = _loader_of(batches, indices), indices

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while being made or copied
            raise AttributeError(name)
        return getattr(self._batches, name)

    @property
    def source(self) -> Iterable[Any]:
        """The script's own batches."""
        return self._batches

    @property
    def is_standing_in(self) -> bool:
        """Whether the present batch has no sample for this worker, which computes somebody else's."""
        is_open = any(one.batches is self for one in self._progress.open)
        if not is_open or self.share.num_own:
            return False
        self.notice()
        return True

    def notice(self) -> None:
        """Record that whoever asked leaves the present batch out where this worker stands in."""
        if not self.share.num_own and not self.is_noticed:
            self.is_noticed = True
            self._progress.num_unnoticed = max(0, self._progress.num_unnoticed - 1)

    def __len__(self) -> int:
        if not isinstance(self._batches, Sized):
            raise TypeError("these batches have no length")
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        self._progress.begin()
        one = Pass(self, self._progress.num_given)
        own = self._from_any() if self._own_loader is None else self._from_loader(*self._own_loader)
        try:
            for share, fingerprint, batch in own:
                self._progress.record(one, share, fingerprint)
                if one not in self._progress.open:
                    self._progress.open.append(one)
                yield batch
        finally:
            if one in self._progress.open:
                self._progress.open.remove(one)

    def _from_loader(self, loader: DataLoader[Any], indices: _OwnIndices) -> Iterator[tuple[Share, int, Any]]:
        """Read only the own samples of each batch."""
        indices.epoch, self._epoch = self._epoch, self._epoch + 1
        iterator = iter(loader)
        given = indices.given  # of this iteration
        for batch in iterator:
            share, fingerprint = given.popleft()
            yield share, fingerprint, batch

    def _from_any(self) -> Iterator[tuple[Share, int, Any]]:
        """Cut the own part out of each batch, which must be the same on every worker."""
        for batch in self._batches:
            if self._num_workers == 1:
                yield Share(1, 1), 0, batch
                continue
            num_all = self._cutter.count(batch)
            first, end = self._range(num_all)
            start, stop = (first, end) if end > first else (0, 1)
            yield Share(end - first, num_all), fingerprint_rows(batch), self._cutter.cut(batch, start, stop)

    def _range(self, num_samples: int) -> tuple[int, int]:
        return shard_part(num_samples, self._worker_index, self._num_workers)


class _OwnIndices:
    """The batch sampler of a loader that reads one worker's samples: the part of each batch of indices."""

    def __init__(
        self,
        order: Callable[[torch.Generator], Iterable[Any]],
        seed: int,
        own_range: Callable[[int], tuple[int, int]],
    ) -> None:
        self._order, self._seed, self._range = order, seed, own_range
        self.epoch = 0  # of the iteration that is to begin
        self.given: deque[tuple[Share, int]] = deque()  # of the latest iteration; processes that read are ahead

    def __len__(self) -> int:
        batches = self._order(torch.Generator())
        return len(batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[Any]]:
        # Called twice for an iteration where other processes read.
        self.given = deque()
        generator = torch.Generator().manual_seed(derive_seed(self._seed, "order", self.epoch))
        return self._cut(self._order(generator), self.given)

    def _cut(self, batches: Iterable[Any], given: deque[tuple[Share, int]]) -> Iterator[list[Any]]:
        for batch in map(list, batches):
            first, end = self._range(len(batch))
            given.append((Share(end - first, len(batch)), zlib.crc32(str(batch).encode())))
            yield batch[first:end] or batch[:1]


def _gives_indices(loader: DataLoader[Any]) -> bool:
    """Whether a loader reads what a batch sampler names, in no way of its own."""
    is_plain = all(
        getattr(type(loader), name) is getattr(DataLoader, name) for name in ("__iter__", "_get_iterator", "__len__")
    )
    return is_plain and loader.batch_sampler is not None and not isinstance(loader.dataset, IterableDataset)


def _with_generator(batches: Any) -> Callable[[torch.Generator], Iterable[Any]] | None:
    """Return what makes the same batch sampler draw from another generator; None if it is to be left alone.

    It is left alone unless all of it is torch's own and would draw from the process's random numbers.
    """
    if type(batches) is not BatchSampler or type(batches.sampler) not in _DRAWN_SAMPLERS:
        return None
    sampler: Any = batches.sampler
    if sampler.generator is not None:
        return None

    def draw(generator: torch.Generator) -> BatchSampler:
        drawn = copy.copy(sampler)
        drawn.generator = generator
        return BatchSampler(drawn, batches.batch_size, batches.drop_last)

    return draw


def _loader_of(loader: DataLoader[Any], indices: _OwnIndices) -> DataLoader[Any]:
    """Return a loader that is like `loader` but for the samples that it reads."""
    return DataLoader(
        loader.dataset,
        batch_sampler=indices,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        pin_memory_device=loader.pin_memory_device,
        # in_order stays True: a batch that came before its turn would be taken for another one's share.
    )


# The rows of a batch that is already made: how many there are, some of them, and whether two workers have the same.

# What a batch may hold that belongs to no sample, and is left whole.
_WITHOUT_ROWS = (str, bytes, int, float, complex, type(None), np.generic, Path, torch.dtype, torch.device, torch.Size)
_SAMPLED = 64  # numbers of a tensor that are compared: distinguishing batches must cost microseconds


class BatchCutter:
    """Cuts batches of one loader. Refuses what it cannot determine to be, or not to be, one row for each sample."""

    def __init__(self) -> None:
        self._is_by_sample: dict[str, bool] = {}  # of lists that could be determined, by where they are in the batch

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
