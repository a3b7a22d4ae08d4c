"""The wire format: how a message becomes frames, and how frames become a message or a `WireError`.

    frame 0        the header: MessagePack of an `Envelope`, whose last element is the message
    frame 1 … n    raw bytes of the n buffers the envelope describes

Decoding goes outside in, so that as little as possible of a bad message is looked at: sizes, protocol
version, envelope — here a `ReplayFilter` may turn it away — then the message and the buffers. Everything variable in
length has a limit that is checked before it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Final, Literal

import msgspec

from cordee.communication.buffers import MAX_DIMENSIONS, Buffer, BufferSpec, WireError, incoming
from cordee.communication.messages import Count, Message, Name, Refused

__all__ = ["MAX_DIMENSIONS", "PROTOCOL_VERSION", "Codec", "Envelope", "Limits", "WireError"]

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
        if type(message) not in self._messages:
            raise WireError(f"{type(message).__name__} does not belong to the messages of this channel")
        try:
            payload = self._encoder.encode(message)
            self._message_decoder.decode(payload)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise WireError(f"{type(message).__name__} cannot be sent: {error}") from error
        return msgspec.Raw(payload)

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
