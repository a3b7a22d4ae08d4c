"""Batches of a stream that grows, with a share of it set aside to be tested on."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch

from cordee.core.batch import Batch
from cordee.core.shards import Shards
from cordee.data.augment import Augmentation
from cordee.data.growing import GrowingSource, Place
from cordee.data.order import part_of


@dataclass(frozen=True)
class Taken:
    """A batch from a stream: this worker's part of it, what was set aside, and where the stream is behind it."""

    part: Batch
    aside: Batch
    place: Place


class OnlineStream:
    """Cuts a growing source into batches from `place` on. Local; every worker cuts the same ones."""

    def __init__(
        self,
        source: GrowingSource,
        place: Place,
        *,
        batch_size: int,
        holdout: float,
        shards: Shards,
        augmentation: Augmentation | None = None,
        augment_seed: int = 0,
    ) -> None:
        self._feed = source.open(place)
        self._batch_size = batch_size
        self._every = round(1 / holdout) if holdout else 0  # which samples are set aside: every so many
        self._shards = shards
        self._augmentation, self._augment_seed = augmentation, augment_seed

    @property
    def is_ended(self) -> bool:
        """Whether nothing is left, and nothing more will come."""
        return self._feed.is_ended and self._feed.poll(1) == 0

    def ready(self) -> int:
        """Return how many samples the next batch takes, those set aside included, if they are there; else 0.

        The last batch before the end of a stream may be smaller.
        """
        wanted = span_of(self._feed.place.samples, self._batch_size, self._every)
        is_ended = self._feed.is_ended  # asked first: what is found afterwards is all there will be
        num_ready = self._feed.poll(wanted)
        if num_ready >= wanted:
            return wanted
        return num_ready if is_ended else 0

    @property
    def mark(self) -> int:
        """A number that tells what is next in this stream; workers that see the same have the same."""
        return zlib.crc32(self._feed.mark.encode())

    def take(self, num_samples: int) -> Taken:
        """Return the next batch, which `ready` has said is there."""
        start = self._feed.place.samples
        whole = self._feed.take(num_samples)
        positions = torch.arange(start, start + num_samples)
        is_aside = (positions + 1) % self._every == 0 if self._every else torch.zeros(num_samples, dtype=torch.bool)
        aside = Batch(whole.inputs[is_aside], whole.targets[is_aside])
        kept = (~is_aside).nonzero().squeeze(1)
        first, stop = part_of(len(kept), self._shards)
        own = kept[first:stop]
        inputs, targets = whole.inputs[own], whole.targets[own]
        if self._augmentation is not None:
            inputs = self._augmentation.apply(inputs, positions[own], self._augment_seed)
        return Taken(Batch(inputs, targets), aside, self._feed.place)

    def close(self) -> None:
        self._feed.close()


def span_of(start: int, num_training: int, every: int) -> int:
    """Return how many samples from position `start` on hold `num_training` that are not set aside."""
    length = num_training
    while every and (missing := num_training - length + (start + length) // every - start // every) > 0:
        length += missing
    return length


def newest(before: Batch | None, aside: Batch, size: int) -> Batch | None:
    """Return the last `size` of the samples set aside so far."""
    if len(aside.targets) == 0:
        return before
    if before is not None:
        aside = Batch(torch.cat([before.inputs, aside.inputs]), torch.cat([before.targets, aside.targets]))
    return Batch(aside.inputs[-size:], aside.targets[-size:])
