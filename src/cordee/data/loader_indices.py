"""The indices of a script's own loader: in which order they come, and which of them one worker reads."""

from __future__ import annotations

import base64
import copy
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

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

from cordee.core.seeds import derive_seed

# Samplers that draw from `generator` and from nothing else. Not their subclasses, which may do as they like.
_DRAWN_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class Share(NamedTuple):
    """How many samples of a batch this worker has, and how many there are."""

    num_own: int
    num_all: int


class OwnIndices:
    """The batch sampler of a loader that reads one worker's samples: the part of each batch of indices."""

    def __init__(
        self,
        order: Callable[[torch.Generator], Iterable[Any]],
        seed: int,
        own_range: Callable[[int], tuple[int, int]],
    ) -> None:
        self._order, self.seed, self._range = order, seed, own_range
        self.epoch = 0  # of the iteration that is to begin
        self.num_passed = 0  # batches that the iteration that is to begin passes over
        self.given: deque[tuple[Share, int]] = deque()  # of the latest iteration; processes that read are ahead
        self.begin: Callable[[], None] = _nothing  # called before the first batch of the iteration is drawn
        self.check: Callable[[int], None] = _nothing  # and after passing over, before the next batch, with a digest

    def __len__(self) -> int:
        batches = self._order(torch.Generator())
        return len(batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[Any]]:
        # Called twice for an iteration where other processes read.
        self.given = deque()
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", self.epoch))
        return self._cut(self._order(generator), self.given, self.num_passed, self.begin, self.check)

    def _cut(
        self,
        order: Iterable[Any],
        given: deque[tuple[Share, int]],
        num_passed: int,
        begin: Callable[[], None],
        check: Callable[[int], None],
    ) -> Iterator[list[Any]]:
        begin()
        batches, digest = map(list, order), 0
        for batch in islice(batches, num_passed):
            digest = zlib.crc32(f"{len(batch)} {_fingerprint(batch)}".encode(), digest)
        check(digest)
        for batch in batches:
            first, end = self._range(len(batch))
            given.append((Share(end - first, len(batch)), _fingerprint(batch)))
            yield batch[first:end] or batch[:1]


def _nothing(*_: int) -> None:
    """Do nothing."""


def _fingerprint(indices: list[Any]) -> int:
    return zlib.crc32(str(indices).encode())


def gives_indices(loader: DataLoader[Any]) -> bool:
    """Whether a loader reads what a batch sampler names, in no way of its own."""
    is_plain = all(
        getattr(type(loader), name) is getattr(DataLoader, name) for name in ("__iter__", "_get_iterator", "__len__")
    )
    return is_plain and loader.batch_sampler is not None and not isinstance(loader.dataset, IterableDataset)


def generators_of(batches: Any) -> list[torch.Generator]:
    """Return the generators of the script's own that the order of its batches is drawn from."""
    found: list[torch.Generator] = []
    if isinstance(batches, DataLoader):
        # An iterable data set gives the order, as samplers do; what others draw may be of a worker's own samples.
        ordering = batches.dataset if isinstance(batches.dataset, IterableDataset) else None
        for owner in (batches, batches.sampler, batches.batch_sampler, ordering):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator) and not any(generator is known for known in found):
                found.append(generator)
    return found


def encode_state(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def decode_state(state: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8)


def with_generator(batches: Any) -> Callable[[torch.Generator], Iterable[Any]] | None:
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


def seeds_again(loader: DataLoader[Any], epoch: int) -> bool | None:
    """Return whether torch will draw a seed for reading processes that it drew before, or not draw one that it did.

    Processes that persist get theirs in the first iteration, wherever that is: True where an iteration after it is the
    first one here, False where the first one is iterated over again, None where both have drawn as many.
    """
    if not (loader.persistent_workers and loader.num_workers):
        return None
    has_drawn = getattr(loader, "_iterator", None) is not None
    if has_drawn == (epoch > 0):
        return None
    return not has_drawn


def draw_seed(generator: torch.Generator | None) -> None:
    """Draw what torch draws for the reading processes of a loader with this generator."""
    if generator is not None:
        torch.empty((), dtype=torch.int64).random_(generator=generator)


def loader_of(loader: DataLoader[Any], indices: OwnIndices) -> DataLoader[Any]:
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
