"""What torch runs as a stage: its blocks one after the other, in the job's precision, maybe computed twice."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cordee.checkpoint import State
from cordee.compute import Computation
from cordee.models.cutting import Block
from cordee.models.effects import own_attributes


class StageModule(nn.Module):
    """The blocks of a stage. Their modules are those of the whole model: modes and weights are the same objects."""

    def __init__(self, blocks: Sequence[Block], computation: Computation, *, recompute: bool) -> None:
        super().__init__()
        self._blocks = blocks
        self._computation = computation
        self._recompute = recompute
        self.members = nn.ModuleList([module for block in blocks for module in block.modules])

    def forward(self, inputs: Tensor) -> Tensor:
        if not self._recompute:
            return self._run(inputs)
        start = _Moment(self)
        outputs: Tensor = checkpoint(
            self._run,
            inputs,
            use_reentrant=False,
            context_fn=lambda: (contextlib.nullcontext(), self._again_from(start)),
        )
        return outputs

    def _run(self, inputs: Tensor) -> Tensor:
        with self._computation.autocast():
            for block in self._blocks:
                inputs = block(inputs)
        return inputs.contiguous()  # as its neighbour expects to receive it

    @contextlib.contextmanager
    def _again_from(self, start: _Moment) -> Iterator[None]:
        """Inside, the stage computes a micro-batch for the second time: as it was then, and counting nothing."""
        now = _Moment(self)
        start.stand_in()
        try:
            yield
        finally:
            now.put_back()


class _Moment:
    """What the modules of a stage hold beside parameters, and the random numbers torch does not keep itself."""

    def __init__(self, stage: nn.Module) -> None:
        modules = list(stage.modules())
        self._buffers = [(module, dict(module._buffers)) for module in modules if module._buffers]
        tensors = {id(t): t for _, buffers in self._buffers for t in buffers.values() if t is not None}
        self._values = {key: tensor.clone() for key, tensor in tensors.items()}
        self._attributes = [(module, own_attributes(module)) for module in modules]
        self._random = random.getstate(), np.random.get_state()

    def stand_in(self) -> None:
        """Let the modules compute with copies of what they held; these may be changed."""
        for module, buffers in self._buffers:
            for name, tensor in buffers.items():
                module._buffers[name] = None if tensor is None else self._values[id(tensor)]
        self._put_rest()

    def put_back(self) -> None:
        """Give the modules their own tensors again."""
        for module, buffers in self._buffers:
            module._buffers.update(buffers)
        self._put_rest()

    def _put_rest(self) -> None:
        for module, attributes in self._attributes:
            vars(module).update(attributes)
        random.setstate(self._random[0])
        np.random.set_state(self._random[1])


# Bringing the optimizer states of all parts together on the first worker. Nothing is pickled.

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
