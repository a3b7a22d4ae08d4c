"""Samples in blocks: their order, the blocks held, and the parts that are cut from them."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cordee.core.batch import Batch
from cordee.core.errors import DataError
from cordee.data import Loader
from cordee.data.blocks import Blocks, BlockSource, source_of_blocks
from cordee.data.order import BlockLayout, EpochOrder


class Numbers:
    """Blocks of samples that are their own number, and a record of what was read."""

    row_bytes = 12

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = torch.tensor(sizes)
        self.was_read: list[int] = []
        self.fail: set[int] = set()
        self.delay_s = 0.0

    def read(self, block: int) -> Batch:
        time.sleep(self.delay_s)
        self.was_read.append(block)
        if block in self.fail:
            raise DataError(f"block {block} is damaged")
        first = int(self.sizes[:block].sum())
        numbers = torch.arange(first, first + int(self.sizes[block]))
        return Batch(numbers.float().unsqueeze(1), numbers)

    def digest(self) -> str:
        return "abc"


def source(sizes: list[int], memory_bytes: int = 240) -> tuple[BlockSource, Numbers]:
    reader = Numbers(sizes)
    found = source_of_blocks(reader, memory_bytes)
    assert isinstance(found, BlockSource)
    reader.was_read.clear()
    return found, reader


def targets(loader: Loader, epoch: int = 0, first_batch: int = 0) -> list[int]:
    return [int(target) for batch in loader.batches(epoch, first_batch) for target in batch.targets]


# The order


@settings(deadline=None)  # a busy machine
@given(st.lists(st.integers(0, 20), min_size=1, max_size=30).filter(any), st.integers(1, 60), st.integers(0, 5))
def test_every_sample_once_whatever_the_layout(sizes: list[int], window: int, epoch: int) -> None:
    total = sum(sizes)
    order = EpochOrder(total, seed=1, epoch=epoch, shuffle=True, layout=BlockLayout(torch.tensor(sizes), window))
    assert sorted(order.samples_at(torch.arange(total)).tolist()) == list(range(total))
    for position in (0, total // 2, total - 1):  # any position can be the first that is asked for
        fresh = EpochOrder(total, seed=1, epoch=epoch, shuffle=True, layout=BlockLayout(torch.tensor(sizes), window))
        asked = torch.tensor([position])
        assert torch.equal(fresh.samples_at(asked), order.samples_at(asked))


def test_positions_of_a_window_are_in_few_blocks_and_shuffled_among_them() -> None:
    layout = BlockLayout(torch.tensor([10] * 12), 40)
    order = EpochOrder(120, seed=0, epoch=0, shuffle=True, layout=layout)
    seen: set[int] = set()
    for first in range(0, 120, 40):
        samples = order.samples_at(torch.arange(first, first + 40))
        blocks = {int(sample) // 10 for sample in samples}
        assert len(blocks) == 4 and not blocks & seen
        assert samples.tolist() != sorted(samples.tolist())
        assert len({int(sample) // 10 for sample in samples[:10]}) > 1
        seen |= blocks
    after = order.blocks_after(0)
    assert after is not None and set(after[1]) == {int(s) // 10 for s in order.samples_at(torch.arange(40, 80))}
    assert order.blocks_after(85) is None


def test_other_epochs_and_seeds_have_other_orders() -> None:
    layout = BlockLayout(torch.tensor([10] * 12), 40)

    def order(seed: int, epoch: int) -> list[int]:
        return (
            EpochOrder(120, seed=seed, epoch=epoch, shuffle=True, layout=layout).samples_at(torch.arange(120)).tolist()
        )

    assert order(0, 0) != order(0, 1) != order(1, 1) and order(0, 0) == order(0, 0)


def test_data_of_one_window_has_the_order_of_data_in_memory() -> None:
    layout = BlockLayout(torch.tensor([10] * 12), 120)
    positions = torch.arange(120)
    in_blocks = EpochOrder(120, seed=0, epoch=3, shuffle=True, layout=layout).samples_at(positions)
    assert torch.equal(in_blocks, EpochOrder(120, seed=0, epoch=3, shuffle=True).samples_at(positions))


def test_without_shuffling_the_order_is_that_of_the_files() -> None:
    order = EpochOrder(30, seed=0, epoch=0, shuffle=False, layout=BlockLayout(torch.tensor([10] * 3), 10))
    assert order.samples_at(torch.arange(30)).tolist() == list(range(30))


# Reading


def test_each_sample_once_and_each_block_read_once_in_an_epoch() -> None:
    data, reader = source([10] * 12)
    for epoch in (0, 1):
        assert sorted(targets(Loader(data, batch_size=7, seed=0, shuffle=True, prefetch=0), epoch)) == list(range(120))
    assert len(reader.was_read) <= 24 and set(reader.was_read) == set(range(12))


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_parts_make_the_whole_on_any_number_of_workers(prefetch: int, processes: int, num_shards: int) -> None:
    data, _ = source([10] * 12)
    settings = {"batch_size": 7, "seed": 3, "shuffle": True}
    whole = [batch.targets for batch in Loader(data, prefetch=0, **settings).batches(2, 4)]
    parts = [
        list(
            Loader(data, shard=at, num_shards=num_shards, prefetch=prefetch, processes=processes, **settings).batches(
                2, 4
            )
        )
        for at in range(num_shards)
    ]
    for batch, of_shards in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(batch, torch.cat([part.targets for part in of_shards]))
        assert torch.equal(batch.float().unsqueeze(1), torch.cat([part.inputs for part in of_shards]))


def test_resuming_reads_only_what_is_needed_from_there_on() -> None:
    data, reader = source([10] * 100, memory_bytes=480)
    loader = Loader(data, batch_size=10, seed=0, shuffle=True, prefetch=0)
    everything = targets(loader)
    data, reader = source([10] * 100, memory_bytes=480)
    loader = Loader(data, batch_size=10, seed=0, shuffle=True, prefetch=0)
    batches = loader.batches(0, 90)
    first = next(batches)
    batches.close()
    assert first.targets.tolist() == everything[900:910]
    assert len(reader.was_read) <= 4  # two windows of two blocks at most


def test_memory_stays_within_its_limit() -> None:
    data, _ = source([10] * 50, memory_bytes=480)
    for batch in Loader(data, batch_size=5, seed=0, shuffle=True).batches(0):
        assert len(batch.targets) == 5
        assert sum(len(content.targets) for content, _ in list(data.blocks._held.values())) * 12 <= 480


def test_a_block_larger_than_the_limit_is_read_nevertheless() -> None:
    data, _ = source([50, 50], memory_bytes=24)
    assert sorted(targets(Loader(data, batch_size=9, seed=0, shuffle=True))) == list(range(100))


def test_blocks_are_read_ahead_and_the_thread_ends_with_the_batches() -> None:
    data, reader = source([10] * 12)
    batches = Loader(data, batch_size=10, seed=0, shuffle=True).batches(0)
    next(batches)
    deadline = time.monotonic() + 5
    while len(set(reader.was_read)) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert len(set(reader.was_read)) >= 2  # the first window has one block, and the next is there already
    batches.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("cordee")]


def test_a_damaged_block_that_was_read_ahead_is_an_error_where_it_is_needed() -> None:
    data, reader = source([10] * 12)
    reader.fail = {7}
    order = targets_until_error(Loader(data, batch_size=5, seed=0, shuffle=True))
    assert order and not set(order) & set(range(70, 80))


def targets_until_error(loader: Loader) -> list[int]:
    found: list[int] = []
    with pytest.raises(DataError, match="block 7 is damaged"):
        for batch in loader.batches(0):
            found += batch.targets.tolist()
    return found


def test_reading_by_parts_as_workers_on_demand_do() -> None:
    data, _ = source([10] * 12)
    loader = Loader(data, batch_size=10, seed=0, shuffle=True)
    whole = targets(loader)
    found = [
        int(t)
        for start in range(0, 120, 30)
        for b in loader.read(0, [(start, start + 10), (start + 10, start + 30)])
        for t in b.targets
    ]
    loader.close()
    assert found == whole
    assert loader.numbers_at(0, 50, 60) == whole[50:60]


# Parts


def test_a_share_is_set_aside_by_the_seed_without_a_list_of_it() -> None:
    data, _ = source([10] * 12)
    rest, aside = data.split_rows(0.25, seed=1)
    assert (rest.num_samples, aside.num_samples) == (90, 30)
    kept, tested = everything(rest), everything(aside)
    assert sorted(kept + tested) == list(range(120))
    again = data.split_rows(0.25, seed=1)[1]
    assert everything(again) == tested != everything(data.split_rows(0.25, seed=2)[1])


@settings(deadline=None)  # a busy machine
@given(
    st.lists(st.integers(0, 9), min_size=2, max_size=20).filter(lambda sizes: sum(sizes) > 25), st.floats(0.01, 0.99)
)
def test_shares_of_uneven_blocks_are_disjoint_and_whole(sizes: list[int], fraction: float) -> None:
    data, _ = source(sizes)
    rest, aside = data.split_rows(fraction, seed=1)
    assert aside.num_samples == round(fraction * sum(sizes))
    assert sorted(everything(rest) + everything(aside)) == list(range(sum(sizes)))


def test_the_first_samples_of_a_share() -> None:
    data, _ = source([10] * 12)
    assert everything(data.first(25)) == list(range(25))
    rest, _ = data.split_rows(0.25, seed=1)
    assert everything(rest.first(25)) == everything(rest)[:25]
    loader = Loader(rest.first(70), batch_size=7, seed=0, shuffle=True)
    assert sorted(targets(loader)) == everything(rest)[:70]


def everything(data: BlockSource) -> list[int]:
    assert data.num_samples is not None
    indices: Tensor = torch.arange(data.num_samples)
    return data.gather(indices).targets.tolist()


def test_blocks_without_rows_do_no_harm() -> None:
    data, _ = source([0, 10, 0, 0, 25, 0])
    assert sorted(targets(Loader(data, batch_size=4, seed=0, shuffle=True))) == list(range(35))


def test_rows_that_fit_into_memory_become_an_array() -> None:
    found = source_of_blocks(Numbers([10, 0, 10]), 240)
    assert not isinstance(found, BlockSource) and found.targets.tolist() == list(range(20))
    assert isinstance(Blocks(Numbers([10]), 240).layout.window, int)
