"""Saving a state of which each member of a team has a slice: all write into the same files, and nobody has the whole.

The files are those that one member would write who had everything. Rows of a tensor that follow each other are bytes
that follow each other, so every member knows where in a file its own belong. Training waits until the bytes are in the
system's memory for files; they are brought to the disk and hashed afterwards. Where a member's bytes are read again,
their sum is compared with the sum of what the member had.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from cordee.checkpoint.layout import (
    VALUES,
    Kind,
    Written,
    encode_values,
    file_of,
    make_header,
    split_by_part,
)
from cordee.checkpoint.state import CHUNK_BYTES, State, bytes_of, is_sound
from cordee.checkpoint.writing import Draft
from cordee.core.errors import CheckpointError


class Slice(NamedTuple):
    """Numbers of a tensor that follow each other; or several runs of them, all of one length and one distance."""

    start: int  # how many numbers of the tensor come before
    values: Tensor
    num_runs: int = 1
    distance: int = 0  # from the beginning of a run to that of the next, in numbers of the tensor


class Slices(NamedTuple):
    """What one member has of a state. All but `own` is the same on every member."""

    kinds: dict[str, Kind]  # of all tensors of the state, whole
    aliases: dict[str, str]  # other names of a tensor
    own: dict[str, Slice]
    values: dict[str, Any]
    common: dict[str, Tensor]  # the tensors that every member has whole; one of them saves them

    def join(self, state: State, *, is_saved: bool) -> Slices:
        """Return these and what every member has of `state`, with its values; `is_saved`: by this member."""
        kinds = {name: Kind(tensor.dtype, tensor.shape) for name, tensor in state.tensors.items()}
        own = {name: Slice(0, tensor) for name, tensor in state.tensors.items()} if is_saved else {}
        return Slices({**self.kinds, **kinds}, self.aliases, {**self.own, **own}, state.values, self.common)

    def with_copies(self, names: Collection[str]) -> Slices:
        """Return these with copies of what is here of the tensors called `names`."""
        copies = {name: one._replace(values=one.values.clone()) for name, one in self.own.items() if name in names}
        return self._replace(own={**self.own, **copies})


class Wrote(NamedTuple):
    """What one member has written."""

    regions: list[Region]  # of each tensor of the plan, in its order
    unsound: str | None = None  # a tensor whose values must not be saved


class Region(NamedTuple):
    """Bytes of a file that one member has written: a run, or several of one length and one distance."""

    start: int
    num_bytes: int
    sum: int  # of the bytes as numbers of 64 bits, the last one of each run filled up with zeros
    num_runs: int = 1
    distance: int = 0

    @property
    def run_bytes(self) -> int:
        return self.num_bytes // self.num_runs

    def bounds(self, base: int, row_bytes: int) -> tuple[tuple[int, int], tuple[int, int]] | None:
        """Return which rows, and which bytes of each of them, these are of rows that begin at `base`; None if none."""
        row, first = divmod(self.start - base, row_bytes)
        if self.num_runs > 1:
            is_even = self.distance == row_bytes and first + self.run_bytes <= row_bytes
            return ((row, row + self.num_runs), (first, first + self.run_bytes)) if is_even else None
        return ((row, row + 1), (first, first + self.num_bytes)) if first + self.num_bytes <= row_bytes else None


NOTHING = Region(0, 0, 0)


class Plan(NamedTuple):
    """The files of a checkpoint, and where in them everything belongs. The same on every member."""

    headers: dict[str, bytes]  # of each file
    places: dict[str, tuple[str, int, int]]  # of each tensor: file, first byte, number of bytes

    @property
    def digest(self) -> int:
        """A number that is the same where plans are."""
        digest = hashlib.sha256(b"".join(name.encode() + header for name, header in sorted(self.headers.items())))
        return int.from_bytes(digest.digest()[:7], "little")

    def num_bytes(self, file: str) -> int:
        ends = [start + num_bytes for name, start, num_bytes in self.places.values() if name == file]
        return max(ends, default=len(self.headers[file]))


def plan_files(slices: Slices) -> Plan:
    """Return the files that hold the state. Raises CheckpointError for a state that cannot be saved."""
    headers: dict[str, bytes] = {}
    places: dict[str, tuple[str, int, int]] = {}
    aliases = split_by_part(slices.aliases)
    for part, kinds in split_by_part(slices.kinds).items():
        others = {name: first.removeprefix(f"{part}.") for name, first in aliases.get(part, {}).items()}
        headers[file_of(part)], starts = make_header(kinds, others)
        for name, start in starts.items():
            places[f"{part}.{name}"] = (file_of(part), start, kinds[name].num_bytes)
    return Plan(headers, places)


def write_slices(folder: Path, plan: Plan, slices: Slices, *, parameters: Collection[str], is_synced: bool) -> Wrote:
    """Write this member's slices into the files in `folder`; the tensors called `parameters` have to be finite.

    `is_synced`: return only when they are on the disk. OSError passes through.
    """
    regions: dict[str, Region] = {}
    unsound: list[str] = []
    for file in plan.headers:
        # No other file than the one that was made for this checkpoint, and not through links.
        descriptor = os.open(folder / file, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for name, (its_file, start, _) in plan.places.items():
                if its_file == file and name in slices.own:
                    one = slices.own[name]
                    regions[name], its_sound = _write_at(descriptor, start, name, one, is_parameter=name in parameters)
                    if not its_sound:
                        unsound.append(name)
            if is_synced:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return Wrote([regions.get(name, NOTHING) for name in plan.places], min(unsound, default=None))


def _write_at(descriptor: int, start: int, name: str, one: Slice, *, is_parameter: bool) -> tuple[Region, bool]:
    """Write a slice of the tensor that begins at `start`; return where, and whether its values may be saved."""
    raw = bytes_of(name, one.values)
    first, distance = start + one.start * one.values.element_size(), one.distance * one.values.element_size()
    region = Region(first, len(raw), 0, one.num_runs, distance)
    total, sound = 0, True
    # A piece at a time, so that it is in the cache from the first look to the last: a part of a run, or several runs.
    piece = CHUNK_BYTES if one.num_runs == 1 else max(1, CHUNK_BYTES // max(1, region.run_bytes)) * region.run_bytes
    for low in range(0, len(raw), max(1, piece)):
        chunk = raw[low : low + piece]
        length = len(chunk) if one.num_runs == 1 else region.run_bytes
        total += _sum(np.frombuffer(chunk, np.uint8).reshape(-1, length))
        sound = sound and is_sound(chunk, one.values.dtype, is_parameter=is_parameter)
        for at in range(0, len(chunk), length):
            run, skipped = divmod(low + at, region.run_bytes)
            _write_all(descriptor, chunk[at : at + length], first + run * distance + skipped)
    return region._replace(sum=total % (1 << 63)), sound


def _write_all(descriptor: int, content: memoryview, at: int) -> None:
    while len(content):
        num_bytes = os.pwrite(descriptor, content, at)
        content, at = content[num_bytes:], at + num_bytes


def _sum(runs: npt.NDArray[np.uint8]) -> int:
    """Return the sum of the bytes of several runs as numbers of 64 bits, the last one of each filled up with zeros."""
    whole = runs.shape[1] // 8 * 8
    total = int(np.ascontiguousarray(runs[:, :whole]).view("<u8").sum(dtype=np.uint64)) if whole else 0
    rest = runs[:, whole:].sum(axis=0, dtype=np.uint64)
    return total + sum(int(number) << (8 * place) for place, number in enumerate(rest))


def find_missing(plan: Plan, rows: Sequence[Sequence[Region]], members: Sequence[int]) -> str | None:
    """Return what of the checkpoint no member has written, or two have; `rows` has the regions of each member. Pure."""
    for number, (name, (file, start, num_bytes)) in enumerate(plan.places.items()):
        found = [(row[number], member) for row, member in zip(rows, members, strict=True) if row[number].num_bytes]
        row_bytes = max((region.distance for region, _ in found), default=0) or max(num_bytes, 1)
        bands: dict[tuple[int, int], list[tuple[tuple[int, int], int]]] = {}
        for region, member in found:
            bounds = region.bounds(start, row_bytes)
            if bounds is None:
                return f"worker {member} has written bytes of '{name}' in {file} that are no rows or columns of it"
            bands.setdefault(bounds[0], []).append((bounds[1], member))
        edges = [(band, min(member for _, member in inside)) for band, inside in bands.items()]
        problem = _find_gap(edges, num_bytes // row_bytes) if num_bytes else None
        for inside in bands.values():
            problem = problem or _find_gap(inside, row_bytes)
        if problem is not None:
            return f"bytes of '{name}' in {file} were written {problem}"
    return None


def _find_gap(parts: Sequence[tuple[tuple[int, int], int]], end: int) -> str | None:
    """Return what is wrong with parts, each with its first and last end and its owner, that should be 0 to `end`."""
    at = 0
    for (first, last), member in sorted(parts):
        if first > at:
            return "by nobody"
        if first < at:
            return f"by worker {member}, which another one has written as well"
        at = last
    return None if at == end else "by nobody"


class SharedDraft:
    """A checkpoint into whose files all members write their slices. Kept by the one that finishes it."""

    def __init__(self, root: Path, step: int, plan: Plan, values: Mapping[str, Any]) -> None:
        """Make the folder and the files. Raises StorageError with nothing left; CheckpointError for other values."""
        self._plan, self._values = plan, encode_values(values)
        self._draft = Draft(root, step)
        for file, header in plan.headers.items():
            self._draft.allocate(file, header, plan.num_bytes(file))

    @property
    def folder(self) -> Path:
        return self._draft.folder

    def discard(self) -> None:
        self._draft.discard()

    def finish(
        self, rows: Sequence[Sequence[Region]], members: Sequence[int], *, keep: int, protected: Collection[int]
    ) -> Path:
        """Bring everything to the disk, hash it, and give the checkpoint its name. Raises StorageError."""
        try:
            for file, header in self._plan.headers.items():
                tensors = []
                for number, (name, (its_file, start, num_bytes)) in enumerate(self._plan.places.items()):
                    if its_file == file and num_bytes:
                        found = [(row[number], member) for member, row in zip(members, rows, strict=True)]
                        tensors.append((start, num_bytes, name, [one for one in found if one[0].num_bytes]))
                self._draft.seal(file, partial(_read_back, header=header, tensors=sorted(tensors)))
            self._draft.append(VALUES, self._values)
            return self._draft.finish(keep=keep, protected=protected)
        finally:
            self._draft.discard()


def _sums_of(descriptor: int, start: int, num_bytes: int, regions: Sequence[Region], digest: Any) -> list[int]:
    """Add the bytes of a tensor to the digest, in their order; return the sum of each region, which are all of it."""
    totals = [0] * len(regions)
    row_bytes = max(region.distance for region in regions)
    if not row_bytes:
        for number, region in sorted(enumerate(regions), key=lambda pair: pair[1].start):
            for low in range(region.start, region.start + region.num_bytes, CHUNK_BYTES):
                chunk = os.pread(descriptor, min(CHUNK_BYTES, region.start + region.num_bytes - low), low)
                digest.update(chunk)
                totals[number] += _sum(np.frombuffer(chunk, np.uint8)[None])
        return totals
    num_rows, rows_each = num_bytes // row_bytes, max(1, CHUNK_BYTES // row_bytes)
    for row in range(0, num_rows, rows_each):
        size = min(rows_each, num_rows - row) * row_bytes
        chunk = os.pread(descriptor, size, start + row * row_bytes).ljust(size, b"\0")
        digest.update(chunk)
        rows = np.frombuffer(chunk, np.uint8).reshape(-1, row_bytes)
        for number, region in enumerate(regions):
            bounds = region.bounds(start, row_bytes)
            assert bounds is not None  # or it would have been refused before
            (first_row, end_row), (first, end) = bounds
            totals[number] += _sum(rows[max(first_row - row, 0) : max(end_row - row, 0), first:end])
    return totals


_Writers = Sequence[tuple[Region, int]]  # with the number of the member


def _read_back(path: Path, *, header: bytes, tensors: Sequence[tuple[int, int, str, _Writers]]) -> Written:
    """Sync a file and return what it is. Raises CheckpointError that names a slice which is not what was written.

    `tensors` has the first byte, the number of bytes, the name and the writers of each, in the order of the file.
    """
    digest = hashlib.sha256()
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
        found = os.pread(descriptor, len(header), 0)
        if found != header:
            raise CheckpointError(f"the header in {path.name} is missing, or is not what was written")
        digest.update(found)
        for start, num_bytes, name, writers in tensors:
            regions = [region for region, _ in writers]
            sums = _sums_of(descriptor, start, num_bytes, regions, digest)
            for total, (region, member) in zip(sums, writers, strict=True):
                if total % (1 << 63) != region.sum:
                    what = f"slice of '{name}' of worker {member}"
                    raise CheckpointError(f"the {what} in {path.name} is missing, or is not what was written")
        return Written(os.fstat(descriptor).st_size, digest.hexdigest())
    finally:
        os.close(descriptor)
