"""The wire format: how a message becomes frames, and how frames become a message or a `WireError`.

    frame 0        the header: MessagePack of an `Envelope`, whose last element is the message
    frame 1 … n    raw bytes of the n buffers the envelope describes

Decoding goes outside in, so that as little as possible of a bad message is looked at: sizes, protocol
version, envelope — here a `ReplayFilter` may turn it away — then the message and the buffers. Everything variable in
length has a limit that is checked before it is read.

Buffers are CPU arrays of the types in `ITEM_BYTES`; their bytes are little-endian and in C order.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from functools import reduce
from math import prod
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, TypeAlias, get_args

import msgspec
import numpy as np
from msgspec import Meta

from cordee.communication.messages import Count, Message, Name, Refused
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

# By type: NumPy has no bfloat16.
ITEM_BYTES = {kind: 2 if kind == "bfloat16" else np.dtype(kind).itemsize for kind in get_args(Kind)}


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


# Messages: their envelope, and the codec of a channel.

PROTOCOL_VERSION: Final = 1


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The largest message a channel takes. The defaults are for headers without buffers."""

    max_header_bytes: int = 1 << 20
    max_buffers: int = 0  # buffers of one message
    max_buffer_bytes: int = 0  # of one buffer
    max_queued: int = 1000  # messages that may wait for one peer, in each direction

    @property
    def max_frame_bytes(self) -> int:
        """What the transport may read into memory as one frame, before or after it knows the sender."""
        return max(self.max_header_bytes, self.max_buffer_bytes)


class Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Who says something, when, and what follows. `payload` is the message, not decoded yet."""

    version: Literal[1]  # PROTOCOL_VERSION; the second byte of every header
    run: Name
    sender: Name
    incarnation: Count  # grows whenever the sender starts again
    generation: Count  # of the team the message belongs to; 0: of none
    sequence: Count  # grows with each message of this sender and incarnation
    reply_to: Count  # sequence of the message this one answers; 0: of none
    buffers: tuple[BufferSpec, ...]
    payload: msgspec.Raw


class Codec:
    """Encodes and decodes a fixed set of message types within limits. Has no state; any thread may use it.

    Decoders raise `WireError` and nothing else, whatever the bytes are. `Refused` belongs to every set.
    """

    def __init__(self, messages: Sequence[type[Message]], limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        known: list[type[Message]] = list(dict.fromkeys([*messages, Refused]))
        self._messages: frozenset[type[Message]] = frozenset(known)
        self._encoder = msgspec.msgpack.Encoder()
        self._message_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(reduce(or_, known))
        self._envelope_decoder = msgspec.msgpack.Decoder(Envelope)

    def encode_message(self, message: Message) -> msgspec.Raw:
        """Return the payload of an envelope, checked by the rules the receiver will apply."""
        return msgspec.Raw(self.encode_payload(message))

    def encode_payload(self, message: Message) -> bytes:
        """Return a message that goes without an envelope, checked by the rules the receiver will apply."""
        if type(message) not in self._messages:
            raise WireError(f"{type(message).__name__} does not belong to the messages of this channel")
        try:
            payload = self._encoder.encode(message)
            self._message_decoder.decode(payload)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise WireError(f"{type(message).__name__} cannot be sent: {error}") from error
        return payload

    def encode_header(self, envelope: Envelope) -> bytes:
        """Return frame 0. Its size and buffers are held against the limits, so that the error is the sender's."""
        self._check_buffers(envelope)
        header = self._encoder.encode(envelope)
        self._check_header(len(header))
        return header

    def decode_header(self, header: memoryview | bytes) -> Envelope:
        """Read and check frame 0 but for the message in it."""
        self._check_header(len(header))
        if len(header) > 1 and header[1] != PROTOCOL_VERSION:
            raise WireError(f"a header of protocol version {header[1]}: this side speaks version {PROTOCOL_VERSION}")
        try:
            envelope = self._envelope_decoder.decode(header)
        # Bad UTF-8 is a plain ValueError; nesting beyond the interpreter's limit a RecursionError.
        except (ValueError, RecursionError) as error:
            raise WireError(f"a header that is none: {error}") from error
        self._check_buffers(envelope)
        return envelope

    def decode_message(self, envelope: Envelope) -> Message:
        """Read and check the message in an envelope."""
        return self.decode_payload(envelope.payload, envelope.sender)

    def decode_payload(self, payload: msgspec.Raw | bytes, sender: str) -> Message:
        """Read and check a message that comes without an envelope."""
        try:
            return self._message_decoder.decode(payload)
        except (ValueError, RecursionError) as error:
            raise WireError(f"a message from {sender} that is none: {error}") from error

    def decode_buffers(self, envelope: Envelope, frames: Sequence[memoryview]) -> tuple[Buffer, ...]:
        """Pair the frames after the header with their descriptions. Copies nothing."""
        if len(frames) != len(envelope.buffers):
            raise WireError(
                f"a message from {envelope.sender} describes {len(envelope.buffers)} buffers but has {len(frames)}"
            )
        return tuple(map(incoming, range(len(frames)), envelope.buffers, frames))

    def _check_header(self, num_bytes: int) -> None:
        if num_bytes > self.limits.max_header_bytes:
            raise WireError(f"a header of {num_bytes} bytes: at most {self.limits.max_header_bytes} are allowed")

    def _check_buffers(self, envelope: Envelope) -> None:
        limits = self.limits
        if len(envelope.buffers) > limits.max_buffers:
            raise WireError(f"a message with {len(envelope.buffers)} buffers: at most {limits.max_buffers} are allowed")
        for position, spec in enumerate(envelope.buffers):
            if spec.extent_bytes > limits.max_buffer_bytes:
                raise WireError(
                    f"buffer {position} is {spec.dtype} of shape {spec.shape}: at most {limits.max_buffer_bytes} "
                    "bytes are allowed"
                )
