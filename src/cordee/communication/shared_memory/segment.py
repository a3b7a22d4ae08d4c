"""A block of memory that several processes of a host map, and that has no name anywhere.

The owner makes it with memfd_create; the others open it through /proc/<pid>/fd/<n> of the owner. It is never
in /dev/shm, so nothing is left behind however the processes end: the kernel frees it with its last mapping.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cordee.communication.shared_memory.layout import Layout, choose_slot_bytes
from cordee.core.errors import CommunicationError

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
