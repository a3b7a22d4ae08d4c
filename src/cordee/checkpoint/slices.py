"""Saving a state of which each member of a team has a slice: all write into the same files, and nobody has the whole.

The files are those that one member would write who had everything. Rows of a tensor that follow each other are bytes
that follow each other, so every member knows where in a file its own belong. Training waits until the bytes are in the
system's memory for files; they are brought to the disk and hashed afterwards. Where a member's bytes are read again,
their sum is compared with the sum of what the member had.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
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
from cordee.checkpoint.state import CHUNK_BYTES, State, chunks_of
from cordee.checkpoint.writing import Draft
from cordee.core.errors import CheckpointError


class Slice(NamedTuple):
    """Rows of a tensor that follow each other."""

    start: int  # how many numbers of the tensor come before
    values: Tensor


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


class Region(NamedTuple):
    """Bytes of a file that one member has written."""

    start: int
    num_bytes: int
    sum: int  # of the bytes as numbers of 64 bits

    @property
    def end(self) -> int:
        return self.start + self.num_bytes


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


def write_slices(folder: Path, plan: Plan, slices: Slices, *, is_synced: bool) -> list[Region]:
    """Write this member's slices into the files in `folder`; return a region for each tensor of the plan, in its order.

    `is_synced`: return only when they are on the disk. OSError passes through.
    """
    regions: dict[str, Region] = {}
    for file in plan.headers:
        # No other file than the one that was made for this checkpoint, and not through links.
        descriptor = os.open(folder / file, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for name, (its_file, start, _) in plan.places.items():
                if its_file == file and name in slices.own:
                    one = slices.own[name]
                    first = start + one.start * one.values.element_size()
                    regions[name] = _write_at(descriptor, first, chunks_of(name, one.values))
            if is_synced:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return [regions.get(name, Region(0, 0, 0)) for name in plan.places]


def _write_at(descriptor: int, start: int, chunks: Iterator[memoryview]) -> Region:
    end, total = start, 0
    for chunk in chunks:
        total += _sum(chunk)
        rest = chunk
        while len(rest):
            num_bytes = os.pwrite(descriptor, rest, end)
            rest, end = rest[num_bytes:], end + num_bytes
    return Region(start, end - start, total % (1 << 63))


def _sum(chunk: memoryview) -> int:
    """Return the sum of the bytes as numbers of 64 bits, the last one filled up with zeros."""
    whole = len(chunk) // 8 * 8
    total = int(np.frombuffer(chunk[:whole], "<u8").sum(dtype=np.uint64)) if whole else 0
    return total + int.from_bytes(chunk[whole:], "little")


def find_missing(plan: Plan, rows: Sequence[Sequence[Region]], members: Sequence[int]) -> str | None:
    """Return what of the checkpoint no member has written, or two have; `rows` has the regions of each member. Pure."""
    for number, (name, (file, start, num_bytes)) in enumerate(plan.places.items()):
        found = sorted(
            (row[number], member) for row, member in zip(rows, members, strict=True) if row[number].num_bytes
        )
        end = start
        for region, member in found:
            if region.start > end:
                return f"bytes {end - start} to {region.start - start} of '{name}' in {file} were written by nobody"
            if region.start < end:
                return f"worker {member} has written bytes of '{name}' in {file} that another one has written as well"
            end = region.end
        if end != start + num_bytes:
            return f"bytes {end - start} to {num_bytes} of '{name}' in {file} were written by nobody"
    return None


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
                writers = [
                    (region, f"slice of '{name}' of worker {member}")
                    for member, row in zip(members, rows, strict=True)
                    for (name, (its_file, _, _)), region in zip(self._plan.places.items(), row, strict=True)
                    if its_file == file and region.num_bytes
                ]
                self._draft.seal(file, partial(_read_back, header=header, writers=sorted(writers)))
            self._draft.append(VALUES, self._values)
            return self._draft.finish(keep=keep, protected=protected)
        finally:
            self._draft.discard()


def _read_back(path: Path, *, header: bytes, writers: Sequence[tuple[Region, str]]) -> Written:
    """Sync a file and return what it is. Raises CheckpointError that names a slice which is not what was written."""
    digest = hashlib.sha256()
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
        # Chunk by chunk of each region: their sums are of the same numbers as those of who wrote them.
        for region, what in [(Region(0, len(header), _sum(memoryview(header)) % (1 << 63)), "header"), *writers]:
            total = 0
            for start in range(region.start, region.end, CHUNK_BYTES):
                chunk = os.pread(descriptor, min(CHUNK_BYTES, region.end - start), start)
                digest.update(chunk)
                total += _sum(memoryview(chunk))
            if total % (1 << 63) != region.sum:
                raise CheckpointError(f"the {what} in {path.name} is missing, or is not what was written")
        return Written(os.fstat(descriptor).st_size, digest.hexdigest())
    finally:
        os.close(descriptor)
