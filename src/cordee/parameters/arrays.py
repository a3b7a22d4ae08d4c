"""Arrays of any framework as bytes, and results in the kind that came in: NumPy, torch, or what has DLPack."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cordee.communication.wire import ARRAY_KINDS, MAX_DIMENSIONS, WireError, outgoing
from cordee.core.errors import StoreError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Origin:
    """The kind of array that a caller uses, for results."""

    name: str
    finish: Callable[[Any], Any]  # from a NumPy array (bfloat16: a tensor) to the caller's kind


class Taken(NamedTuple):
    """An array of the caller: its bytes, and what they mean."""

    view: memoryview
    kind: str
    shape: tuple[int, ...]
    origin: Origin


class Target(NamedTuple):
    """Where a result is written, byte by byte, and what is returned when it is complete."""

    view: memoryview
    finish: Callable[[], Any]


def _same(array: Any) -> Any:
    return array


def _to_torch(array: Any) -> Any:
    import torch

    return torch.from_numpy(array) if isinstance(array, np.ndarray) else array


NUMPY = Origin("numpy", _same)
TORCH = Origin("torch", _to_torch)


def take(value: Any) -> Taken:
    """Describe the caller's array. Raises StoreError for what is none, or of a type that cannot travel."""
    if type(value) is np.ndarray and value.flags.c_contiguous and value.size and 0 < value.ndim <= MAX_DIMENSIONS:
        kind = ARRAY_KINDS.get(value.dtype)
        if kind is not None:  # nothing has to be described: at 1 KB that is a tenth of a push
            return Taken(value.data.cast("B"), kind, value.shape, NUMPY)
    plain, origin = (value, NUMPY) if type(value) is np.ndarray else _plain(value)
    try:
        specs, views, _, _ = outgoing((plain,))
    except WireError as error:
        raise StoreError(f"this array cannot be stored: {str(error).removeprefix('buffer 0 is ')}") from error
    spec = specs[0]
    return Taken(views[0], spec.dtype, spec.shape, origin)


def make_target(kind: str, shape: tuple[int, ...], origin: Origin, out: Any) -> Target:
    """Return where a result of this kind and shape goes: `out`, which must fit, or a new array."""
    if out is None:
        return _new_target(kind, shape, origin)
    if not isinstance(out, np.ndarray):
        if _is_tensor(out):
            return _tensor_target(kind, shape, out)
        raise StoreError(f"out is a {type(out).__name__}: it must be a NumPy array or a torch tensor, or left away")
    own_kind = ARRAY_KINDS.get(out.dtype)  # None: another byte order, or a type that cannot be stored
    if (own_kind or out.dtype.name) != kind or out.shape != shape:
        raise StoreError(f"out is {out.dtype.name} of shape {out.shape}, and the key is {kind} of shape {shape}")
    if not out.flags.writeable:
        raise StoreError("out cannot be written to: give an array that can, or leave it away")
    if out.flags.c_contiguous and own_kind is not None:
        return Target(_bytes_of(out), lambda: out)
    whole = np.empty(shape, kind)

    def copy() -> Any:
        out[...] = whole
        return out

    return Target(_bytes_of(whole), copy)


def _new_target(kind: str, shape: tuple[int, ...], origin: Origin) -> Target:
    if kind != "bfloat16":
        array = np.empty(shape, kind)
        return Target(_bytes_of(array), lambda: origin.finish(array))
    import torch

    tensor = torch.empty(shape, dtype=torch.bfloat16)
    return Target(_bytes_of(tensor.view(torch.int16).numpy()), lambda: origin.finish(tensor))


def _tensor_target(kind: str, shape: tuple[int, ...], out: torch.Tensor) -> Target:
    import torch

    if out.dtype != getattr(torch, kind) or tuple(out.shape) != shape:
        raise StoreError(f"out is {out.dtype} of shape {tuple(out.shape)}, and the key is {kind} of shape {shape}")
    if out.is_cpu and out.is_contiguous() and out.layout is torch.strided and not out.is_neg():
        plain = out.detach()
        return Target(_bytes_of((plain.view(torch.int16) if kind == "bfloat16" else plain).numpy()), lambda: out)
    whole = torch.empty(shape, dtype=out.dtype)

    def copy() -> Any:
        with torch.no_grad():
            out.copy_(whole)
        return out

    return Target(_bytes_of((whole.view(torch.int16) if kind == "bfloat16" else whole).numpy()), copy)


def _plain(value: Any) -> tuple[Any, Origin]:
    """Return the array as NumPy or as a CPU tensor, and how results become what it was."""
    if _is_tensor(value):
        if value.is_cpu:
            return value, TORCH
        device = value.device
        return value.detach().cpu(), Origin("torch", lambda array: _to_torch(array).to(device))
    if isinstance(value, (np.ndarray, np.generic, int, float, list, tuple)):
        return np.asarray(value), NUMPY
    if hasattr(value, "__dlpack__"):
        return _from_dlpack(value), _foreign(value)
    raise StoreError(
        f"a {type(value).__name__} is no array: give a NumPy array, a torch tensor, or anything with __dlpack__"
    )


def _from_dlpack(value: Any) -> Any:
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError):  # bfloat16, or memory that is not the CPU's
        import torch.utils.dlpack

        try:
            return torch.utils.dlpack.from_dlpack(value).cpu()
        except Exception as error:
            raise StoreError(f"a {type(value).__name__} could not be read through DLPack: {error}") from error


def _foreign(value: Any) -> Origin:
    package = type(value).__module__.partition(".")[0]
    if package == "tensorflow":
        tensorflow = sys.modules["tensorflow"]
        return Origin(package, tensorflow.convert_to_tensor)
    if hasattr(value, "__array_namespace__"):
        return Origin(package, value.__array_namespace__().from_dlpack)
    return NUMPY  # it can be read and says nothing of how to make one


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # whoever has a tensor has imported it
    return torch is not None and isinstance(value, torch.Tensor)


def _bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    return array.data.cast("B") if array.size else memoryview(bytearray())
