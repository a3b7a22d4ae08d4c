"""The loaders that a script has prepared: where it is in them, which batch it computes with, and of what share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec

from cordee.core.errors import JobError
from cordee.data.loader_indices import Share
from cordee.data.shared_batches import Pass, Place, PlaceMark, Progress, SharedBatches, place_of


class LoopLoaders:
    """All loaders of one loop, on one worker. Everything is local."""

    def __init__(self, *, is_place_kept: bool) -> None:
        """With `is_place_kept` the place in the data is part of a state from the beginning."""
        self.progress = Progress()
        self.progress.is_kept = is_place_kept
        self._loaders: list[SharedBatches] = []
        self._num_samples, self._counted_at = 0, -1

    def share(self, batches: Iterable[Any], worker_index: int, num_workers: int, seed: int) -> SharedBatches:
        """Return what gives this worker its share of each batch: the same object for the same batches."""
        known = self._known(batches)
        if known is not None:
            return known
        number = len(self._loaders)
        shared = SharedBatches(batches, worker_index, num_workers, seed, number=number, progress=self.progress)
        self._loaders.append(shared)
        return shared

    def _known(self, batches: Iterable[Any]) -> SharedBatches | None:
        return next((each for each in self._loaders if batches is each or batches is each.source), None)

    # The place in the data ------------------------------------------------------------------------------------

    def mark_progress(self, seed: int) -> Callable[[], dict[str, Any]]:
        """Note where the loop is; return what gives it in plain values and places."""
        marks = [loader.mark() for loader in self._loaders]
        return partial(_describe, seed, self._num_samples, self.progress.num_given, self.progress.digest, marks)

    def read_places(self, progress: dict[str, Any]) -> list[Place]:
        """Return the places that `mark_progress` has given somewhere. Raises JobError if they are of other loaders."""
        places = [msgspec.convert(place, Place) for place in progress["loaders"]]
        if len(places) != len(self._loaders):
            raise JobError(
                f"the state is of a loop over {len(places)} prepared loaders, this script has prepared "
                f"{len(self._loaders)}: prepare all of them before the loop, and before state.restore()"
            )
        return places

    def continue_from(
        self, progress: dict[str, Any], places: list[Place], worker_index: int, num_workers: int, seed: int
    ) -> None:
        """Continue from what `mark_progress` has given somewhere, as a worker of a team."""
        self._num_samples = progress["samples"]
        self.progress.begin_attempt(progress["given"], progress["digest"])
        self._counted_at = self.progress.num_given
        for loader, place in zip(self._loaders, places, strict=True):
            loader.share_among(worker_index, num_workers)
            loader.continue_from(place, seed)

    def keep_place(self) -> None:
        """Have the place in the data be part of a state."""
        self.progress.is_kept = True
        for loader in self._loaders:
            loader.keep_place()

    def count_samples(self, batches: Iterable[Any] | None) -> None:
        """Count the samples of a batch when the first loss of it is computed."""
        given_at = max((one.given_at for one in self.progress.open), default=-1)
        if given_at > self._counted_at:
            self._counted_at = given_at
            one = self._innermost()
            one.is_trained = True
            self._num_samples += (self._find(batches) if batches is not None else one).share.num_all

    # The present batch ----------------------------------------------------------------------------------------

    def present_share(self, batches: Iterable[Any] | None, num_workers: int) -> Share:
        """Return the share of the batch that the script computes with, or refuse to guess."""
        if batches is not None:
            return self._find(batches).share
        passes = self.progress.open
        if not passes:
            raise JobError(
                "team.backward: the loss is of which batch? There is no open loop over prepared batches: prepare the "
                "loader and call team.backward inside of its loop, or write team.backward(loss, batches=loader) for "
                "the batch that it gave last"
            )
        if any(not _weigh_alike(passes[0], other, num_workers) for other in passes[1:]):
            raise JobError(
                "team.backward: the loss is of which batch? Loops over several loaders are open, and their batches are "
                f"of {' and '.join(str(one.share.num_all) for one in passes)} samples: write "
                "team.backward(loss, batches=loader)"
            )
        return passes[0].share

    def standing_in(self, batches: Iterable[Any] | None, num_workers: int) -> SharedBatches | None:
        """Return the loader of whose present batch this worker has no sample, so that it computes somebody else's."""
        if batches is not None:
            found = self._find(batches)
            return None if found.share.num_own else found
        if not self.progress.open:
            return None
        innermost = self._innermost()
        for other in self.progress.open:
            is_outer = innermost.begun_at >= other.given_at
            sizes = {min(one.share.num_all, num_workers) for one in (innermost, other)}
            if other is not innermost and not is_outer and len(sizes) > 1:
                raise JobError(
                    "team: rows of which batch? Loops over several loaders are open, and one has given a batch that is "
                    f"smaller than the team ({innermost.share.num_all} and {other.share.num_all} samples): say "
                    "which with batches=loader"
                )
        return None if innermost.share.num_own else innermost.batches

    def _innermost(self) -> Pass:
        return max(self.progress.open, key=lambda one: one.given_at)

    def _find(self, batches: Iterable[Any]) -> SharedBatches:
        known = self._known(batches)
        if known is None:
            raise JobError("batches=: this loader has not been prepared: give what team.prepare returned")
        return known


def _describe(seed: int, num_samples: int, num_given: int, digest: int, marks: list[PlaceMark]) -> dict[str, Any]:
    places = [place_of(mark) for mark in marks]
    return {
        "samples": num_samples,
        "epoch": places[0].epoch if places else 0,
        "batch": places[0].num_given if places else 0,
        "given": num_given,
        "digest": digest,
        "loaders": places,
        "seed": seed,
    }


def _weigh_alike(one: Pass, other: Pass, num_workers: int) -> bool:
    """Whether two batches have the same weights on all workers, so that all of them come to this conclusion."""
    sizes = (one.share.num_all, other.share.num_all)
    return sizes[0] == sizes[1] or not any(size % num_workers for size in sizes)
