"""Moving arrays between a client and the servers, in pieces, and some rows of an array to the servers that have them.

While a server works on one piece of a large array the client copies the next, and copies the result of the one before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from cordee.communication.compression import Compression, ErrorFeedback, make_codec
from cordee.communication.messages import Message
from cordee.communication.wire import ITEM_BYTES, Buffer, BufferSpec, Parcel, outgoing, padded
from cordee.core.errors import CommunicationError, StoreError
from cordee.parameters.arrays import Origin, Taken, make_target, take
from cordee.parameters.calls import PIECE_BYTES, MappedValues, StoreCalls, Task
from cordee.parameters.messages import Cut, Done, Encoding, Fill, Pull, PullRows, Push, PushRows, Value
from cordee.parameters.placement import is_cut_at_rows
from cordee.parameters.shared_values import SMALLEST_BYTES, ValuesView

_SMALL_BYTES = 64 << 10
_WIDE = ("float32", "float64")
_FLOATS = ("float16", "bfloat16", *_WIDE)
_COMPRESSIBLE = {
    **dict.fromkeys(("fp16", "bf16"), _WIDE),
    **dict.fromkeys(("int8", "int4", "topk", "topk_2bit"), _FLOATS),
}


class Pulled(NamedTuple):
    """The value of a key, and how many pushes are in it (of a key in several parts: at least)."""

    value: Any
    version: int


class Piece(NamedTuple):
    """A run of elements that travels in one message."""

    part: int  # which of the array's parts
    server: int
    start: int  # within the part
    stop: int
    first: int  # bytes within the array
    last: int
    empty: Parcel  # without the bytes


@dataclass
class Entry:
    """What a client knows of a key."""

    key: str
    number: int
    kind: str
    shape: tuple[int, ...]
    cuts: tuple[Cut, ...]
    piece_bytes: int = PIECE_BYTES
    memories: list[MappedValues | None] | None = None  # of the parts, of large ones; None: there was no transfer yet
    compression: Compression = "none"  # of pushes
    _chosen: tuple[Compression, float] = ("none", 0.0)
    feedback: list[ErrorFeedback] = field(default_factory=list)  # of the pieces, once pushes are compressed
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while a push is under way: keeps their order

    def __post_init__(self) -> None:
        item = ITEM_BYTES[self.kind]
        step = max(1, self.piece_bytes // item)
        self.num_bytes = prod(self.shape) * item
        self.pieces: list[Piece] = []
        for index, cut in enumerate(self.cuts):
            length = cut.stop - cut.start
            for start in range(0, max(length, 1), step):
                stop = min(start + step, length)
                size = (stop - start) * item
                first = (cut.start + start) * item
                empty = describe((self.kind, (stop - start,)))
                self.pieces.append(Piece(index, cut.server, start, stop, first, first + size, empty))

    def map_parts(self, calls: StoreCalls) -> list[MappedValues | None]:
        sizes = [(cut.stop - cut.start) * ITEM_BYTES[self.kind] for cut in self.cuts]
        return [
            MappedValues(calls, cut.server, size) if size >= SMALLEST_BYTES else None
            for cut, size in zip(self.cuts, sizes, strict=True)
        ]

    def compress(self, compression: Compression, topk: float) -> None:
        """Have pushes travel like this from now on. Raises StoreError where that makes no sense."""
        is_plain = compression == "none" and not self.feedback
        if is_plain or not self.num_bytes or (compression, topk) == self._chosen:
            return
        if compression != "none" and self.kind not in _COMPRESSIBLE[compression]:
            raise StoreError(
                f"compression '{compression}' is for {', '.join(_COMPRESSIBLE[compression])}, and key '{self.key}' is "
                f"{self.kind}: set_compression('none', keys='{self.key}')"
            )
        self.compression, self._chosen = compression, (compression, topk)
        dtype = getattr(torch, self.kind)
        codecs = [make_codec(compression, topk, piece.stop - piece.start, dtype) for piece in self.pieces]
        if not self.feedback:
            self.feedback = [ErrorFeedback(codec) for codec in codecs]
        for feedback, codec in zip(self.feedback, codecs, strict=True):
            feedback.codec = codec

    def encoding(self, piece: Piece) -> Encoding | None:
        return None if self.compression == "none" else Encoding(self.compression, piece.stop - piece.start)

    def parcels(self, view: memoryview) -> list[Parcel]:
        """Return what travels of a push, piece by piece. What is compressed counts as sent."""
        if not self.feedback:
            return [_parcel(piece, view) for piece in self.pieces]
        parcels = []
        for piece, feedback in zip(self.pieces, self.feedback, strict=True):
            raw = np.frombuffer(view, np.uint8)[piece.first : piece.last].copy()
            sent = feedback.compress(torch.from_numpy(raw).view(getattr(torch, self.kind)))
            if self.compression != "none" and not all(bool(torch.isfinite(one).all()) for one in sent):
                raise StoreError(
                    f"key '{self.key}': this value has numbers that are not finite, or too large for compression "
                    f"'{self.compression}'"
                )
            parcels.append(outgoing(sent))
        return parcels


def describe(*buffers: tuple[str, tuple[int, ...]]) -> Parcel:
    """Return a parcel of buffers of these kinds and shapes, without their bytes."""
    specs = tuple(BufferSpec(kind, shape) for kind, shape in buffers)  # type: ignore[arg-type]
    return Parcel(specs, [], msgspec.msgpack.encode(specs), sum(padded(spec.num_bytes) for spec in specs))


def fill(calls: StoreCalls, entry: Entry, view: memoryview) -> None:
    """Bring the first value of a key to its servers, where room has been made."""
    parcels = [_parcel(piece, view) for piece in entry.pieces]
    _run(calls, entry, lambda piece, _: Fill(entry.number, piece.start), parcels=parcels)


def push(calls: StoreCalls, entry: Entry, view: memoryview, sequence: int, target: memoryview | None = None) -> int:
    """Push a whole array; return the version that has it. Into `target`, if given, goes the value that has the push.

    Where it is refused it has not counted, and neither has what compression would have left out of it.
    """

    def ask(piece: Piece, memory: int) -> Message:
        return Push(entry.number, sequence, piece.start, entry.encoding(piece), target is not None, memory)

    left = [feedback.left for feedback in entry.feedback]
    try:
        late, versions = _run(calls, entry, ask, parcels=entry.parcels(view), target=target)
    except StoreError:
        for feedback, before in zip(entry.feedback, left, strict=True):
            feedback.left = before
        raise
    if late:
        _run(calls, entry, lambda at, _: Pull(entry.number, at.start, at.stop), target=target, pieces=late)
    return min(map(max, versions))  # the latest report of a part is of the whole push


def pull(calls: StoreCalls, entry: Entry, target: memoryview, min_version: int, timeout_s: float) -> int:
    """Pull a whole array; return its version."""

    def ask(piece: Piece, memory: int) -> Message:
        return Pull(entry.number, piece.start, piece.stop, min_version, timeout_s, memory)

    late, versions = _run(calls, entry, ask, target=target)
    if late:
        versions += [found for found in _run(calls, entry, ask, target=target, pieces=late)[1] if found]
    return min(map(min, versions))


def _run(
    calls: StoreCalls,
    entry: Entry,
    ask: Callable[[Piece, int], Message],
    *,
    parcels: Sequence[Parcel] = (),
    target: memoryview | None = None,
    pieces: Sequence[Piece] = (),
) -> tuple[list[Piece], list[list[int]]]:
    """Call for each piece, with its parcel, and write what is answered into `target`.

    Where the server is on this host it may say where to read the values instead; for some `pieces` only, all values are
    sent. Returns the pieces without values, which have changed since the answer, or whose push is not whole yet, and
    the versions of each part that were reported.
    """
    if entry.memories is None:
        entry.memories = entry.map_parts(calls)
    late: list[Piece] = []
    versions: list[list[int]] = [[] for _ in entry.cuts]
    tasks = []
    for at, piece in enumerate(pieces or entry.pieces):
        mapped = entry.memories[piece.part] if target is not None and not pieces else None
        view = None if mapped is None else mapped.view
        message = ask(piece, -1 if mapped is None else mapped.number(view))
        room = 0 if target is None or view is not None else piece.empty.extent
        receive = _receiver(entry, piece, target, versions[piece.part], late, mapped, view)
        tasks.append(Task(piece.server, message, parcels[at] if parcels else (), receive, room))
    calls.run(tasks)
    return late, versions


def _parcel(piece: Piece, view: memoryview) -> Parcel:
    empty = piece.empty
    return Parcel(empty.specs, [view[piece.first : piece.last]], empty.described, empty.extent)


def _receiver(
    entry: Entry,
    piece: Piece,
    target: memoryview | None,
    versions: list[int],
    late: list[Piece],
    mapped: MappedValues | None,
    view: ValuesView | None,
) -> Callable[[Message, tuple[Buffer, ...]], None]:
    def receive(message: Message, buffers: tuple[Buffer, ...]) -> None:
        assert isinstance(message, (Done, Value))
        versions.append(message.version)
        if target is None or isinstance(message, Done):
            return
        if view is not None and message.stamp >= 0:
            first = piece.start * ITEM_BYTES[entry.kind]
            if view.read(first, target[piece.first : piece.last], message.stamp):
                return
        if not buffers:
            late.append(piece)
            return
        if mapped is not None:
            mapped.map(message.memory)
        data = buffers[0].data
        if data.nbytes != piece.last - piece.first:
            raise CommunicationError(
                f"a server sent {data.nbytes} bytes where {piece.last - piece.first} were asked for"
            )
        if data.nbytes < _SMALL_BYTES:
            target[piece.first : piece.last] = data
        else:  # NumPy lets other threads run meanwhile
            np.frombuffer(target, np.uint8)[piece.first : piece.last] = np.frombuffer(data, np.uint8)

    return receive


# Some rows of an array, by their numbers.

Rows = np.ndarray[Any, np.dtype[np.int64]]


def push_rows(calls: StoreCalls, entry: Entry, rows: Any, values: Taken, sequence: int) -> int:
    """Push rows to the servers that have them; return the lowest version of the parts that got some."""
    numbers = _row_numbers(entry, rows)
    shape = (len(numbers), *entry.shape[1:])
    if values.kind != entry.kind or values.shape != shape:
        raise StoreError(
            f"{len(numbers)} rows of key '{entry.key}' are {entry.kind} of shape {shape}, not {values.kind} of shape "
            f"{values.shape}"
        )
    row_bytes = _row_bytes(entry)
    source = np.frombuffer(values.view, np.uint8).reshape(len(numbers), row_bytes)
    versions = []
    for cut, first, mask in _by_server(entry, numbers):
        picked = np.ascontiguousarray(source[mask])
        count = len(picked)
        own = describe(("int64", (count,)), (entry.kind, (count, *entry.shape[1:])))
        mine = np.ascontiguousarray(numbers[mask] - first)
        parcel = own._replace(views=[_bytes_of(mine), _bytes_of(picked)])
        reply = calls.call(cut.server, PushRows(entry.number, sequence), parcel)
        assert isinstance(reply, Done)
        versions.append(reply.version)
    return min(versions, default=0)


def pull_rows(calls: StoreCalls, entry: Entry, rows: Any, origin: Origin) -> Pulled:
    """Pull rows from the servers that have them."""
    numbers = _row_numbers(entry, rows)
    row_bytes = _row_bytes(entry)
    target = make_target(entry.kind, (len(numbers), *entry.shape[1:]), origin, None)
    result = np.frombuffer(target.view, np.uint8).reshape(len(numbers), row_bytes)
    versions: list[int] = []
    for cut, first, mask in _by_server(entry, numbers):
        mine = np.ascontiguousarray(numbers[mask] - first)

        def receive(message: Message, buffers: tuple[Buffer, ...], mask: Any = mask) -> None:
            assert isinstance(message, Value)
            versions.append(message.version)
            result[mask] = np.frombuffer(buffers[0].data, np.uint8).reshape(-1, row_bytes)

        parcel = describe(("int64", (len(mine),)))._replace(views=[_bytes_of(mine)])
        calls.call(
            cut.server,
            PullRows(entry.number),
            parcel,
            receive=receive,
            reply_bytes=padded(len(mine) * row_bytes),
        )
    return Pulled(target.finish(), min(versions, default=0))


def _by_server(entry: Entry, numbers: Rows) -> list[tuple[Any, int, Any]]:
    """Return the cuts that have some of the rows, the first row of each, and which of the rows it has."""
    if len(entry.cuts) == 1:
        return [(entry.cuts[0], 0, slice(None))] if len(numbers) else []
    row = entry.num_bytes // ITEM_BYTES[entry.kind] // entry.shape[0]
    found = []
    for cut in entry.cuts:
        first, last = cut.start // row, cut.stop // row
        mask = (numbers >= first) & (numbers < last)
        if mask.any():
            found.append((cut, first, mask))
    return found


def _row_numbers(entry: Entry, rows: Any) -> Rows:
    if not entry.shape:
        raise StoreError(f"key '{entry.key}' is a single number: it has no rows")
    if not is_cut_at_rows(entry.shape, len(entry.cuts)):
        raise StoreError(
            f"key '{entry.key}' of shape {entry.shape} has fewer rows than there are servers, and is cut inside them: "
            "push and pull it whole"
        )
    taken = take(rows)
    if len(taken.shape) != 1 or not taken.kind.startswith(("int", "uint")):
        if taken.shape != (0,):
            raise StoreError(f"rows are a list of whole numbers, not {taken.kind} of shape {taken.shape}")
        return np.empty(0, np.int64)
    given = np.frombuffer(taken.view, taken.kind)
    wrong = given[(given < 0) | (given >= entry.shape[0])]
    if len(wrong):
        raise StoreError(f"key '{entry.key}' has no row {wrong[0]}: it has {entry.shape[0]} rows, from 0")
    return given.astype(np.int64)


def _row_bytes(entry: Entry) -> int:
    return entry.num_bytes // entry.shape[0] if entry.shape[0] else 0


def _bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    return array.data.cast("B") if array.size else memoryview(b"")
