from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cordee.communication.shared_memory.rounds import home_core
from cordee.communication.shared_memory.segment import (
    CHANNEL_LINES,
    DIRECT_LIMIT_BYTES,
    LINE_BYTES,
    MEMBER_LINES,
    PIECES_PER_CHANNEL,
    Layout,
    ReduceMethod,
    choose_reduce_method,
    choose_slot_bytes,
    cut,
    share_of,
)


@given(st.integers(1, 12), st.integers(1, 8).map(lambda pages: pages * 4096))
def test_no_two_regions_of_a_segment_overlap(num_members: int, slot_bytes: int) -> None:
    layout = Layout(num_members=num_members, slot_bytes=slot_bytes)
    regions = []
    for member in range(num_members):
        regions.append((layout.member_word(member) * 8, MEMBER_LINES * LINE_BYTES))
        regions += [(layout.slot_at(member, parity), slot_bytes) for parity in (0, 1)]
    regions.append((layout.sleepers_at, 8 * layout.sleeper_words))
    regions.append((layout.channel_sleepers_at, 8 * layout.sleeper_words))
    for source in range(num_members):
        for target in range(num_members):
            if source != target:
                regions.append((layout.channel_word(source, target) * 8, CHANNEL_LINES * LINE_BYTES))
                for parity in range(PIECES_PER_CHANNEL):
                    regions.append((layout.piece_at(source, target, parity), layout.piece_bytes))
    regions.sort()
    for (start, length), (following, _) in pairwise(regions):
        assert start + length <= following
    assert sum(regions[-1]) <= layout.total_bytes


def test_control_words_of_members_are_in_different_cache_lines() -> None:
    layout = Layout(num_members=4, slot_bytes=4096)
    assert len({layout.member_word(member) * 8 // LINE_BYTES for member in range(4)}) == 4


def test_channels_stay_small_with_many_members() -> None:
    layout = Layout(num_members=16, slot_bytes=1 << 20)
    assert layout.num_channels * PIECES_PER_CHANNEL * layout.piece_bytes <= 8 << 20


@given(st.integers(0, 10_000), st.integers(1, 500))
def test_cut_covers_everything_once(length: int, limit: int) -> None:
    chunks = list(cut(length, limit))
    assert [index for start, stop in chunks for index in range(start, stop)] == list(range(length))
    assert all(0 < stop - start <= limit for start, stop in chunks)


@given(st.integers(0, 5_000), st.integers(1, 9))
def test_shares_cover_everything_once(length: int, num_members: int) -> None:
    shares = [share_of(length, num_members, member) for member in range(num_members)]
    assert [index for start, stop in shares for index in range(start, stop)] == list(range(length))


def test_pairs_and_small_sizes_are_reduced_directly() -> None:
    assert choose_reduce_method(1 << 30, 2) is ReduceMethod.DIRECT
    assert choose_reduce_method(DIRECT_LIMIT_BYTES, 8) is ReduceMethod.DIRECT
    assert choose_reduce_method(DIRECT_LIMIT_BYTES + 1, 3) is ReduceMethod.SHARES


def test_chunks_are_longer_when_members_share_cores() -> None:
    assert choose_slot_bytes(2, 2) == 1 << 20
    assert choose_slot_bytes(4, 2) == 4 << 20
    assert choose_slot_bytes(16, 2) * 2 * 16 <= 64 << 20
    assert choose_slot_bytes(1000, 2) % 4096 == 0


@given(st.integers(0, 1 << 30))
def test_members_move_to_different_cores(group_key: int) -> None:
    assert sorted(home_core([3, 5, 9], member, group_key) for member in range(3)) == [3, 5, 9]
