"""What both ends of calls use: the messages of a connection, and a channel of shared memory for one call at a time.

The client writes a request and moves its stamp on the server's *request board*, a small segment in which every channel
has a word; the server writes the reply to the same memory and moves the reply stamp of the channel. Whoever sleeps is
woken by futex. As in `rounds.py` this relies on the store order of x86.

    channel line 0: reply stamp, bytes of the reply's header and of the first part of it / line 1: the same two of the
            request / line 2: the client's futex, and whether it sleeps
            then the two headers, each the descriptions of the buffers and the message, and the buffers of the request
            or of the reply, each at a multiple of 64 bytes
    request board   line 0: life, the server's futex, whether it sleeps; then a word per channel
"""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec
import numpy as np
import torch

from cordee.communication.messages import Count, Message, Name
from cordee.communication.shared_memory.futex import futex_wait, futex_wake
from cordee.communication.shared_memory.segment import Address, Segment, attach_segment, create_segment
from cordee.communication.wire import Buffer, BufferSpec, Parcel, WireError, incoming, padded

# What the two ends of a connection say to each other before and beside the calls of a service.


class _ConnectionMessage(Message, frozen=True):
    is_generational = False


class Greeting(_ConnectionMessage, frozen=True):
    """A client wants to make calls. Answered by `HostInfo`."""


class HostInfo(_ConnectionMessage, frozen=True):
    """Where the server is: clients with the same host id may share memory with it."""

    host_id: Name
    board_pid: Count
    board_fd: Count
    board_bytes: Count
    started: Count  # of the process, as /proc has it


class OpenShmChannel(_ConnectionMessage, frozen=True):
    """The client has made a segment for calls. Answered by `ShmChannelOpened`."""

    pid: Count
    fd: Count
    num_bytes: Count


class ShmChannelOpened(_ConnectionMessage, frozen=True):
    """The server listens to the segment, at this place of its request board."""

    slot: Count


class Ping(_ConnectionMessage, frozen=True):
    """Does the server live? Answered by `Pong`."""


class Pong(_ConnectionMessage, frozen=True):
    """It does."""


UNAVAILABLE = "unavailable"  # why a request is refused that is to be made again, wherever the service then is

CONNECTION: tuple[type[Message], ...] = (Greeting, HostInfo, OpenShmChannel, ShmChannelOpened, Ping, Pong)


# The channel of shared memory.


HEADER_BYTES = 256 << 10
_PAGE = 4096
_REQUEST_AT = _PAGE
_REPLY_AT = _REQUEST_AT + HEADER_BYTES
DATA_AT = _REPLY_AT + HEADER_BYTES

REPLY_STAMP, REPLY_LENGTH, REQUEST_LENGTH, CLIENT_FUTEX = 0, 1, 8, 16
_SPECS = 1  # the word after each length
LIFE, SERVER_FUTEX, FIRST_SLOT = 0, 1, 8
_SLEEPS = 1  # the word after each futex
MAX_CHANNELS = 4096
BOARD_BYTES = _PAGE + 8 * MAX_CHANNELS

# Below this NumPy's copy is quicker to start than torch's, which lets other threads run meanwhile.
_SMALL_BYTES = 64 << 10
_MAX_KNOWN = 64  # descriptions of buffers that a shared-memory channel remembers


_decoder = msgspec.msgpack.Decoder(tuple[BufferSpec, ...])


class ShmChannel:
    """One end of a shared-memory channel: writes frames and reads the other end's."""

    def __init__(self, segment: Segment, *, is_client: bool) -> None:
        if segment.num_bytes < DATA_AT:
            raise WireError(f"a shared-memory channel of {segment.num_bytes} bytes: at least {DATA_AT} are needed")
        self.segment = segment
        self.words = segment.words(0, 32)
        self._bytes = np.frombuffer(segment.memory, dtype=np.uint8)
        self._header = memoryview(segment.memory)
        self._tensor = torch.from_numpy(self._bytes)
        self.capacity = segment.num_bytes - DATA_AT
        self._known: dict[bytes, tuple[Buffer, ...]] = {}
        self._writes_at, self._reads_at = (_REQUEST_AT, _REPLY_AT) if is_client else (_REPLY_AT, _REQUEST_AT)
        self._own_length, self._other_length = (
            (REQUEST_LENGTH, REPLY_LENGTH) if is_client else (REPLY_LENGTH, REQUEST_LENGTH)
        )

    def write(self, payload: bytes, parcel: Parcel) -> None:
        """Put a frame into the shared-memory channel. Raises WireError if it has no room for it."""
        if parcel.extent > self.capacity:
            raise WireError(f"{parcel.extent} bytes do not fit into a shared-memory channel of {self.capacity}")
        header = parcel.described + payload
        if len(header) > HEADER_BYTES:
            raise WireError(f"a header of {len(header)} bytes: at most {HEADER_BYTES} are allowed")
        self._header[self._writes_at : self._writes_at + len(header)] = header
        at = DATA_AT
        for view in parcel.views:
            size = view.nbytes
            if size < _SMALL_BYTES:
                self._header[at : at + size] = view
            elif view.readonly:  # torch complains about such memory
                self._bytes[at : at + size] = view
            else:
                self._tensor[at : at + size].copy_(torch.from_numpy(np.frombuffer(view, dtype=np.uint8)))
            at += padded(size)
        self.words[self._own_length] = len(header)
        self.words[self._own_length + _SPECS] = len(parcel.described)

    def read(self) -> tuple[bytes, tuple[Buffer, ...]]:
        """Return the other end's frame; its buffers are views of the channel. Raises WireError if it is none."""
        length, num_described = self.words[self._other_length], self.words[self._other_length + _SPECS]
        if not 0 < num_described < length <= HEADER_BYTES:
            raise WireError(f"a frame says that its header has {length} bytes, {num_described} of them for buffers")
        header = bytes(self._header[self._reads_at : self._reads_at + length])
        described = header[:num_described]
        buffers = self._known.get(described)
        if buffers is None:
            buffers = self._describe(described)
        return header[num_described:], buffers

    def _describe(self, described: bytes) -> tuple[Buffer, ...]:
        try:
            specs = _decoder.decode(described)
        except (ValueError, RecursionError) as error:
            raise WireError(f"a frame that is none: {error}") from error
        sizes = [spec.num_bytes for spec in specs]
        if (needed := sum(padded(size) for size in sizes)) > self.capacity:
            raise WireError(f"a frame describes {needed} bytes in a shared-memory channel of {self.capacity}")
        found, at = [], DATA_AT
        for position, (spec, size) in enumerate(zip(specs, sizes, strict=True)):
            found.append(incoming(position, spec, memoryview(self.segment.memory)[at : at + size]))
            at += padded(size)
        buffers = tuple(found)
        # Calls of one kind describe the same bytes of the channel each time. A bool must be looked at again.
        if all(spec.dtype != "bool" for spec in specs):
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[described] = buffers
        return buffers


class RequestBoard:
    """The place of a server where shared-memory channels show that they have a request."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.words = segment.words()

    @classmethod
    def create(cls) -> tuple[RequestBoard, Address]:
        """Make one; the file behind the address stays open as long as the server lives, for clients to come."""
        segment, fd = create_segment(BOARD_BYTES, "a server's request board")
        return cls(segment), Address(os.getpid(), fd, BOARD_BYTES)

    @classmethod
    def attach(cls, address: Address) -> RequestBoard:
        return cls(attach_segment(address))

    def call(self, slot: int, stamp: int) -> None:
        """Show the request `stamp` of a shared-memory channel, and wake the server if it sleeps."""
        self.words[FIRST_SLOT + slot] = stamp
        wake(self, SERVER_FUTEX)


def wake(end: ShmChannel | RequestBoard, futex: int) -> None:
    """Wake the process that sleeps at this word, if it does."""
    words = end.words
    if words[futex + _SLEEPS]:
        words[futex] += 1
        futex_wake(end.segment.address + 8 * futex)


def sleep(end: ShmChannel | RequestBoard, futex: int, is_ready: Callable[[], bool], limit_s: float) -> None:
    """Sleep at this word until woken, at most `limit_s`, and not at all if `is_ready()`."""
    words = end.words
    heard = words[futex]
    words[futex + _SLEEPS] = 1
    try:
        if not is_ready():
            futex_wait(end.segment.address + 8 * futex, heard, limit_s)
    finally:
        words[futex + _SLEEPS] = 0
