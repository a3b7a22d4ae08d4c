"""Tensor buffers as they travel: a description in the header, the raw bytes in a frame of their own.

Only CPU arrays of the types in `ITEM_BYTES` travel. Bytes are little-endian and in C order.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from cordee.core.errors import CommunicationError

if TYPE_CHECKING:
    import torch

MAX_DIMENSIONS = 8
ALIGN = 64
_encode = msgspec.msgpack.Encoder().encode

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
        return self.num_bytes or prod(max(size, 1) for size in self.shape) * ITEM_BYTES[self.dtype]


class Buffer:
    """A received buffer: its description and its bytes, still in the memory the transport wrote them to.

    `numpy()` and `torch()` are writable views of that memory, which lives as long as any view of it. Only a
    buffer that came in unaligned is copied: a small one, read together with its neighbours.
    """

    __slots__ = ("_tensor", "data", "spec")

    def __init__(self, spec: BufferSpec, data: memoryview) -> None:
        self.spec = spec
        self.data = data
        self._tensor: torch.Tensor | None = None

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return an array view; there is none for bfloat16, which NumPy does not have."""
        if self.spec.dtype == "bfloat16":
            raise CommunicationError("a buffer of bfloat16 has no NumPy type: use Buffer.torch()")
        return self._array(np.dtype(self.spec.dtype)).reshape(self.spec.shape)

    def torch(self) -> torch.Tensor:
        """Return a tensor view, always the same. Imports torch, so that processes without tensors need not."""
        if self._tensor is not None:
            return self._tensor
        import torch

        # Through NumPy rather than torch.frombuffer, which refuses empty buffers and ignores alignment.
        kind, shape = self.spec.dtype, self.spec.shape
        is_carried = kind == "bfloat16"
        tensor = torch.from_numpy(self._array(_INT16 if is_carried else _ARRAY_TYPES[kind]))
        if is_carried:
            tensor = tensor.view(torch.bfloat16)
        self._tensor = tensor if len(shape) == 1 else tensor.reshape(shape)
        return self._tensor

    def _array(self, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        flat: np.ndarray[Any, Any] = np.frombuffer(self.data, dtype=dtype) if self.data.nbytes else np.empty(0, dtype)
        return flat if flat.flags.aligned and flat.flags.writeable else flat.copy()


class Parcel(NamedTuple):
    """Buffers ready to travel. Made once, it may be sent often, each time with the bytes that its views then have."""

    specs: tuple[BufferSpec, ...]
    views: list[memoryview]
    described: bytes  # MessagePack of the specs
    extent: int  # bytes they take in memory, each at a multiple of `ALIGN`


def outgoing(arrays: Sequence[Any]) -> Parcel:
    """Describe NumPy arrays or CPU tensors and return their bytes, without a copy where they are contiguous."""
    if type(arrays) is Parcel:
        return arrays
    specs, views, extent = [], [], 0
    for position, array in enumerate(arrays):
        kind, shape, plain = _plain_tensor(array) if _is_tensor(array) else _plain_array(array)
        if plain is None or len(shape) > MAX_DIMENSIONS:
            raise WireError(
                f"buffer {position} is {kind} of shape {shape}: only {', '.join(ITEM_BYTES)} "
                f"of at most {MAX_DIMENSIONS} dimensions can be sent"
            )
        specs.append(BufferSpec(kind, shape))  # type: ignore[arg-type]  # a key of the table, as just checked
        views.append(plain.data.cast("B") if plain.size else memoryview(b""))
        extent += padded(plain.nbytes)
    return Parcel(tuple(specs), views, _encode(specs), extent)


def padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN) * ALIGN


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


_Plain: TypeAlias = "tuple[str, tuple[int, ...], np.ndarray[Any, Any] | None]"

_ARRAY_TYPES = {kind: np.dtype(kind) for kind in ITEM_BYTES if kind != "bfloat16"}
_INT16 = _ARRAY_TYPES["int16"]

# By type object: asking NumPy for the name of a type takes longer than all the rest of `outgoing`.
ARRAY_KINDS = {np.dtype(kind).newbyteorder("<"): kind for kind in ITEM_BYTES if kind != "bfloat16"}


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # whoever has a tensor has imported it
    return torch is not None and isinstance(value, torch.Tensor)


def _plain_tensor(tensor: torch.Tensor) -> _Plain:
    import torch

    shape = tuple(tensor.shape)
    kind = _tensor_kinds().get(tensor.dtype)
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        raise WireError(f"a tensor on {tensor.device} of layout {tensor.layout} cannot be sent: copy it to the CPU")
    if kind is None:
        return str(tensor.dtype).removeprefix("torch."), shape, None
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if kind == "bfloat16":
        tensor = tensor.view(torch.int16)
    return kind, shape, tensor.numpy()


@functools.cache
def _tensor_kinds() -> dict[torch.dtype, str]:
    import torch

    return {getattr(torch, kind): kind for kind in ITEM_BYTES}


def _plain_array(value: Any) -> _Plain:
    array = value if type(value) is np.ndarray else np.asarray(value)
    kind = ARRAY_KINDS.get(array.dtype)
    if kind is None:  # another byte order, or none of the table
        kind = array.dtype.name
        if kind not in ARRAY_KINDS.values():
            return kind, array.shape, None
        array = array.astype(array.dtype.newbyteorder("<"))
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    return kind, array.shape, array
