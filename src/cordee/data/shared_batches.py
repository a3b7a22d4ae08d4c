"""A script's own batches, shared out: each worker gets its part of every one of them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from cordee.core.errors import DataError
from cordee.core.seeds import derive_seed
from cordee.core.shards import shard_part
from cordee.data.loader_indices import (
    OwnIndices,
    Share,
    decode_state,
    draw_seed,
    encode_state,
    generators_of,
    gives_indices,
    loader_of,
    seeds_again,
    with_generator,
)


class Place(msgspec.Struct, frozen=True):
    """Where a loader is between two batches. Plain values: it is sent and saved with the state of a loop."""

    epoch: int  # of the iteration that is open, or that begins next
    is_open: bool = False
    num_given: int = 0  # batches of the open iteration
    digest: int = 0  # of these batches
    generators_before: list[str] = []  # states of the script's own generators when the open iteration began
    generators: list[str] = []  # and now


# An open iteration: its epoch, the batches given of it, their digest, the generators before it and now.
PlaceMark = Place | tuple[int, int, int, list[Tensor], list[Tensor]]


def place_of(mark: PlaceMark) -> Place:
    """Return where a loader was: all that another process needs to be given the same batches from there on."""
    if isinstance(mark, Place):
        return mark
    epoch, num_given, digest, before, states = mark
    return Place(epoch, True, num_given, digest, list(map(encode_state, before)), list(map(encode_state, states)))


class Pass:
    """One iteration over batches that has begun and has not ended: which batch the script has of it."""

    def __init__(self, batches: SharedBatches, begun_at: int, attempt: int) -> None:
        self.batches = batches
        self.begun_at = begun_at  # how many batches the script had been given by then, of any loader
        self.given_at = begun_at  # the same when it was given the last one of this iteration
        self.attempt = attempt  # at the loop: an iteration of an earlier attempt is over
        self.num_given = 0  # batches of this iteration
        self.is_trained = False  # a loss of one of its batches was computed
        self.digest = 0  # of these batches
        self.share = Share(1, 1)


class Progress:
    """What a script has been given of all its loaders: the iterations that are open, and a digest of the batches."""

    def __init__(self) -> None:
        self.open: list[Pass] = []
        self.num_given = 0
        self.digest = 0  # of everything given so far; the same on all workers, or they do not have the same batches
        self.num_unnoticed = 0  # batches of the latest loops in which this worker stood in, and was not asked whether
        self.num_trained = 0  # iterations that were trained with and have ended
        self.attempt = 0  # at a loop that is begun again after a loss
        self.is_kept = False  # the place in the data is part of a state: one worker alone tells batches apart, too
        self.at_next: Callable[[], None] | None = None  # called where an iteration has come to its end

    def begin(self) -> None:
        """Record that an iteration begins: what was given before, of loops that have ended, has been used."""
        if not self.open:
            self.num_unnoticed = 0

    def begin_attempt(self, num_given: int, digest: int) -> None:
        """Begin a loop, or begin it again: iterations that are open end here."""
        self.attempt += 1
        self.open.clear()  # they have not come to their ends
        self.num_given, self.digest, self.num_unnoticed = num_given, digest, 0

    def places(self) -> dict[Pass, int]:
        """Return the iterations that are open, each with how many batches it has given."""
        return {one: one.num_given for one in self.open}

    def is_in_same_iteration(self, before: dict[Pass, int]) -> bool:
        """Whether iterations are open, and none has given a batch since `places` returned `before`.

        Where one has, and another has not, it cannot be known which loop is around which, or read beside it.
        """
        return bool(self.open) and self.places() == before

    def record(self, one: Pass, share: Share, fingerprint: int) -> None:
        self.num_given += 1
        self.num_unnoticed += not share.num_own
        one.batches.is_noticed = False
        one.share, one.given_at = share, self.num_given
        one.num_given += 1
        one.digest = zlib.crc32(f"{share.num_all} {fingerprint}".encode(), one.digest)
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
        self._epoch = 0  # of the iteration that begins next
        self._next: Place | None = None  # where the next iteration begins, unless at the beginning
        self._generators = generators_of(batches)
        self._generators_before: list[Tensor] = []  # their states when the latest iteration began
        self._own_loader: tuple[DataLoader[Any], OwnIndices] | None = None
        self._seed = seed
        if num_workers > 1 or self._progress.is_kept:
            self.keep_place()
        elif isinstance(batches, DataLoader) and gives_indices(batches) and with_generator(batches.batch_sampler):
            self.keep_place()  # alone, the order follows from the seed as it does for many

    def keep_place(self) -> None:
        """Read by index where that is possible, so that a place in the data is found again without reading samples."""
        batches = self._batches
        if self._own_loader is None and isinstance(batches, DataLoader) and gives_indices(batches):
            sampler: Any = batches.batch_sampler
            order: Callable[[torch.Generator], Iterable[Any]] = with_generator(sampler) or (lambda generator: sampler)
            indices = OwnIndices(order, self._seed_of_order(self._seed), self._range)
            self._own_loader = loader_of(batches, indices), indices

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
        progress = self._progress
        progress.begin()
        one = Pass(self, progress.num_given, progress.attempt)
        start, self._next = self._next, None
        self._generators_before = self._states()
        if start is not None:
            self._rewind(start)
            one.num_given, one.digest = start.num_given, start.digest
            progress.open.append(one)  # as it was when the place was kept
        self._epoch += 1
        own = self._from_any(start) if self._own_loader is None else self._from_loader(*self._own_loader, start)
        try:
            for share, fingerprint, batch in own:
                if one.attempt != progress.attempt:
                    raise DataError(
                        "an iteration over prepared batches was begun before the loop that it is used in, which has "
                        "been begun again since: write `for ... in batches` (or iter(batches)) inside the function"
                    )
                progress.record(one, share, fingerprint)
                if one not in progress.open:
                    progress.open.append(one)
                yield batch
                if progress.at_next is not None:
                    progress.at_next()
        finally:
            if one in progress.open:
                progress.open.remove(one)
                progress.num_trained += one.is_trained

    # The place in the data, for a state that is continued from -----------------------------------------------

    def mark(self) -> PlaceMark:
        """Note where this loader is, as cheaply as can be: at every commit. `place_of` makes a place of it.

        Raises DataError where two iterations over it are open.
        """
        found = None
        for one in self._progress.open:
            if one.batches is self:
                if found is not None:
                    raise DataError(
                        "two loops over one loader are open: their place cannot be kept; prepare two loaders"
                    )
                found = one
        states = self._states() if self._generators else []
        if found is not None:
            return self._epoch - 1, found.num_given, found.digest, self._generators_before, states
        if self._next is not None:  # nothing was taken of what was left
            return self._next
        return Place(self._epoch, generators=list(map(encode_state, states)))

    def continue_from(self, place: Place, seed: int) -> None:
        """Have the next iteration begin at `place`. `seed` is the one that the order of a pass follows from."""
        if len(place.generators) != len(self._generators):
            raise DataError("the place in the data is of another loader: every worker must prepare the same loaders")
        self._epoch, self._next = place.epoch, place if place.is_open else None
        self._put_back(map(decode_state, place.generators))
        self._seed = seed
        if self._own_loader is not None:
            self._own_loader[1].seed = self._seed_of_order(seed)
        elif place.is_open and iter(self._batches) is self._batches:
            raise DataError(
                "a loop over an iterator cannot be continued by another process, or after a loss: prepare something "
                "that begins again each time it is iterated over, a DataLoader, a list or a class with __iter__"
            )

    def share_among(self, worker_index: int, num_workers: int) -> None:
        """Have this worker take the part of this member of a team from the next iteration on."""
        self._worker_index, self._num_workers = worker_index, num_workers

    def _seed_of_order(self, seed: int) -> int:
        return derive_seed(seed, "loader", self.number) if self.number else seed

    def _rewind(self, start: Place) -> None:
        self._put_back(map(decode_state, start.generators_before))
        self._generators_before = self._states()

    def _check_passed(self, start: Place, digest: int) -> None:
        """Raise DataError unless what was passed over is what was given before."""
        if digest != start.digest:
            raise DataError(
                f"the {start.num_given} batches that were given before are not the first ones now: iterating again "
                "must give the same batches. A sampler or data set of your own must draw from a torch.Generator that "
                "it has as `generator`, or from a seed and the epoch"
            )

    def _states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _put_back(self, states: Iterable[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def _from_loader(
        self, loader: DataLoader[Any], indices: OwnIndices, start: Place | None
    ) -> Iterator[tuple[Share, int, Any]]:
        """Read only the own samples of each batch."""
        is_ahead = loader.num_workers > 0  # batches are drawn before the script asks for them
        is_seeded_again = seeds_again(loader, self._epoch - 1)
        passed: list[Tensor] = []  # states when all was passed over, of a loader that is ahead

        def begin() -> None:
            if is_seeded_again:
                self._put_back(self._generators_before)
            elif is_seeded_again is False:
                draw_seed(loader.generator)

        def check(digest: int) -> None:
            if start is None:
                return
            self._check_passed(start, digest)
            if is_ahead:
                passed.extend(self._states())
            else:  # before the next batch is drawn: the script may have drawn from the same generator
                self._put_back(map(decode_state, start.generators))

        indices.epoch, indices.num_passed = self._epoch - 1, start.num_given if start else 0
        indices.begin, indices.check = begin, check
        iterator = iter(loader)
        given = indices.given  # of this iteration
        # A sampler that draws batch by batch is as far ahead as it was before; of one that has drawn all at the
        # beginning the states are those that the script has left.
        if passed and all(map(torch.equal, passed, self._states())):
            assert start is not None
            self._put_back(map(decode_state, start.generators))
        for batch in iterator:
            share, fingerprint = given.popleft()
            yield share, fingerprint, batch

    def _from_any(self, start: Place | None) -> Iterator[tuple[Share, int, Any]]:
        """Cut the own part out of each batch, which must be the same on every worker."""
        is_alone, digest, batches = self._num_workers == 1, 0, iter(self._batches)
        if is_alone and not self._progress.is_kept:
            for batch in batches:
                yield Share(1, 1), 0, batch
            return
        for batch in islice(batches, start.num_given if start else 0):
            digest = zlib.crc32(f"{self._cutter.count(batch)} {fingerprint_rows(batch)}".encode(), digest)
        if start is not None:
            self._check_passed(start, digest)
            self._put_back(map(decode_state, start.generators))
        for batch in batches:
            num_all, fingerprint = self._cutter.count(batch), fingerprint_rows(batch)
            first, end = self._range(num_all)
            begin, stop = (first, end) if end > first else (0, 1)
            own = batch if is_alone else self._cutter.cut(batch, begin, stop)
            yield Share(end - first, num_all), fingerprint, own

    def _range(self, num_samples: int) -> tuple[int, int]:
        return shard_part(num_samples, self._worker_index, self._num_workers)


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
