"""Tensor buffers as they travel: a description in the header, the raw bytes in a frame of their own.

Only CPU arrays of the types in `ITEM_BYTES` travel. Bytes are little-endian and in C order.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from cordee.core.errors import CommunicationError

if TYPE_CHECKING:
    import torch

MAX_DIMENSIONS = 8

Kind: TypeAlias = Literal[
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64",
]  # fmt: skip

ITEM_BYTES: dict[str, int] = {
    "bool": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}


class WireError(CommunicationError):
    """Bytes that are not a message of this protocol, or a message that may not be sent.

    The only thing decoders and encoders of this package raise, whatever the bytes are.
    """


class BufferSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one frame of raw bytes holds."""

    dtype: Kind
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=2**48)], ...], Meta(max_length=MAX_DIMENSIONS)]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def extent_bytes(self) -> int:
        """Like `num_bytes`, with empty dimensions counted as one: what strides are computed from."""
        return prod(max(size, 1) for size in self.shape) * ITEM_BYTES[self.dtype]


class Buffer:
    """A received buffer: its description and its bytes, still in the memory the transport wrote them to.

    `numpy()` and `torch()` are writable views of that memory, which lives as long as any view of it. Only a
    buffer that came in unaligned is copied: a small one, read together with its neighbours.
    """

    __slots__ = ("data", "spec")

    def __init__(self, spec: BufferSpec, data: memoryview) -> None:
        self.spec = spec
        self.data = data

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return an array view; there is none for bfloat16, which NumPy does not have."""
        if self.spec.dtype == "bfloat16":
            raise CommunicationError("a buffer of bfloat16 has no NumPy type: use Buffer.torch()")
        return self._array(np.dtype(self.spec.dtype)).reshape(self.spec.shape)

    def torch(self) -> torch.Tensor:
        """Return a tensor view. Imports torch, so that processes without tensors need not."""
        import torch

        # Through NumPy rather than torch.frombuffer, which refuses empty buffers and ignores alignment.
        carrier = np.dtype("int16" if self.spec.dtype == "bfloat16" else self.spec.dtype)
        tensor = torch.from_numpy(self._array(carrier))
        return tensor.view(getattr(torch, self.spec.dtype)).reshape(self.spec.shape)

    def _array(self, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        flat: np.ndarray[Any, Any] = np.frombuffer(self.data, dtype=dtype) if self.data.nbytes else np.empty(0, dtype)
        return flat if flat.flags.aligned and flat.flags.writeable else flat.copy()


def outgoing(arrays: Sequence[Any]) -> tuple[tuple[BufferSpec, ...], list[memoryview]]:
    """Describe NumPy arrays or CPU tensors and return their bytes, without a copy where they are contiguous."""
    specs, views = [], []
    for position, array in enumerate(arrays):
        kind, shape, flat = _tensor_bytes(array) if _is_tensor(array) else _array_bytes(array)
        if kind not in ITEM_BYTES or len(shape) > MAX_DIMENSIONS:
            raise WireError(
                f"buffer {position} is {kind} of shape {shape}: only {', '.join(ITEM_BYTES)} "
                f"of at most {MAX_DIMENSIONS} dimensions can be sent"
            )
        assert flat is not None
        specs.append(BufferSpec(kind, shape))  # type: ignore[arg-type]  # a key of the table, as just checked
        views.append(flat.data)
    return tuple(specs), views


def incoming(position: int, spec: BufferSpec, data: memoryview) -> Buffer:
    """Check a frame against its description.

    The description was checked against the limits before the frame was looked at.
    """
    if data.nbytes != spec.num_bytes:
        raise WireError(
            f"buffer {position} is described as {spec.dtype} of shape {spec.shape}, which takes {spec.num_bytes} "
            f"bytes, but has {data.nbytes}"
        )
    # Any other byte in a bool is undefined behaviour in torch's kernels.
    if spec.dtype == "bool" and data.nbytes and int(np.frombuffer(data, dtype=np.uint8).max()) > 1:
        raise WireError(f"buffer {position} is described as bool but holds bytes other than 0 and 1")
    return Buffer(spec, data)


_Flat: TypeAlias = "tuple[str, tuple[int, ...], np.ndarray[Any, Any] | None]"


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # whoever has a tensor has imported it
    return torch is not None and isinstance(value, torch.Tensor)


def _tensor_bytes(tensor: torch.Tensor) -> _Flat:
    import torch

    kind = str(tensor.dtype).removeprefix("torch.")
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise WireError(f"a tensor on {tensor.device} of layout {tensor.layout} cannot be sent: copy it to the CPU")
    if kind not in ITEM_BYTES:
        return kind, tuple(tensor.shape), None
    flat = tensor.detach().resolve_neg().contiguous().reshape(-1)
    return kind, tuple(tensor.shape), flat.view(torch.uint8).numpy()


def _array_bytes(value: Any) -> _Flat:
    array = np.asarray(value)
    if array.dtype.name not in ITEM_BYTES:
        return array.dtype.name, array.shape, None
    native = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return array.dtype.name, array.shape, native.reshape(-1).view(np.uint8)
