"""Python values as bytes and back, without pickle: nothing that arrives can run code (docs/decisions/0005).

Values are None, bool, int, float, complex, str, bytes, lists, tuples, sets, dicts, dates and times, torch tensors and
types, NumPy arrays and numbers. Anything else is refused by name.
"""

from __future__ import annotations

import datetime
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import torch

from cordee.core.errors import JobError

_MAX_DEPTH = 100
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def encode(value: Any, what: str) -> bytes:
    """Return the bytes of a value. Raises JobError that says where in it something is that cannot be sent."""
    return msgspec.msgpack.encode(_to_plain(value, what, 0))


def decode(content: bytes) -> Any:
    return _from_plain(msgspec.msgpack.decode(content))


def _to_plain(value: Any, where: str, depth: int) -> Any:
    """Return a value as msgpack knows it: everything but the simplest as [type, content]."""
    if depth > _MAX_DEPTH:
        raise JobError(f"{where}: nested more than {_MAX_DEPTH} deep")
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**64 else ["int", str(value)]
    if kind is bytes or kind is bytearray:
        return ["bytes", bytes(value)]
    if kind is complex:
        return ["complex", [value.real, value.imag]]
    if kind in (list, tuple, set, frozenset, torch.Size):
        inner = [_to_plain(one, f"{where}[{index}]", depth + 1) for index, one in enumerate(value)]
        return [kind.__name__, inner]
    if kind in (dict, OrderedDict) or (isinstance(value, Mapping) and kind.__name__ == "defaultdict"):
        pairs = [
            [_to_plain(key, f"the key {key!r} of {where}", depth + 1), _to_plain(one, f"{where}[{key!r}]", depth + 1)]
            for key, one in value.items()
        ]
        return ["OrderedDict" if kind is OrderedDict else "dict", pairs]
    if isinstance(value, torch.Tensor):
        return ["Tensor", _tensor_to_plain(value, where)]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value)]
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject or value.dtype.fields:
            raise JobError(f"{where} is an array of {value.dtype}: only arrays of numbers and texts can be sent")
        name = "ndarray" if isinstance(value, np.ndarray) else "generic"
        return [name, [value.dtype.str, list(value.shape), np.ascontiguousarray(value).tobytes()]]
    if kind is datetime.datetime or kind is datetime.date:
        return [kind.__name__, value.isoformat()]
    raise JobError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}: objects are sent without pickle, as numbers, texts, "
        "bytes, lists, tuples, sets, dicts, tensors and arrays; send those of its parts that are"
    )


def _tensor_to_plain(tensor: torch.Tensor, where: str) -> list[Any]:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise JobError(f"{where} is a {tensor.layout} tensor: only dense tensors can be sent")
    data = tensor.detach().cpu().contiguous()
    raw = data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b""
    return [str(data.dtype), list(data.shape), raw]


def _from_plain(plain: Any) -> Any:
    if not isinstance(plain, list):
        return plain
    kind, content = plain
    return _KINDS[kind](content)


def _tensor(content: Any) -> torch.Tensor:
    name, shape, raw = content
    dtype = _DTYPES[name]
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).view(shape)


def _array(content: Any) -> Any:
    name, shape, raw = content
    return np.frombuffer(raw, dtype=np.dtype(name)).reshape(shape).copy()


def _pairs(content: Any) -> list[tuple[Any, Any]]:
    return [(_from_plain(key), _from_plain(value)) for key, value in content]


_KINDS: dict[str, Any] = {
    "int": int,
    "bytes": bytes,
    "complex": lambda content: complex(*content),
    "list": lambda content: [_from_plain(one) for one in content],
    "tuple": lambda content: tuple(_from_plain(one) for one in content),
    "Size": lambda content: torch.Size(content),
    "set": lambda content: {_from_plain(one) for one in content},
    "frozenset": lambda content: frozenset(_from_plain(one) for one in content),
    "dict": lambda content: dict(_pairs(content)),
    "OrderedDict": lambda content: OrderedDict(_pairs(content)),
    "Tensor": _tensor,
    "dtype": lambda content: _DTYPES[content],
    "ndarray": _array,
    "generic": lambda content: _array(content)[()],
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
}
