"""A script's own batches, shared out: each worker gets its part of every one of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from cordee.core.errors import DataError
from cordee.core.seeds import derive_seed
from cordee.core.shards import shard_part


class Share(NamedTuple):
    """How many samples of the present batch this worker has, and how many there are."""

    num_own: int
    num_all: int


class SharedBatches:
    """Iterates over this worker's share of each batch. `share` tells about the one given last.

    A worker that has no sample of a batch (a last one that is smaller than the team) is given the batch's
    first sample, and its share says 0: it goes through the motions, and its gradient weighs nothing.
    """

    def __init__(self, batches: Iterable[Any], worker_index: int, num_workers: int, seed: int) -> None:
        self._batches = batches
        self._worker_index = worker_index
        self._num_workers = num_workers
        self._seed = seed
        self._epoch = 0
        self.share = Share(1, 1)
        self._is_within = False

    @property
    def is_standing_in(self) -> bool:
        """Whether the present batch has no sample for this worker, which computes somebody else's."""
        return self._is_within and not self.share.num_own

    def __len__(self) -> int:
        if not isinstance(self._batches, Sized):
            raise TypeError("these batches have no length")
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        loader = self._batches
        epoch, self._epoch = self._epoch, self._epoch + 1
        is_cut = isinstance(loader, DataLoader) and _can_cut_indices(loader)
        own = self._from_loader(loader, epoch) if is_cut else self._from_any(loader)  # type: ignore[arg-type]
        self._is_within = True
        try:
            for self.share, batch in own:
                yield batch
        finally:
            self._is_within = False

    def _from_loader(self, loader: DataLoader[Any], epoch: int) -> Iterator[tuple[Share, Any]]:
        """Read only the own samples: the order is drawn here, alike on all workers."""
        num_samples, size = len(loader.dataset), loader.batch_size  # type: ignore[arg-type]
        assert size is not None
        order = torch.arange(num_samples)
        if isinstance(loader.sampler, RandomSampler):
            generator = torch.Generator().manual_seed(derive_seed(self._seed, "order", epoch))
            order = torch.randperm(num_samples, generator=generator)
        whole = [order[at : at + size].tolist() for at in range(0, num_samples, size)]
        if loader.drop_last and whole and len(whole[-1]) < size:
            whole.pop()
        shares, indices = [], []
        for batch in whole:
            first, end = self._range(len(batch))
            shares.append(Share(end - first, len(batch)))
            indices.append(batch[first:end] or batch[:1])
        own = DataLoader(
            loader.dataset,
            batch_sampler=indices,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
        )
        return zip(shares, own, strict=True)

    def _from_any(self, batches: Iterable[Any]) -> Iterator[tuple[Share, Any]]:
        """Cut the own part out of each batch, which must be the same on every worker."""
        for batch in batches:
            num_all = _num_rows(batch)
            first, end = self._range(num_all)
            start, stop = (first, end) if end > first else (0, 1)
            yield Share(end - first, num_all), _rows(batch, start, stop, num_all)

    def _range(self, num_samples: int) -> tuple[int, int]:
        return shard_part(num_samples, self._worker_index, self._num_workers)


def _can_cut_indices(loader: DataLoader[Any]) -> bool:
    """Whether the order is one that can be drawn here; a script's own sampler is left to the script."""
    if loader.batch_size is None or isinstance(loader.dataset, IterableDataset):
        return False
    sampler = loader.sampler
    if isinstance(sampler, RandomSampler):
        return not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    return isinstance(sampler, SequentialSampler)


def _num_rows(batch: Any) -> int:
    num_rows = _find_rows(batch)
    if num_rows is None:
        raise DataError(
            f"a batch is a {type(batch).__name__} without a tensor; it must be a tensor or an array, or a tuple, "
            "list or dict of them"
        )
    return num_rows


def _find_rows(batch: Any) -> int | None:
    """Return the length of the first tensor or array inside; None if there is none."""
    if isinstance(batch, (Tensor, np.ndarray)):
        return len(batch) if batch.ndim else None
    values = list(batch.values()) if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else []
    return next((found for value in values if (found := _find_rows(value)) is not None), None)


def _rows(batch: Any, first: int, end: int, num_all: int) -> Any:
    """Return rows [first, end) of everything in a batch of `num_all`; what has no rows stays as it is."""
    if isinstance(batch, (Tensor, np.ndarray)):
        return batch[first:end] if batch.ndim else batch
    if isinstance(batch, dict):
        return {key: _rows(value, first, end, num_all) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        if len(batch) == num_all and _find_rows(batch) is None:
            return batch[first:end]  # a list with one thing, a text say, for each sample
        parts = (_rows(value, first, end, num_all) for value in batch)
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch
