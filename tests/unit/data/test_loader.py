from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cordee.core.batch import Batch
from cordee.core.errors import DataError, JobError
from cordee.data import ArraySource, Loader, Scale
from cordee.data import loader as loader_module


def numbered(num_samples: int, shape=(3,)) -> ArraySource:
    """Samples whose target is their index, and whose inputs can be told from it."""
    targets = torch.arange(num_samples)
    return ArraySource(targets.view(-1, *(1,) * len(shape)).expand(-1, *shape).float(), targets)


def images(num_samples: int) -> ArraySource:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (num_samples, 3, 8, 8), generator=generator).to(torch.uint8)
    return ArraySource(pixels, torch.arange(num_samples), Scale.standardizing((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)))


def global_batches(make, num_shards: int, epoch: int = 0, first_batch: int = 0) -> list[Batch]:
    """The batches of all shards, put together again."""
    shards = [list(make(shard, num_shards).batches(epoch, first_batch)) for shard in range(num_shards)]
    return [Batch(*map(torch.cat, zip(*parts))) for parts in zip(*shards, strict=True)]


@settings(max_examples=60)
@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 6), st.integers(0, 3), st.booleans())
def test_every_sample_exactly_once_over_shards(num_samples, batch_size, num_shards, epoch, shuffle):
    batch_size = min(batch_size, num_samples)

    def make(shard: int, of: int) -> Loader:
        return Loader(numbered(num_samples), batch_size=batch_size, seed=1, shuffle=shuffle, shard=shard, num_shards=of)

    together = global_batches(make, num_shards, epoch)
    assert len(together) == make(0, 1).num_batches
    seen = torch.cat([batch.targets for batch in together]).tolist()
    assert sorted(seen) == list(range(num_samples))
    assert shuffle or seen == list(range(num_samples))
    assert [len(batch.targets) for batch in together[:-1]] == [batch_size] * (len(together) - 1)
    for whole, sharded in zip(global_batches(make, 1, epoch), together, strict=True):
        assert torch.equal(whole.inputs, sharded.inputs) and torch.equal(whole.targets, sharded.targets)


@pytest.mark.parametrize("augment", [(), ("crop", "flip")])
@pytest.mark.parametrize("prefetch", [0, 2, 9])
@pytest.mark.parametrize("gather_bytes", [1, 5000, 1 << 30])
def test_content_does_not_depend_on_cut_start_or_gathering(monkeypatch, augment, prefetch, gather_bytes):
    source = images(50)

    def make(shard: int, num_shards: int) -> Loader:
        return Loader(
            source, batch_size=7, seed=5, shuffle=True, shard=shard, num_shards=num_shards,
            augment=augment, prefetch=prefetch,
        )  # fmt: skip

    reference = list(make(0, 1).batches(2))
    monkeypatch.setattr(loader_module, "_GATHER_BYTES", gather_bytes)
    monkeypatch.setattr(loader_module, "_THREAD_BYTES", 0)
    for num_shards in (1, 2, 3, 8):
        for first_batch in (0, 3, 7):
            together = global_batches(make, num_shards, epoch=2, first_batch=first_batch)
            assert len(together) == 8 - first_batch
            for expected, got in zip(reference[first_batch:], together, strict=True):
                assert torch.equal(expected.inputs, got.inputs) and torch.equal(expected.targets, got.targets)


def test_batches_equal_gather_bit_for_bit():
    source = images(40)
    for inputs, targets in Loader(source, batch_size=16, seed=0, shuffle=True).batches(0):
        assert torch.equal(inputs, source.gather(targets).inputs)


def test_augmentation_changes_with_the_epoch():
    loader = Loader(images(30), batch_size=30, seed=0, shuffle=False, augment=("crop",))
    one, other = (next(iter(loader.batches(epoch))) for epoch in (0, 1))
    assert torch.equal(one.targets, other.targets)
    assert not torch.equal(one.inputs, other.inputs)


def test_padding_is_black_before_normalisation():
    white = ArraySource(torch.full((200, 1, 8, 8), 255, dtype=torch.uint8), torch.zeros(200), Scale((51.0,), (1 / 51,)))
    (batch,) = Loader(white, batch_size=200, seed=0, shuffle=True, augment=("crop",)).batches(0)
    torch.testing.assert_close(batch.inputs.unique(), torch.tensor([-1.0, 4.0]))


def test_more_shards_than_samples_in_a_batch_give_empty_parts():
    loader = Loader(images(5), batch_size=2, seed=0, shuffle=True, shard=3, num_shards=4, augment=("flip",))
    batches = list(loader.batches(0))
    assert [batch.num_samples for batch in batches] == [0, 0, 0]
    assert batches[0].inputs.shape == (0, 3, 8, 8) and batches[0].inputs.dtype == torch.float32


def test_training_batch_larger_than_the_data():
    with pytest.raises(DataError, match=r"training.batch_size = 64 is larger than the training set \(10 samples\)"):
        Loader(numbered(10), batch_size=64, seed=0, shuffle=True)


def test_evaluation_batch_may_be_larger():
    (batch,) = Loader(numbered(10), batch_size=64, seed=0, shuffle=False).batches(0)
    assert batch.targets.tolist() == list(range(10))


def test_augment_needs_images():
    with pytest.raises(JobError, match="is for images"):
        Loader(numbered(10), batch_size=2, seed=0, shuffle=True, augment=("crop",))


def test_start_beyond_the_epoch_gives_nothing():
    assert list(Loader(numbered(10), batch_size=5, seed=0, shuffle=True).batches(0, first_batch=2)) == []


def test_drawing_batches_leaves_the_generators_alone():
    state = torch.get_rng_state()
    list(Loader(images(20), batch_size=5, seed=0, shuffle=True, augment=("crop", "flip")).batches(0))
    assert torch.equal(state, torch.get_rng_state())


def has_thread() -> bool:
    return any(thread.name == "cordee-prefetch" for thread in threading.enumerate())


@pytest.mark.parametrize("how", ["close", "interrupt", "drop"])
def test_nothing_goes_on_when_the_batches_are_left(how):
    loader = Loader(images(3000), batch_size=1400, seed=0, shuffle=True, augment=("crop",))
    batches = loader.batches(0)
    next(batches)
    assert has_thread()
    if how == "close":
        batches.close()
    elif how == "interrupt":
        with pytest.raises(KeyboardInterrupt):
            batches.throw(KeyboardInterrupt)
    else:
        del batches
    assert not has_thread()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"batch_size": 1400, "augment": ("flip",)}, True),
        ({"batch_size": 1400, "augment": ("flip",), "prefetch": 0}, False),
        ({"batch_size": 1400, "augment": ("flip",), "num_shards": 2}, False),
        ({"batch_size": 32, "augment": ("flip",)}, False),
        ({"batch_size": 1400}, False),
    ],
)
def test_thread_only_where_it_pays(settings, expected):
    batches = Loader(images(3000), seed=0, shuffle=True, **settings).batches(0)
    next(batches)
    assert has_thread() is expected
    batches.close()
