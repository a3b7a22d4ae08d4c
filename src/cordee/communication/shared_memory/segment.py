"""A block of memory that several processes of a host map, and that has no name anywhere.

The owner makes it with memfd_create; the others open it through /proc/<pid>/fd/<n> of the owner. It is never
in /dev/shm, so nothing is left behind however the processes end: the kernel frees it with its last mapping.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch
from torch import Tensor

from cordee.core.errors import CommunicationError

# Where everything lies in a segment, and how a collective is cut up: pure decisions, no memory.
#
# A segment belongs to the members of one process group that live on one host, numbered 0..n-1 in rank order:
#
#     control   per member four cache lines: stamp and signatures / life / futex word / channels' futex word
#     sleepers  one byte per member, set while it sleeps in a collective; then one byte per member for channels
#     slots     per member two buffers of `slot_bytes`, used in turn
#     channels  per ordered pair (source, target) one line of counters each way and a ring of pieces

LINE_WORDS = 8  # a cache line holds eight 64-bit words
LINE_BYTES = 64
MEMBER_LINES = 4
PAGE_BYTES = 4096

# Offsets, in words, inside a member's control lines.
STAMP = 0
SIGNATURE = 1  # two words, by the parity of the round
LIFE = LINE_WORDS
STATE = LINE_WORDS + 1
CULPRIT = LINE_WORDS + 2
FUTEX = 2 * LINE_WORDS
CHANNEL_FUTEX = 3 * LINE_WORDS

# Each channel has four lines: what the source wrote, what the target took, and two piece headers.
CHANNEL_LINES = 4
PIECES_PER_CHANNEL = 2

_CHANNEL_BUDGET_BYTES = 4 << 20
_MIN_PIECE_BYTES = 8 << 10
_MAX_PIECE_BYTES = 512 << 10

# Below this, one barrier and reading everybody's data beats two barriers and reading a share
# (4 processes on 2 cores, 2025-11: equal near 64 KiB).
DIRECT_LIMIT_BYTES = 64 << 10


_MIB = 1 << 20
_MAX_SLOTS_BYTES = 64 * _MIB


def choose_slot_bytes(num_members: int, num_cores: int) -> int:
    """Return how long a chunk should be.

    1 MiB stays in the cache (2 processes on 2 cores: 0.5–2 MiB within 10 %). With fewer cores than members every chunk
    costs changes of process, 70 µs each until the caches are warm again: 4 MiB, as far as 64 MiB in all allow.
    """
    if num_members <= num_cores:
        return _MIB
    return max(min(4 * _MIB, _MAX_SLOTS_BYTES // (2 * num_members)) // PAGE_BYTES * PAGE_BYTES, _MIB // 4)


class ReduceMethod(Enum):
    """How the members of a host add up a chunk."""

    DIRECT = "direct"  # everybody adds everybody's slot: one barrier, n-1 reads of the chunk
    SHARES = "shares"  # everybody adds a share and reads the others' sums back: two barriers, fewer bytes


def choose_reduce_method(num_bytes: int, num_members: int) -> ReduceMethod:
    """Return the cheaper way to all-reduce `num_bytes` among `num_members` processes of a host."""
    if num_members <= 2 or num_bytes <= DIRECT_LIMIT_BYTES:
        return ReduceMethod.DIRECT
    return ReduceMethod.SHARES


def cut(length: int, limit: int) -> Iterator[tuple[int, int]]:
    """Yield the (start, stop) of consecutive chunks of at most `limit` that cover `length`; none if it is 0."""
    for start in range(0, length, limit):
        yield start, min(start + limit, length)


def share_of(length: int, num_members: int, member: int, granule: int = 16) -> tuple[int, int]:
    """Return the (start, stop) of one member's share of `length` elements.

    Shares are consecutive, cover everything, and start at multiples of `granule` elements so that two
    members do not write to one cache line; the last ones may be empty.
    """
    step = -(-length // num_members)
    step = -(-step // granule) * granule
    start = min(member * step, length)
    return start, min(start + step, length)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Byte offsets of a segment for `num_members` processes with slots of `slot_bytes`."""

    num_members: int
    slot_bytes: int  # of one of the two buffers of a member; a multiple of the page size

    def __post_init__(self) -> None:
        assert self.num_members >= 1
        assert self.slot_bytes > 0 and self.slot_bytes % PAGE_BYTES == 0

    @property
    def sleepers_at(self) -> int:
        return self.num_members * MEMBER_LINES * LINE_BYTES

    @property
    def sleeper_words(self) -> int:
        """64-bit words that hold one byte per member."""
        return -(-self.num_members // 8)

    @property
    def channel_sleepers_at(self) -> int:
        return self.sleepers_at + _round_up(self.sleeper_words * 8, LINE_BYTES)

    @property
    def channel_control_at(self) -> int:
        return self.channel_sleepers_at + _round_up(self.sleeper_words * 8, LINE_BYTES)

    @property
    def slots_at(self) -> int:
        control = self.channel_control_at + self.num_channels * CHANNEL_LINES * LINE_BYTES
        return _round_up(control, PAGE_BYTES)

    @property
    def pieces_at(self) -> int:
        return self.slots_at + self.num_members * 2 * self.slot_bytes

    @property
    def total_bytes(self) -> int:
        pieces = self.num_channels * PIECES_PER_CHANNEL * self.piece_bytes
        return _round_up(self.pieces_at + pieces, PAGE_BYTES)

    @property
    def num_channels(self) -> int:
        return self.num_members * (self.num_members - 1)

    @property
    def piece_bytes(self) -> int:
        """Bytes of one piece of a message; smaller with more members, so that channels stay a few MiB in all."""
        if self.num_channels == 0:
            return 0
        piece = _CHANNEL_BUDGET_BYTES // (self.num_channels * PIECES_PER_CHANNEL)
        piece = min(max(piece, _MIN_PIECE_BYTES), _MAX_PIECE_BYTES)
        return piece // PAGE_BYTES * PAGE_BYTES

    def member_word(self, member: int) -> int:
        """Index of the first control word of a member, in 64-bit words from the start."""
        return member * MEMBER_LINES * LINE_WORDS

    def slot_at(self, member: int, parity: int) -> int:
        return self.slots_at + (member * 2 + parity) * self.slot_bytes

    def channel_index(self, source: int, target: int) -> int:
        assert source != target
        return source * (self.num_members - 1) + (target if target < source else target - 1)

    def channel_word(self, source: int, target: int) -> int:
        """Index of the first control word of a channel, in 64-bit words from the start."""
        at = self.channel_control_at + self.channel_index(source, target) * CHANNEL_LINES * LINE_BYTES
        return at // 8

    def piece_at(self, source: int, target: int, parity: int) -> int:
        channel = self.channel_index(source, target)
        return self.pieces_at + (channel * PIECES_PER_CHANNEL + parity) * self.piece_bytes


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


# The memory itself.

_NAME = "cordee"


@dataclass(frozen=True)
class Address:
    """Where a peer on the same host finds a segment, while its owner keeps it open."""

    pid: int
    fd: int
    num_bytes: int

    def encode(self) -> str:
        return f"{self.pid} {self.fd} {self.num_bytes}"

    @classmethod
    def decode(cls, text: str) -> Address:
        pid, fd, num_bytes = (int(part) for part in text.split())
        return cls(pid, fd, num_bytes)


class Segment:
    """Shared memory, mapped for as long as this object or a tensor on it lives."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self.num_bytes = len(memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def words(self, offset: int = 0, count: int | None = None) -> memoryview:
        """Return 64-bit words; one item is read and written by one machine instruction."""
        end = self.num_bytes if count is None else offset + 8 * count
        return memoryview(self.memory)[offset:end].cast("q")

    def bytes_at(self, offset: int, count: int) -> memoryview:
        return memoryview(self.memory)[offset : offset + count]

    def tensor(self, offset: int, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor on part of the segment; it keeps the segment mapped."""
        count = num_bytes // dtype.itemsize
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=offset)


def create_segment(num_bytes: int, purpose: str) -> tuple[Segment, int]:
    """Make a segment; return it and the open file that peers attach to, which the caller closes.

    All pages are reserved here: a later write can not fail for want of memory (it would be a SIGBUS).
    Raises CommunicationError that says how much was needed when the memory can not be had.
    """
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, num_bytes)
        os.posix_fallocate(fd, 0, num_bytes)
        return Segment(_map(fd, num_bytes)), fd
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT):
            raise CommunicationError(
                f"no room for shared memory: {purpose} needs {num_bytes / 2**20:.1f} MiB "
                f"({os.strerror(error.errno)}). Free memory or raise the memory or file-size limit; lower "
                "slot_bytes in BackendSettings; or continue without shared memory with "
                "BackendSettings(shared_memory=False) or init_process_group('gloo')"
            ) from error
        raise


def attach_segment(address: Address) -> Segment:
    """Map a segment that another process of this host owns.

    Raises CommunicationError when it can not be opened: the owner is gone, or belongs to another user.
    """
    fd = _open(address, os.O_RDWR)
    try:
        return Segment(_map(fd, address.num_bytes))
    finally:
        os.close(fd)


def map_for_reading(address: Address) -> memoryview:
    """Map a segment of another process without the means to change it. Raises like `attach_segment`."""
    fd = _open(address, os.O_RDONLY)
    try:
        return memoryview(mmap.mmap(fd, address.num_bytes, access=mmap.ACCESS_READ))
    finally:
        os.close(fd)


def _open(address: Address, flags: int) -> int:
    path = Path(f"/proc/{address.pid}/fd/{address.fd}")
    try:
        fd = os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        raise CommunicationError(
            f"cannot open the shared memory of process {address.pid} at {path}: {error.strerror}. Workers of one "
            "host must run as one user and see each other in /proc; otherwise give each its own host_id "
            "in BackendSettings, or use BackendSettings(shared_memory=False)"
        ) from error
    found = os.fstat(fd)
    name = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115 - it is no path
    if found.st_uid != os.geteuid() or name.split(" ")[0] != f"/memfd:{_NAME}":
        # The address comes from a store that others may be able to write to.
        os.close(fd)
        raise CommunicationError(
            f"{path} is no shared memory that a worker of this user has made: somebody else writes to the store where "
            "the group meets"
        )
    if (size := found.st_size) != address.num_bytes:
        os.close(fd)
        raise CommunicationError(
            f"the shared memory of process {address.pid} has {size} bytes, not {address.num_bytes}: all workers need "
            "the same slot_bytes"
        )
    return fd


def _map(fd: int, num_bytes: int) -> mmap.mmap:
    # Populated at once: a first collective would otherwise spend 0.1 µs a page in faults.
    return mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


# Typed views of the members' buffers in a segment, made once and reused.

_MAX_CACHED = 256  # a training step repeats its sizes; a program with endless new ones starts over


class Slots:
    """The two buffers of each member, as tensors of any element type and length."""

    def __init__(self, segment: Segment, layout: Layout) -> None:
        self._segment = segment
        self._layout = layout
        self._whole: dict[torch.dtype, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}
        self._sliced: dict[tuple[torch.dtype, int, int], tuple[Tensor, ...]] = {}

    def capacity(self, dtype: torch.dtype) -> int:
        """Elements that fit into one buffer."""
        return self._layout.slot_bytes // dtype.itemsize

    def whole(self, dtype: torch.dtype, parity: int) -> tuple[Tensor, ...]:
        """Return the full buffers of all members, in member order."""
        views = self._whole.get(dtype)
        if views is None:
            views = self._whole[dtype] = (self._make(dtype, 0), self._make(dtype, 1))
        return views[parity]

    def first(self, dtype: torch.dtype, parity: int, count: int) -> tuple[Tensor, ...]:
        """Return the first `count` elements of the buffers of all members, in member order."""
        key = (dtype, parity, count)
        views = self._sliced.get(key)
        if views is None:
            if len(self._sliced) >= _MAX_CACHED:
                self._sliced.clear()
            views = tuple(buffer[:count] for buffer in self.whole(dtype, parity))
            self._sliced[key] = views
        return views

    def _make(self, dtype: torch.dtype, parity: int) -> tuple[Tensor, ...]:
        layout = self._layout
        members = range(layout.num_members)
        return tuple(
            self._segment.tensor(layout.slot_at(member, parity), layout.slot_bytes, dtype) for member in members
        )


# Whether workers on this machine could share memory, found out by doing it.


def try_segment(num_members: int) -> int:
    """Make the segment of a group of `num_members`, attach to it as a peer does, write to it; return its bytes.

    Raises CommunicationError that says what is missing. Nothing is left behind.
    """
    num_cores = len(os.sched_getaffinity(0))
    layout = Layout(num_members=num_members, slot_bytes=choose_slot_bytes(num_members, num_cores))
    own, fd = create_segment(layout.total_bytes, f"a group of {num_members} workers")
    try:
        peer = attach_segment(Address(os.getpid(), fd, layout.total_bytes))
    finally:
        os.close(fd)
    peer.words()[-1] = num_members
    assert own.words()[-1] == num_members
    return layout.total_bytes
