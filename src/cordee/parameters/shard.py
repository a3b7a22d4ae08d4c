"""The arrays of one server: their values, versions, and which pushes are in them. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from cordee.checkpoint import State
from cordee.communication.compression import make_codec
from cordee.communication.messages import Json
from cordee.core.errors import CommunicationError, StoreError
from cordee.parameters.messages import Encoding
from cordee.parameters.push_log import PushLog
from cordee.parameters.shared_values import SMALLEST_BYTES, SharedValues, StoredValues
from cordee.parameters.updaters import Add, UpdateFunction, Updater, make_updater


@dataclass
class Journal:
    """How far one client's pushes to a part have come."""

    incarnation: int
    log: PushLog = field(default_factory=PushLog)  # its watermark is the number of the newest push
    num_elements: int = 0  # that came of the newest push
    staged: Tensor | None = None  # those, until the push is whole


Choice = tuple[str, dict[str, Json]]  # an updater's name and settings


class Part(StoredValues):
    """The part of one array that this server has."""

    def __init__(self, key: str, values: Tensor, is_cut: bool, memory: SharedValues | None = None) -> None:
        super().__init__(values, memory)
        self.key = key
        self.is_cut = is_cut
        self.updater: Updater | None = None  # its own; None: that of the store
        self.chosen: Choice | None = None
        self.state: dict[str, Any] = {}  # the updater's
        self.journals: dict[str, Journal] = {}

    def check_range(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.length:
            raise StoreError(f"elements {start} to {stop} of key '{self.key}', of which this server has {self.length}")


class Shard:
    """All parts on one server, and the updater of the store."""

    def __init__(self, functions: Mapping[str, UpdateFunction] | None = None) -> None:
        self.parts: dict[int, Part] = {}
        self._functions = dict(functions or {})
        self._updater: Updater = Add()
        self.chosen: Choice = ("add", {})
        self._spare: dict[tuple[torch.dtype, int], Tensor] = {}

    def set_updater(self, name: str, settings: Mapping[str, Json], numbers: Sequence[int] = ()) -> None:
        """Use another updater from now on, for these parts or for all that have none of their own.

        One that is in use already continues with its state.
        """
        chosen: Choice = (name, dict(settings))
        if numbers:
            parts = [part for part in map(self.part, numbers) if part.chosen != chosen]
        elif chosen == self.chosen:
            return
        else:
            parts = [part for part in self.parts.values() if part.updater is None]
        updater = make_updater(name, settings, self._functions)
        for part in parts:
            updater.check(part)
        for part in parts:
            part.state = {}
            if numbers:
                part.updater, part.chosen = updater, chosen
        if not numbers:
            self._updater, self.chosen = updater, chosen

    def create(self, number: int, key: str, kind: str, shape: Sequence[int], is_cut: bool) -> None:
        """Make room for a part; again for one that is there does nothing."""
        if number in self.parts:
            return
        part = _make_part(key, kind, shape, is_cut)
        self._updater.check(part)
        self.parts[number] = part

    def part(self, number: int) -> Part:
        part = self.parts.get(number)
        if part is None:
            raise StoreError("this server does not have the key: it was started again since, and its values are lost")
        return part

    def fill(self, number: int, start: int, values: Tensor) -> None:
        part = self.part(number)
        _check_piece(part, start, values)
        with part.changing(start, start + values.numel()):
            part.flat[start : start + values.numel()].copy_(values)

    def decode(self, number: int, start: int, encoding: Encoding, received: Sequence[Tensor]) -> Tensor:
        """Return the elements of a compressed piece of a push. Raises StoreError where they cannot be taken."""
        part = self.part(number)
        part.check_range(start, start + encoding.length)
        if not (part.updater or self._updater).adds_up:
            raise StoreError(
                f"updater 'assign' keeps the last push to key '{part.key}', so that what compression leaves out of it "
                f"is lost: set_compression('none', keys='{part.key}')"
            )
        return make_codec(encoding.compression, 1.0, encoding.length, part.flat.dtype).decode(received)

    def push(self, number: int, client: str, incarnation: int, sequence: int, start: int, pushed: Tensor) -> Part:
        """Take in a piece of a push; it counts once however often it comes. Return the part."""
        part = self.part(number)
        _check_piece(part, start, pushed)
        journal = self._open(part, client, incarnation, sequence)
        if journal is None or journal.log.has(sequence, start):
            return part
        count = pushed.numel()
        updater = part.updater or self._updater
        if updater.is_immediate:
            with part.changing(start, start + count):
                updater.apply(part, start, pushed)
        elif count == part.length:
            with part.changing(0, count):
                updater.apply(part, 0, pushed.view(part.values.shape))
        else:
            self._stage(part, journal, start, pushed)
        journal.log.add(sequence, start)
        journal.num_elements += count
        if journal.num_elements >= part.length:
            part.version += 1
        return part

    def is_whole(self, part: Part, client: str) -> bool:
        """Whether the newest push of a client has been applied entirely, or may be looked at as far as it has come."""
        journal = part.journals.get(client)
        return (part.updater or self._updater).is_immediate or journal is None or journal.num_elements >= part.length

    def push_rows(
        self, number: int, client: str, incarnation: int, sequence: int, rows: Tensor, pushed: Tensor
    ) -> Part:
        part = self.part(number)
        _check_rows(part, rows, pushed)
        journal = self._open(part, client, incarnation, sequence)
        if journal is None or journal.log.has(sequence):
            return part
        with part.changing(0, part.length):
            (part.updater or self._updater).apply_rows(part, rows, pushed)
        journal.log.add(sequence)
        journal.num_elements = part.length
        part.version += 1
        return part

    def pull_rows(self, number: int, rows: Tensor) -> tuple[Part, Tensor]:
        part = self.part(number)
        _check_rows(part, rows, None)
        return part, part.values.index_select(0, rows)

    def forget(self, client: str) -> None:
        """Drop what is kept of a client that left."""
        for part in self.parts.values():
            part.journals.pop(client, None)

    def dump_part(self, number: int) -> State:
        """Return all there is of a part. Tensors share the part's memory."""
        part = self.part(number)
        tensors = {"values": part.flat}
        journals = []
        for client, journal in part.journals.items():
            if journal.staged is not None:
                tensors[f"staged.{client}"] = journal.staged
            journals.append((client, journal.incarnation, journal.log.dump(), journal.num_elements))
        kept = (part.updater or self._updater).dump(part)
        values = {
            "key": part.key,
            "kind": str(part.flat.dtype).removeprefix("torch."),
            "shape": list(part.values.shape),
            "is_cut": part.is_cut,
            "version": part.version,
            "chosen": part.chosen,
            "journals": journals,
        }
        return State.join(part=State(tensors, values), updater=kept)

    def restore_part(self, number: int, state: State) -> None:
        """Have the part that `dump_part` saw."""
        tensors, plain = state.part("part")
        part = self.parts[number] = _make_part(plain["key"], plain["kind"], plain["shape"], plain["is_cut"])
        with part.changing(0, part.length):
            part.flat.copy_(tensors["values"])
        part.version = plain["version"]
        if plain["chosen"] is not None:
            name, settings = plain["chosen"]
            self.set_updater(name, settings, [number])
        for client, incarnation, log, num_elements in plain["journals"]:
            staged = tensors.get(f"staged.{client}")
            part.journals[client] = Journal(
                incarnation, PushLog.restored(log), num_elements, None if staged is None else staged.clone()
            )
        (part.updater or self._updater).restore(part, state.part("updater"))

    def _open(self, part: Part, client: str, incarnation: int, sequence: int) -> Journal | None:
        """Return the journal of a push that is new or under way; None for one that is past."""
        journal = part.journals.get(client)
        if journal is None or journal.incarnation < incarnation:
            journal = part.journals[client] = Journal(incarnation)
        if journal.incarnation > incarnation or sequence < journal.log.below:
            return None
        if sequence > journal.log.below:
            journal.log.forget_below(sequence)
            journal.num_elements = 0
        return journal

    def _stage(self, part: Part, journal: Journal, start: int, pushed: Tensor) -> None:
        if journal.staged is None:
            journal.staged = self._spare.pop((part.flat.dtype, part.length), None)
            if journal.staged is None:
                journal.staged = torch.empty_like(part.flat)
        journal.staged[start : start + pushed.numel()].copy_(pushed)
        if journal.num_elements + pushed.numel() >= part.length:
            staged, journal.staged = journal.staged, None
            with part.changing(0, part.length):
                (part.updater or self._updater).apply(part, 0, staged.view(part.values.shape))
            self._spare[part.flat.dtype, part.length] = staged


def _make_part(key: str, kind: str, shape: Sequence[int], is_cut: bool) -> Part:
    dtype: torch.dtype = getattr(torch, kind)
    num_bytes = prod(shape) * dtype.itemsize
    memory = None
    try:
        if num_bytes >= SMALLEST_BYTES:
            memory = SharedValues(num_bytes, f"key '{key}'")
        values = torch.zeros(tuple(shape), dtype=dtype) if memory is None else memory.tensor(tuple(shape), dtype)
    except (RuntimeError, CommunicationError) as error:
        raise StoreError(f"no memory for key '{key}' on this server: it needs {num_bytes} bytes") from error
    return Part(key, values, is_cut, memory)


def _check_piece(part: Part, start: int, values: Tensor) -> None:
    if values.dtype != part.flat.dtype or values.dim() != 1 or start + values.numel() > part.length:
        raise StoreError(
            f"{tuple(values.shape)} of {values.dtype} from {start} on does not fit key '{part.key}', of which this "
            f"server has {part.length} of {part.flat.dtype}"
        )


def _check_rows(part: Part, rows: Tensor, pushed: Tensor | None) -> None:
    if rows.dtype != torch.int64 or rows.dim() != 1:
        raise StoreError(f"rows of key '{part.key}' are a list of int64, not {rows.dtype} of {rows.dim()} dimensions")
    if part.values.dim() == 0:
        raise StoreError(f"key '{part.key}' is a single number: it has no rows")
    if rows.numel() and not (int(rows.min()) >= 0 and int(rows.max()) < part.values.shape[0]):
        raise StoreError(f"key '{part.key}' has rows 0 to {part.values.shape[0] - 1} on this server")
    if pushed is not None and (
        pushed.dtype != part.values.dtype or pushed.shape != (rows.numel(), *part.values.shape[1:])
    ):
        raise StoreError(
            f"{rows.numel()} rows of key '{part.key}' are {part.values.dtype} of shape "
            f"{(rows.numel(), *part.values.shape[1:])}, not {pushed.dtype} of shape {tuple(pushed.shape)}"
        )
