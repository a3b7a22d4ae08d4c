"""Batches of a stream that grows, with a share of it set aside to be tested on."""

from __future__ import annotations

import itertools
import threading
import time
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import safetensors
import safetensors.numpy
import torch
from torch import Tensor

from cordee.core import tree
from cordee.core.batch import Batch
from cordee.core.errors import DataError
from cordee.core.shards import Shards
from cordee.data.augment import Augmentation
from cordee.data.datasets import IterableSource, reading_error
from cordee.data.order import part_of
from cordee.data.samples import PAIRS, SampleFormat
from cordee.data.source import Splits, check_classes, ready_inputs, source_of_arrays


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
        """A number that identifies what is next in this stream; workers that see the same have the same."""
        return zlib.crc32(self._feed.mark.encode())

    def take(self, num_samples: int) -> Taken:
        """Return the next batch, which `ready` has said is there."""
        start = self._feed.place.samples
        whole = self._feed.take(num_samples)
        positions = torch.arange(start, start + num_samples)
        is_aside = (positions + 1) % self._every == 0 if self._every else torch.zeros(num_samples, dtype=torch.bool)
        aside = whole.select(is_aside)
        kept = (~is_aside).nonzero().squeeze(1)
        first, stop = part_of(len(kept), self._shards)
        own = kept[first:stop]
        part = whole.select(own)
        if self._augmentation is not None:
            part = Batch(self._augmentation.apply(part.inputs, positions[own], self._augment_seed), part.targets)
        return Taken(part, aside, self._feed.place)

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
    if aside.num_samples == 0:
        return before
    if before is not None:
        aside = Batch.concatenate([before, aside])
    return aside.rows(max(0, aside.num_samples - size), aside.num_samples)


# Data that keeps arriving: files that appear in a folder, or an iterable that never ends.
#
# The stream has one order, the same for every worker and after a resume: that of the files' names, and of the rows in
# each. A `Place` says how far it was taken.

SUFFIXES = (".npz", ".safetensors")
NAMES = (("x", "y"), ("inputs", "targets"))
END_FILE = "END"
_END = object()  # of an iterable
STABLE_S = 5.0  # a file that cannot be read is being written until it has not changed for so long


class Place(msgspec.Struct, frozen=True):
    """Where in a stream one is."""

    samples: int = 0  # that were taken, from the very first
    file: str = ""  # the last one that was taken from
    offset: int = 0  # rows of it that were taken
    digest: int = 0  # of the labels that were taken from an iterable; 0 where targets are no labels


class Feed(Protocol):
    """One reader's way through a stream. Not for several threads."""

    place: Place
    is_ended: bool  # nothing more will come than `poll` says

    @property
    def mark(self) -> str:
        """What distinguishes this place, and what `poll` found after it, from others."""

    def poll(self, num_wanted: int) -> int:
        """Return how many samples are there, without waiting; at least `num_wanted` if so many are."""

    def take(self, num_samples: int) -> Batch:
        """Return the next samples, which `poll` has said are there."""

    def close(self) -> None: ...


class GrowingSource:
    """A training set that grows. It has no length, no epochs and no random access."""

    def __init__(
        self,
        open_feed: Callable[[GrowingSource, Place], Feed],
        example: Batch,
        num_classes: int | None,
        what: str,
        sample_format: SampleFormat = PAIRS,
    ) -> None:
        self.num_samples: int | None = None
        self.input_shape = tree.shapes(example.inputs)
        self.format = sample_format
        self.example = example
        self.num_classes = num_classes
        self.ignored: int | None = None  # a label that the loss does not count
        self.what = what
        self._open_feed = open_feed

    def gather(self, indices: Tensor) -> Batch:
        raise DataError(f"{self.what} grows: its samples can only be taken in order")

    def open(self, place: Place) -> Feed:
        """Return a feed that continues after `place`."""
        return self._open_feed(self, place)

    def check(self, batch: Batch, what: str) -> Batch:
        """Return the batch; DataError if its samples are not like the first ones."""
        if (shape := tree.shapes(batch.inputs)) != self.input_shape:
            raise DataError(f"the inputs of {what} have the shape {shape}, those before {self.input_shape}")
        targets, known = batch.targets, self.example.targets
        if not isinstance(targets, Tensor) or not isinstance(known, Tensor):
            if (found := tree.shapes(targets)) != (expected := tree.shapes(known)):
                raise DataError(f"the targets of {what} have the shape {found}, those before {expected}")
            return batch
        kind = targets.is_floating_point()
        if kind != known.is_floating_point():
            raise DataError(f"the targets of {what} are {'fractions' if kind else 'classes'}, those before were not")
        if self.num_classes is not None and not kind:
            check_classes(targets, self.num_classes, what, ignored=self.ignored)
        return batch


def folder(root: str, num_classes: int | None = None, ignored: int | None = None) -> Splits:
    """Files that appear in the folder `root`: data that keeps arriving.

    Each is an .npz or .safetensors file with the arrays x and y (or inputs and targets), samples first. `num_classes`
    is needed where targets are classes: those of files to come are not known. `ignored` is a label that the loss does
    not count.
    """
    path = Path(root)
    if not path.is_dir():
        raise DataError(f"data.root = {root!r} is not a folder")
    first = next(iter(_list_files(path)), None)
    if first is None:
        raise DataError(f"no {' or '.join(SUFFIXES)} file in {path} yet: put a first one there before training begins")
    example = _read_file(path / first)
    if num_classes is None and not example.targets.is_floating_point():
        raise DataError(f"the targets in {path / first} are classes: set data.num_classes, for more may come")
    few = example.rows(0, 2)
    source = GrowingSource(lambda source, place: FolderFeed(path, source, place), few, num_classes, str(path))
    source.ignored = ignored
    source.check(example, str(path / first))
    return Splits(source, None, source.input_shape, num_classes, "folder")


class FolderFeed:
    """Takes the files of a folder in the order of their names."""

    def __init__(self, root: Path, source: GrowingSource, place: Place) -> None:
        self.place = place
        self.is_ended = False
        self._root, self._source = root, source
        self._read: deque[tuple[str, Batch]] = deque()  # files with rows that were not taken
        self._last = ""  # the name of the file that was read last
        self._seen: set[str] | None = None  # the files that were there when last looked

    @property
    def mark(self) -> str:
        return f"{self.place} {[name for name, _ in self._read]}"

    def poll(self, num_wanted: int) -> int:
        while self._num_ready < num_wanted and self._read_next():
            pass
        return self._num_ready

    def take(self, num_samples: int) -> Batch:
        parts = []
        left = num_samples
        while left:
            name, batch = self._read[0]
            start = self.place.offset if self.place.file == name else 0
            stop = min(batch.num_samples, start + left)
            parts.append(batch.rows(start, stop))
            left -= stop - start
            self.place = Place(self.place.samples + stop - start, name, stop)
            if stop == batch.num_samples:
                self._read.popleft()
        return Batch.concatenate(parts)

    def close(self) -> None:
        self._read.clear()

    @property
    def _num_ready(self) -> int:
        num_rows = sum(batch.num_samples for _, batch in self._read)
        return num_rows - (self.place.offset if self._read and self._read[0][0] == self.place.file else 0)

    def _read_next(self) -> bool:
        """Read the next file, if there is one."""
        is_end_there = (self._root / END_FILE).exists()  # looked for first: what comes before it is there by then
        known = self._last or self.place.file
        names = _list_files(self._root)
        self._refuse_late(names, known)
        for name in names:
            is_begun = name == self.place.file and not self._last
            if name < known or (name == known and not is_begun):
                continue
            batch = _read_stable(self._root / name)
            if batch is None:
                return False
            self._source.check(batch, str(self._root / name))
            if is_begun and self.place.offset > batch.num_samples:
                raise DataError(
                    f"{self._root / name} has {batch.num_samples} samples, and {self.place.offset} of it were taken "
                    "before: a file must not change once it is there"
                )
            self._last = name
            if not is_begun or self.place.offset < batch.num_samples:
                self._read.append((name, batch))
            return True
        self.is_ended = is_end_there
        return False

    def _refuse_late(self, names: list[str], known: str) -> None:
        """Raise DataError for a file that would never be taken."""
        late = [name for name in names if name < known and self._seen is not None and name not in self._seen]
        if late:
            raise DataError(
                f"{self._root / late[0]} came after {known}, whose name is later, and would never be trained on: "
                "names of new files must come after those that are there; rename it, then --resume"
            )
        self._seen = set(names)


def endless(stream: IterableSource, num_classes: int | None) -> GrowingSource:
    """Return the growing set of an iterable's samples."""
    return GrowingSource(
        lambda source, place: IterableFeed(stream.dataset, source, place),
        stream.example,
        num_classes,
        stream.what,
        stream.format,
    )


class IterableFeed:
    """Takes the samples of an iterable, which a thread reads ahead, so that waiting for them holds nothing up.

    To continue in mid-stream, `dataset.seek(num_samples)` is called if there is such a method; otherwise as many
    samples are read and dropped, which must have the labels of those that were taken before.
    """

    def __init__(self, dataset: Any, source: GrowingSource, place: Place) -> None:
        self.place = place
        self.is_ended = False
        self._dataset, self._source = dataset, source
        self._samples: deque[Any] = deque()
        self._has_labels = isinstance(source.example.targets, Tensor) and source.format.collate is None
        self._error: DataError | None = None
        self._num_wanted = 1
        self._is_closed = False
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._read_on, args=(place,), name="cordee-feed", daemon=True)
        self._thread.start()

    @property
    def mark(self) -> str:
        return f"{self.place.samples} {self.place.digest}"

    def poll(self, num_wanted: int) -> int:
        with self._news:
            self._num_wanted = max(self._num_wanted, 2 * num_wanted)
            self._news.notify_all()
            if self._error is not None and len(self._samples) < num_wanted:
                raise self._error
            return len(self._samples)

    def take(self, num_samples: int) -> Batch:
        with self._news:
            samples = [self._samples.popleft() for _ in range(num_samples)]
            self._news.notify_all()
        names = range(self.place.samples, self.place.samples + num_samples)
        source = self._source
        batch = source.format.batch(samples, names, source.what, source.num_classes, source.ignored, names[0])
        digest = _digest_labels(batch.targets if self._has_labels else None, self.place.digest)
        self.place = Place(self.place.samples + num_samples, digest=digest)
        return self._source.check(batch, f"sample {names[0]} and those after it of {self._source.what}")

    def close(self) -> None:
        with self._news:
            self._is_closed = True
            self._news.notify_all()
        self._thread.join(timeout=1.0)  # it may wait for a sample that never comes

    def _read_on(self, place: Place) -> None:
        position = 0
        try:
            iterator = iter(self._dataset) if place == Place() else self._continue(place)
            for position in itertools.count(place.samples):
                item = next(iterator, _END)
                if item is _END:
                    break
                if self._source.format.collate is None:
                    self._source.format.split(item, f"sample {position} of {self._source.what}")
                with self._news:
                    self._samples.append(item)
                    self._news.wait_for(lambda: self._is_closed or len(self._samples) < self._num_wanted)
                    if self._is_closed:
                        return
            self.is_ended = True
        except DataError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001 - raised where the samples are taken
            self._error = reading_error(f"sample {position} of {self._source.what}", error)

    def _continue(self, place: Place) -> Iterator[Any]:
        """Return the samples after `place`. Raises DataError if those before are not what was taken then."""
        if hasattr(self._dataset, "seek"):
            self._dataset.seek(place.samples)
            return iter(self._dataset)
        iterator: Iterator[Any] = iter(self._dataset)
        digest, position = 0, -1
        for position, item in enumerate(itertools.islice(iterator, place.samples)):
            _, target = self._source.format.split(item, f"sample {position} of {self._source.what}")
            digest = _digest_labels(torch.as_tensor(target) if self._has_labels else None, digest)
        if position + 1 != place.samples or (place.digest and digest != place.digest):
            raise DataError(
                f"{self._source.what} gave other samples than before when it was iterated over again, to continue "
                f"after sample {place.samples}: it must begin again each time, with the same samples in the same "
                "order, or have a method seek(num_samples)"
            )
        return iterator


def _digest_labels(targets: Any, before: int) -> int:
    """Return a number that follows from these labels and all before; random changes of inputs do not count.

    0 where targets are no labels, or not one tensor.
    """
    if not isinstance(targets, Tensor) or targets.is_floating_point():
        return 0
    return zlib.crc32(targets.to(torch.int64).contiguous().numpy().tobytes(), before)


def _list_files(root: Path) -> list[str]:
    try:
        names = [path.name for path in root.iterdir()]
    except OSError as error:
        raise DataError(f"cannot look into {root}: {error.strerror}") from error
    return sorted(name for name in names if name.endswith(SUFFIXES) and not name.startswith("."))


def _read_stable(path: Path) -> Batch | None:
    """Return a file's samples; None while it may still be being written."""
    try:
        return _read_file(path)
    except DataError:
        try:
            age_s = time.time() - path.stat().st_mtime
        except FileNotFoundError:
            return None
        if age_s < STABLE_S:
            return None
        raise


def _read_file(path: Path) -> Batch:
    try:
        if path.suffix == ".npz":
            with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
                arrays: Mapping[str, Any] = {name: archive[name] for name in archive.files}
        else:
            arrays = safetensors.numpy.load_file(path)
    except (
        OSError,
        ValueError,
        TypeError,
        EOFError,
        KeyError,
        zipfile.BadZipFile,
        safetensors.SafetensorError,
    ) as error:
        raise DataError(
            f"{path} cannot be read: {error}; write a file under a name with another ending, and rename it when it is "
            "whole"
        ) from error
    for inputs, targets in NAMES:
        if inputs in arrays and targets in arrays:
            source = source_of_arrays(arrays[inputs], arrays[targets], str(path))
            return Batch(ready_inputs(source.inputs), source.targets)
    found = ", ".join(sorted(arrays)) or "none"
    raise DataError(f"{path} has no arrays x and y (or inputs and targets); it has: {found}")
