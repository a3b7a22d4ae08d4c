"""States of several members: sent from one to another, without a disk between and without pickle, and compared."""

from __future__ import annotations

import functools
import hashlib
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from cordee.checkpoint.layout import decode_values, encode_values
from cordee.checkpoint.state import State, chunks_of
from cordee.core.errors import CheckpointError, TrainingError
from cordee.core.fault_points import reach
from cordee.core.file_memory import FileMemory, give_back, zeros_strided

_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}

_Move = Callable[[Tensor], Any]  # sends a tensor of bytes, or receives it in place: the same calls on both sides


class _Header(msgspec.Struct, frozen=True, array_like=True):
    tensors: list[tuple[str, str, list[int]]]  # name, type, shape
    values: bytes


def share_state(
    state: State | None, source: int = 0, group: dist.ProcessGroup | None = None, *, in_files: bool = False
) -> State:
    """Give every member of a group, the default one unless given, the state of its member `source`. Collective.

    Only that member needs to have one. The tensors that the others get are their own; large ones lie `in_files`.
    """
    reach("share.begun")
    own = state if dist.get_rank(group) == source else None
    move = functools.partial(dist.broadcast, group=group, group_src=source)
    header = _move_header(own, move)
    reach("share.described")
    tensors = _move_tensors(own, header, move, FileMemory() if in_files else None)
    reach("share.done")
    return State(tensors, decode_values(header.values))


def share_kinds(state: State | None, source: int) -> State:
    """Give every member of the default group the state of the member `source`, but no tensor's values. Collective.

    What the others get has tensors on the meta device.
    """
    own = state if dist.get_rank() == source else None
    header = _move_header(own, functools.partial(dist.broadcast, src=source))
    if own is not None:
        return own
    tensors = {
        name: torch.empty(shape, dtype=_type(name, dtype), device="meta") for name, dtype, shape in header.tensors
    }
    return State(tensors, decode_values(header.values))


def share_value(key: str, state: State, source: int) -> State:
    """Return `state` with the value `key` of the member `source`'s state. Collective; every member has a state."""
    content = encode_values({key: state.values[key]}) if dist.get_rank() == source else None
    content = _move_bytes(content, functools.partial(dist.broadcast, src=source))
    return State(state.tensors, {**state.values, **decode_values(content)})


def share_bytes(content: bytes | None, source: int = 0) -> bytes:
    """Give every member of the default group the bytes of the member `source`, and return them. Collective."""
    return _move_bytes(content if dist.get_rank() == source else None, functools.partial(dist.broadcast, src=source))


def send_state(state: State, target: int, group: dist.ProcessGroup) -> None:
    """Give a state to one member of a group, which calls `receive_state`."""
    move = functools.partial(dist.send, group=group, group_dst=target)
    _move_tensors(state, _move_header(state, move), move)


def receive_state(source: int, group: dist.ProcessGroup) -> State:
    """Return the state that a member of a group sends to this one."""
    move = functools.partial(dist.recv, group=group, group_src=source)
    header = _move_header(None, move)
    return State(_move_tensors(None, header, move), decode_values(header.values))


def _move_header(own: State | None, move: _Move) -> _Header:
    if own is None:
        return msgspec.msgpack.decode(_move_bytes(None, move), type=_Header)
    described = [(name, str(tensor.dtype), list(tensor.shape)) for name, tensor in own.tensors.items()]
    header = _Header(described, encode_values(own.values))
    _move_bytes(msgspec.msgpack.encode(header), move)
    return header


def _move_bytes(content: bytes | None, move: _Move) -> bytes:
    size = torch.tensor([0 if content is None else len(content)])
    move(size)
    if not int(size):
        return b""  # torch.frombuffer refuses it
    buffer = torch.empty(int(size), dtype=torch.uint8)
    if content is not None:
        buffer.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    move(buffer)
    return bytes(buffer.numpy())


def _move_tensors(
    own: State | None, header: _Header, move: _Move, memory: FileMemory | None = None
) -> dict[str, Tensor]:
    """Send or receive tensors; with `memory`, few of their pages are in this process at any time."""
    tensors = {}
    for name, dtype, shape in header.tensors:
        if own is not None:
            tensor = own.tensors[name]
        elif memory is None:
            tensor = torch.empty(shape, dtype=_type(name, dtype))
        else:
            like = torch.empty(shape, dtype=_type(name, dtype), device="meta")
            tensor = zeros_strided(shape, like.stride(), torch.empty(0, dtype=like.dtype), memory)
        if tensor.numel():
            # As bytes: not every dtype can be sent as it is.
            flat = tensor.detach().contiguous().reshape(-1)
            move((flat if own is None else flat.cpu()).view(torch.uint8))
            give_back([tensor])
        tensors[name] = tensor
    return tensors


def _type(name: str, dtype: str) -> torch.dtype:
    if dtype not in _DTYPES:
        raise CheckpointError(f"'{name}' has the unknown type {dtype!r}")
    return _DTYPES[dtype]


# Members that should have the same are compared: by a short digest of each part, at commits and every so often.

PARTS = ("model", "buffers", "optimizer", "progress")
SHARE = 0.004  # of the training time that comparing between commits takes, at most
EXCHANGE_S = 1e-4  # what it takes beside hashing
FIRST_INTERVAL = 8  # in steps: how long a step and a digest take is not known yet
LONGEST_INTERVAL = 4096
# Small tensors are hashed together: hashlib and the views of 200 of them took 1.5 ms one by one, 0.2 ms in one piece.
SMALL_BYTES = 64 << 10


class Digest(NamedTuple):
    """64 bits of the SHA-256 of each part. A part that a member does not have is 0 everywhere."""

    model: int
    buffers: int
    optimizer: int
    progress: int

    def describe(self) -> dict[str, str]:
        """Return it as the event `commit` has it."""
        return {part: f"{value:016x}" for part, value in zip(PARTS, self, strict=True) if value}


def digest_state(state: State, buffers: Collection[str] = (), more: Collection[str] = ()) -> Digest:
    """Return the digest of a state; `buffers` are the names of tensors of the model that are not parameters.

    Tensors of the parts `more` belong to the progress. Equal digests mean equal bits, of tensors and of plain values.
    How long the run took so far is left out, which each member measures on its own.
    """
    model = state.part("model").tensors
    weights = {name: tensor for name, tensor in model.items() if name not in buffers}
    others = {name: tensor for name, tensor in model.items() if name in buffers}
    optimizer = state.part("optimizer")
    progress = {**state.values.get("progress", {})}
    progress.pop("elapsed_s", None)
    progress["metrics"] = {**(progress.get("metrics") or {}), "seconds": None}
    kept = {name: tensor for name, tensor in state.tensors.items() if name.partition(".")[0] in ("stream", *more)}
    return Digest(
        _digest(weights),
        _digest(others),
        _digest(optimizer.tensors, optimizer.values),
        _digest(kept, progress),
    )


def _digest(tensors: Mapping[str, Tensor], values: Mapping[str, Any] | None = None) -> int:
    if not tensors and not values:
        return 0
    # Sorted: an optimizer's state is in the order in which parameters first had a gradient, or in which it was loaded.
    digest = hashlib.sha256(msgspec.json.encode(values or {}, order="sorted"))
    small: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        if tensor.numel() * tensor.element_size() <= SMALL_BYTES:
            small.setdefault((tensor.dtype, tensor.device), []).append(tensor.reshape(-1))
            continue
        for chunk in chunks_of(name, tensor):
            digest.update(chunk)
    for pieces in small.values():
        for chunk in chunks_of("small tensors", torch.cat(pieces)):
            digest.update(chunk)
    return int.from_bytes(digest.digest()[:8], "little") or 1


class Comparison:
    """Says when members are to be compared, and compares them. Every member has one, and all say the same."""

    def __init__(self) -> None:
        self._last_step, self._last_s = -1, 0.0
        self._next_step = 0
        self.seconds = 0.0  # that it took so far

    def begin(self) -> None:
        """Begin with another team, in which nothing was compared yet. Local."""
        self._last_step = -1

    def is_due(self, step: int) -> bool:
        """Whether the members are to be compared after `step`, which is no commit."""
        return step >= self._next_step and step != self._last_step

    def compare(
        self,
        step: int,
        make_digest: Callable[[], Digest],
        gather: Callable[[Sequence[int]], list[list[int]]],
        members: Sequence[int],
    ) -> Digest:
        """Return this member's digest. Raises TrainingError on every member if one differs. Collective."""
        started_s = time.perf_counter()
        digest = make_digest()
        hashed_s = time.perf_counter()
        num_steps = step - self._last_step if self._last_step >= 0 else 0
        step_s = (started_s - self._last_s) / num_steps if num_steps > 0 else 0.0
        signed = [value - (1 << 64) if value >> 63 else value for value in digest]
        rows = gather([*signed, round(1e9 * (hashed_s - started_s)), round(1e9 * step_s)])
        if problem := describe_difference([row[: len(PARTS)] for row in rows], members):
            raise TrainingError(
                f"the members differ at step {step}: {problem}. That step is not saved; --resume continues from the "
                "last checkpoint. Workers of one run need the same torch and the same kind of processor; if they have "
                "that, please report it with the run's events.jsonl and logs"
            )
        self._next_step = step + interval(max(row[-2] for row in rows) / 1e9, max(row[-1] for row in rows) / 1e9)
        self._last_step, self._last_s = step, time.perf_counter()
        self.seconds += self._last_s - started_s
        return digest


def interval(digest_s: float, step_s: float) -> int:
    """Return after how many steps to compare again, so that it takes at most `SHARE` of the time. Pure."""
    if not step_s:
        return FIRST_INTERVAL
    return min(LONGEST_INTERVAL, max(1, math.ceil((digest_s + EXCHANGE_S) / (SHARE * step_s))))


def describe_difference(rows: Sequence[Sequence[int]], members: Sequence[int]) -> str:
    """Return which members have something else than the first, and what; nothing if all have the same. Pure."""
    found = []
    for part, values in zip(PARTS, zip(*rows, strict=True), strict=True):
        others = [str(member) for member, value in zip(members, values, strict=True) if value != values[0]]
        if others:
            who = f"worker{'s' * (len(others) > 1)} {', '.join(others)}"
            verb = "have" if len(others) > 1 else "has"
            what = {"model": "weights", "progress": "place in the data"}.get(part, part)
            found.append(f"{who} {verb} other {what} than worker {members[0]}")
    return "; ".join(found)
