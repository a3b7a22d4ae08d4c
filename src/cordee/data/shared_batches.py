"""A script's own batches, shared out: each worker gets its part of every one of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from cordee.core.errors import DataError
from cordee.core.seeds import derive_seed
from cordee.data.order import shard_part


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

    def __len__(self) -> int:
        if not isinstance(self._batches, Sized):
            raise TypeError("these batches have no length")
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        loader = self._batches
        epoch, self._epoch = self._epoch, self._epoch + 1
        if isinstance(loader, DataLoader) and _can_cut_indices(loader):
            return self._from_loader(loader, epoch)
        return self._from_any(loader)

    def _from_loader(self, loader: DataLoader[Any], epoch: int) -> Iterator[Any]:
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
        )
        for self.share, batch in zip(shares, own, strict=True):
            yield batch

    def _from_any(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Cut the own part out of each batch, which must be the same on every worker."""
        for batch in batches:
            num_all = _num_rows(batch)
            first, end = self._range(num_all)
            self.share = Share(end - first, num_all)
            yield _rows(batch, first, end) if end > first else _rows(batch, 0, 1)

    def _range(self, num_samples: int) -> tuple[int, int]:
        return shard_part(num_samples, self._worker_index, self._num_workers)


def _can_cut_indices(loader: DataLoader[Any]) -> bool:
    """Whether the order is one that can be drawn here; a script's own sampler is left to the script."""
    is_plain = isinstance(loader.sampler, SequentialSampler) or (
        isinstance(loader.sampler, RandomSampler) and not loader.sampler.replacement
    )
    return is_plain and loader.batch_size is not None and not isinstance(loader.dataset, IterableDataset)


def _num_rows(batch: Any) -> int:
    if isinstance(batch, Tensor):
        return len(batch)
    values = list(batch.values()) if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else []
    for value in values:
        return _num_rows(value)
    raise DataError(f"a batch is a {type(batch).__name__}; it must be a tensor, or a tuple, list or dict of tensors")


def _rows(batch: Any, first: int, end: int) -> Any:
    if isinstance(batch, Tensor):
        return batch[first:end]
    if isinstance(batch, dict):
        return {key: _rows(value, first, end) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_rows(value, first, end) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_rows(value, first, end) for value in batch)
    return batch
