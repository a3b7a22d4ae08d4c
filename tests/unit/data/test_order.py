from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from cordee.core.shards import Shards, shard_part
from cordee.data import order
from cordee.data.order import EpochOrder, batch_part, count_batches, hash_positions, permute_positions, positions_of


@given(st.integers(0, 300), st.integers(1, 40), st.integers(1, 9))
def test_every_position_is_in_exactly_one_part(num_samples, batch_size, num_shards):
    seen = []
    for batch in range(count_batches(num_samples, batch_size)):
        parts = [
            batch_part(
                batch, batch_size=batch_size, num_samples=num_samples, shards=Shards(shard, shard + 1, num_shards)
            )
            for shard in range(num_shards)
        ]
        sizes = [stop - start for start, stop in parts]
        assert max(sizes) - min(sizes) <= 1
        for start, stop in parts:
            assert batch * batch_size <= start <= stop <= (batch + 1) * batch_size
            seen.extend(range(start, stop))
    assert seen == list(range(num_samples))


@given(st.integers(1, 5000), st.integers(0, 2**40))
def test_computed_permutation_is_a_bijection(num_samples, seed):
    permuted = permute_positions(torch.arange(num_samples), num_samples, seed)
    assert torch.equal(permuted.sort().values, torch.arange(num_samples))


def test_computed_permutation_depends_on_seed_and_mixes():
    one, other = (permute_positions(torch.arange(10_000), 10_000, seed) for seed in (1, 2))
    assert not torch.equal(one, other)
    correlation = torch.corrcoef(torch.stack([one.double(), torch.arange(10_000).double()]))[0, 1]
    assert abs(correlation) < 0.05


@given(st.integers(1, 200), st.integers(0, 5), st.booleans())
def test_order_is_a_permutation_that_needs_no_history(num_samples, epoch, held):
    limit = order.LARGEST_HELD_ORDER
    try:
        order.LARGEST_HELD_ORDER = limit if held else 0
        made = EpochOrder(num_samples, seed=3, epoch=epoch, shuffle=True)
    finally:
        order.LARGEST_HELD_ORDER = limit
    everything = made.samples_at(torch.arange(num_samples))
    assert sorted(everything.tolist()) == list(range(num_samples))
    middle = torch.arange(num_samples // 2, num_samples)
    assert torch.equal(made.samples_at(middle), everything[num_samples // 2 :])


def test_epochs_and_seeds_differ_and_repeat():
    def samples(seed: int, epoch: int) -> list[int]:
        return EpochOrder(100, seed=seed, epoch=epoch, shuffle=True).samples_at(torch.arange(100)).tolist()

    assert samples(0, 0) == samples(0, 0)
    assert len({tuple(samples(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_unshuffled_order_is_as_it_is():
    made = EpochOrder(10, seed=0, epoch=4, shuffle=False)
    assert made.samples_at(torch.arange(10)).tolist() == list(range(10))


def test_huge_orders_are_not_held():
    made = EpochOrder(10**15, seed=0, epoch=0, shuffle=True)
    samples = made.samples_at(torch.arange(10**14, 10**14 + 1000))
    assert len(samples.unique()) == 1000
    assert int(samples.min()) >= 0 and int(samples.max()) < 10**15


def test_parts_are_joined_with_and_without_gaps():
    assert positions_of([(0, 3), (3, 5)]).tolist() == [0, 1, 2, 3, 4]
    assert positions_of([(0, 2), (4, 4), (8, 9)]).tolist() == [0, 1, 8]
    assert shard_part(3, 4, 5) == (3, 3)


def test_hash_is_uniform_enough_and_does_not_depend_on_the_batch():
    drawn = hash_positions(torch.arange(90_000), seed=7)
    assert int(drawn.min()) >= 0
    counts = torch.bincount(drawn % 9, minlength=9)
    assert int(counts.min()) > 9_700 and int(counts.max()) < 10_300
    assert torch.equal(hash_positions(torch.arange(500, 600), seed=7), drawn[500:600])
