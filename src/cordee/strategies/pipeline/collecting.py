"""Bringing the optimizer states of all parts together on the first worker. Nothing is pickled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from cordee.checkpoint import State

_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class _Header(msgspec.Struct):
    values: dict[str, Any]
    tensors: list[tuple[str, str, list[int]]]  # name, type, shape


def collect_states(own: State | None, group: dist.ProcessGroup | None) -> State:
    """Return the states of all members as one on the group's first member, nothing on the others. Collective.

    A parameter that several members hold is taken from the first of them.
    """
    if group is None:
        return merge_states([own] if own is not None else [])
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank:
        _send(own or State({}, {}), group)
        return State({}, {})
    states = [own or State({}, {}), *(_receive(source, group) for source in range(1, size))]
    return merge_states([state for state in states if state.values])


def merge_states(states: Sequence[State]) -> State:
    """Return one optimizer state of those of several optimizers over different parameters of one model."""
    assert states, "no part has anything to train"
    groups: list[dict[str, Any]] = []
    state: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    seen: set[str] = set()
    for number, one in enumerate(states):
        # Settings that are tensors are called after the number of their group, which is another one now.
        renamed = {name: f"$part{number}.{name}" for name in one.tensors if name.startswith("$") and number}
        for group in one.values["groups"]:
            parameters = {name: shape for name, shape in group["parameters"].items() if name not in seen}
            groups.append({"parameters": parameters, "settings": _renamed(group["settings"], renamed)})
        fresh = {name for group in one.values["groups"] for name in group["parameters"]} - seen
        seen |= fresh
        state.update({name: inner for name, inner in one.values["state"].items() if name in fresh})
        for name, tensor in one.tensors.items():
            tensors.setdefault(renamed.get(name, name), tensor)
    return State(tensors, {**states[0].values, "groups": groups, "state": state})


def _renamed(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"$tensor"}:
            return {"$tensor": names.get(value["$tensor"], value["$tensor"])}
        return {key: _renamed(inner, names) for key, inner in value.items()}
    return [_renamed(inner, names) for inner in value] if isinstance(value, list) else value


def _send(state: State, group: dist.ProcessGroup) -> None:
    tensors = [(name, str(tensor.dtype), list(tensor.shape)) for name, tensor in state.tensors.items()]
    # Not JSON, which has no infinities.
    header = torch.frombuffer(bytearray(msgspec.msgpack.encode(_Header(state.values, tensors))), dtype=torch.uint8)
    dist.send(torch.tensor([len(header)]), group=group, group_dst=0)
    dist.send(header, group=group, group_dst=0)
    for tensor in state.tensors.values():
        dist.send(tensor.detach().cpu().contiguous(), group=group, group_dst=0)


def _receive(source: int, group: dist.ProcessGroup) -> State:
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, group=group, group_src=source)
    raw = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(raw, group=group, group_src=source)
    header = msgspec.msgpack.decode(raw.numpy().tobytes(), type=_Header)
    tensors = {}
    for name, dtype, shape in header.tensors:
        tensors[name] = torch.empty(shape, dtype=_DTYPES[dtype])
        dist.recv(tensors[name], group=group, group_src=source)
    return State(tensors, header.values)
