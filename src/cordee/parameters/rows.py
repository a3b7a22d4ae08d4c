"""Some rows of an array, by their numbers: each to the server that has it."""

from __future__ import annotations

from typing import Any

import numpy as np

from cordee.communication.buffers import ITEM_BYTES, Buffer, padded
from cordee.communication.messages import Message
from cordee.core.errors import StoreError
from cordee.parameters.arrays import Origin, Taken, make_target, take
from cordee.parameters.calls import StoreCalls
from cordee.parameters.messages import Done, PullRows, PushRows, Value
from cordee.parameters.placement import is_cut_at_rows
from cordee.parameters.transfer import Entry, Pulled, Versions, describe

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
        parcel = own._replace(views=[_view(mine), _view(picked)])
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
    versions = Versions(1)
    for cut, first, mask in _by_server(entry, numbers):
        mine = np.ascontiguousarray(numbers[mask] - first)

        def receive(message: Message, buffers: tuple[Buffer, ...], mask: Any = mask) -> None:
            assert isinstance(message, Value)
            versions.note(0, message.version)
            result[mask] = np.frombuffer(buffers[0].data, np.uint8).reshape(-1, row_bytes)

        parcel = describe(("int64", (len(mine),)))._replace(views=[_view(mine)])
        calls.call(
            cut.server,
            PullRows(entry.number),
            parcel,
            receive=receive,
            reply_bytes=padded(len(mine) * row_bytes),
        )
    return Pulled(target.finish(), max(versions.of_pull, 0))


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


def _view(array: np.ndarray[Any, Any]) -> memoryview:
    return array.data.cast("B") if array.size else memoryview(b"")
