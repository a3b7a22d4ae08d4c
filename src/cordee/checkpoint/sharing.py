"""A state from one member of a group to the others, without a disk between and without pickle."""

from __future__ import annotations

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from cordee.checkpoint.layout import decode_values, encode_values
from cordee.checkpoint.state import State
from cordee.core.errors import CheckpointError
from cordee.core.fault_points import reach

_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class _Spec(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    shape: list[int]


def share_state(state: State | None, source: int = 0) -> State:
    """Give every member of the default group the state of the member `source`, and return it. Collective.

    Only that member needs to have one. The tensors that the others get are their own.
    """
    reach("share.begun")
    is_source = dist.get_rank() == source
    specs: list[_Spec] = []
    if is_source:
        assert state is not None
        specs = [_Spec(n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in state.tensors.items()]
        header, values = (
            _share_bytes(msgspec.json.encode(specs), source),
            _share_bytes(encode_values(state.values), source),
        )
    else:
        header, values = _share_bytes(None, source), _share_bytes(None, source)
        specs = msgspec.json.decode(header, type=list[_Spec])
    reach("share.described")
    tensors = {}
    for spec in specs:
        tensor = state.tensors[spec.name] if is_source and state is not None else _empty(spec)
        if tensor.numel():
            _share_tensor(tensor, source)
        tensors[spec.name] = tensor
    reach("share.done")
    return State(tensors, decode_values(values))


def share_value(key: str, state: State, source: int) -> State:
    """Return `state` with the value `key` of the member `source`'s state. Collective; every member has a state."""
    content = encode_values({key: state.values[key]}) if dist.get_rank() == source else None
    return State(state.tensors, {**state.values, **decode_values(_share_bytes(content, source))})


def _share_bytes(content: bytes | None, source: int) -> bytes:
    size = torch.tensor([0 if content is None else len(content)])
    dist.broadcast(size, src=source)
    buffer = torch.empty(int(size), dtype=torch.uint8)
    if content is not None:
        buffer.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    dist.broadcast(buffer, src=source)
    return bytes(buffer.numpy())


def _share_tensor(tensor: Tensor, source: int) -> None:
    # As bytes: not every dtype can be sent as it is.
    flat = tensor.detach().contiguous().reshape(-1)
    sent = flat.cpu() if dist.get_rank() == source else flat
    dist.broadcast(sent.view(torch.uint8), src=source)


def _empty(spec: _Spec) -> Tensor:
    if spec.dtype not in _DTYPES:
        raise CheckpointError(f"'{spec.name}' has the unknown type {spec.dtype!r}")
    return torch.empty(spec.shape, dtype=_DTYPES[spec.dtype])
