"""Whether workers on this machine could share memory, found out by doing it."""

from __future__ import annotations

import os

from cordee.communication.shared_memory.layout import Layout, choose_slot_bytes
from cordee.communication.shared_memory.segment import Address, attach_segment, create_segment


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
