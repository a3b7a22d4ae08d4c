"""A lane: the shared memory of one client and one server, for one call at a time.

The client writes a request and moves its stamp on the server's *porch*, a small segment in which every lane has a
word; the server writes the reply to the same memory and moves the reply stamp of the lane. Whoever sleeps is woken
by futex. As in `rounds.py` this relies on the store order of x86.

    lane    line 0: reply stamp, bytes of the reply's header / line 1: bytes of the request's header
            line 2: the client's bell, and whether it sleeps
            then the two headers, and the buffers of the request or of the reply, each at a multiple of 64 bytes
    porch   line 0: life, the server's bell, whether it sleeps; then a word per lane
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from cordee.communication.buffers import Buffer, BufferSpec, WireError, incoming
from cordee.communication.shared_memory.bell import futex_wait, futex_wake
from cordee.communication.shared_memory.segment import Address, Segment, attach_segment, create_segment

HEADER_BYTES = 256 << 10
_PAGE = 4096
_REQUEST_AT = _PAGE
_REPLY_AT = _REQUEST_AT + HEADER_BYTES
DATA_AT = _REPLY_AT + HEADER_BYTES
_ALIGN = 64

REPLY_STAMP, REPLY_LENGTH, REQUEST_LENGTH, CLIENT_BELL, CLIENT_SLEEPS = 0, 1, 8, 16, 17
LIFE, SERVER_BELL, SERVER_SLEEPS, FIRST_SLOT = 0, 1, 2, 8
MAX_LANES = 4096
PORCH_BYTES = _PAGE + 8 * MAX_LANES

# Below this NumPy's copy is quicker to start than torch's, which lets other threads run meanwhile.
_SMALL_BYTES = 64 << 10


class Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The header of a request or reply: its buffers, and the message, not decoded yet."""

    buffers: tuple[BufferSpec, ...]
    payload: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def extent(sizes: Sequence[int]) -> int:
    """Return the bytes that buffers of these sizes take in a lane."""
    return sum(-(-size // _ALIGN) * _ALIGN for size in sizes)


class Lane:
    """One end of a lane: writes frames and reads the other end's."""

    def __init__(self, segment: Segment, *, is_client: bool) -> None:
        if segment.num_bytes < DATA_AT:
            raise WireError(f"a lane of {segment.num_bytes} bytes: at least {DATA_AT} are needed")
        self.segment = segment
        self.words = segment.words(0, 32)
        self._bytes = np.frombuffer(segment.memory, dtype=np.uint8)
        self._header = memoryview(segment.memory)
        self._tensor = torch.from_numpy(self._bytes)
        self.capacity = segment.num_bytes - DATA_AT
        self._writes_at, self._reads_at = (_REQUEST_AT, _REPLY_AT) if is_client else (_REPLY_AT, _REQUEST_AT)
        self._own_length, self._other_length = (
            (REQUEST_LENGTH, REPLY_LENGTH) if is_client else (REPLY_LENGTH, REQUEST_LENGTH)
        )

    def write(self, payload: msgspec.Raw, specs: tuple[BufferSpec, ...], views: Sequence[memoryview]) -> None:
        """Put a frame into the lane. Raises WireError if it has no room for it."""
        needed = extent([view.nbytes for view in views])
        if needed > self.capacity:
            raise WireError(f"{needed} bytes do not fit into a lane of {self.capacity}")
        header = _encoder.encode(Frame(specs, payload))
        if len(header) > HEADER_BYTES:
            raise WireError(f"a header of {len(header)} bytes: at most {HEADER_BYTES} are allowed")
        self._header[self._writes_at : self._writes_at + len(header)] = header
        at = DATA_AT
        for view in views:
            size = view.nbytes
            if size < _SMALL_BYTES:
                self._bytes[at : at + size] = view
            else:
                self._tensor[at : at + size].copy_(torch.from_numpy(np.frombuffer(view, dtype=np.uint8)))
            at += -(-size // _ALIGN) * _ALIGN
        self.words[self._own_length] = len(header)

    def read(self) -> tuple[msgspec.Raw, tuple[Buffer, ...]]:
        """Return the other end's frame; its buffers are views of the lane. Raises WireError if it is none."""
        length = self.words[self._other_length]
        if not 0 < length <= HEADER_BYTES:
            raise WireError(f"a frame says that its header has {length} bytes")
        try:
            frame = _decoder.decode(bytes(self._header[self._reads_at : self._reads_at + length]))
        except (ValueError, RecursionError) as error:
            raise WireError(f"a frame that is none: {error}") from error
        sizes = [spec.num_bytes for spec in frame.buffers]
        if extent(sizes) > self.capacity:
            raise WireError(f"a frame describes {extent(sizes)} bytes in a lane of {self.capacity}")
        buffers, at = [], DATA_AT
        for position, (spec, size) in enumerate(zip(frame.buffers, sizes, strict=True)):
            buffers.append(incoming(position, spec, memoryview(self.segment.memory)[at : at + size]))
            at += -(-size // _ALIGN) * _ALIGN
        return frame.payload, tuple(buffers)


class Porch:
    """The place of a server where lanes show that they have a request."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.words = segment.words()

    @classmethod
    def create(cls) -> tuple[Porch, Address]:
        """Make one; the file behind the address stays open as long as the server lives, for clients to come."""
        segment, fd = create_segment(PORCH_BYTES, "a server's porch")
        return cls(segment), Address(os.getpid(), fd, PORCH_BYTES)

    @classmethod
    def attach(cls, address: Address) -> Porch:
        return cls(attach_segment(address))

    def call(self, slot: int, stamp: int) -> None:
        """Show the request `stamp` of a lane, and wake the server if it sleeps."""
        words = self.words
        words[FIRST_SLOT + slot] = stamp
        if words[SERVER_SLEEPS]:
            words[SERVER_BELL] += 1
            futex_wake(self.segment.address + 8 * SERVER_BELL)

    def sleep(self, is_ready: object, limit_s: float) -> None:
        """Sleep until a client calls; not at all if `is_ready()`."""
        words = self.words
        heard = words[SERVER_BELL]
        words[SERVER_SLEEPS] = 1
        try:
            if not is_ready():  # type: ignore[operator]
                futex_wait(self.segment.address + 8 * SERVER_BELL, heard, limit_s)
        finally:
            words[SERVER_SLEEPS] = 0


def wake_client(lane: Lane) -> None:
    words = lane.words
    if words[CLIENT_SLEEPS]:
        words[CLIENT_BELL] += 1
        futex_wake(lane.segment.address + 8 * CLIENT_BELL)


def sleep_for_reply(lane: Lane, stamp: int, limit_s: float) -> None:
    words = lane.words
    heard = words[CLIENT_BELL]
    words[CLIENT_SLEEPS] = 1
    try:
        if words[REPLY_STAMP] < stamp:
            futex_wait(lane.segment.address + 8 * CLIENT_BELL, heard, limit_s)
    finally:
        words[CLIENT_SLEEPS] = 0
