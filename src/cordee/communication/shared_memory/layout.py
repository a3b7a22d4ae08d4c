"""Where everything lies in a shared segment, and how a collective is cut up: pure decisions, no memory.

A segment belongs to the members of one process group that live on one host, numbered 0..n-1 in rank order:

    control   per member four cache lines: stamp and signatures / life / futex word / channels' futex word
    sleepers  one byte per member, set while it sleeps in a collective; then one byte per member for channels
    slots     per member two buffers of `slot_bytes`, used in turn
    channels  per ordered pair (source, target) one line of counters each way and a ring of pieces
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

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
