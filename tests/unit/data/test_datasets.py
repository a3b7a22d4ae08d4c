from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset
from user_data import AtOnce, Drawing, Failing, Giving, Numbered, Stream

from cordee.core.errors import DataError, JobError
from cordee.core.settings import Data
from cordee.data import ArraySource, Loader, load_data
from cordee.data.datasets import DatasetSource, IterableSource


def loaded(use, **settings):
    return load_data(Data(use=use, **settings), seed=0)


def joined(source, num_shards: int, first_batch: int = 0, **settings) -> list[torch.Tensor]:
    shards = [
        list(
            Loader(source, batch_size=6, seed=3, shuffle=True, shard=shard, num_shards=num_shards, **settings)
            .batches(1, first_batch)
        )
        for shard in range(num_shards)
    ]  # fmt: skip
    return [torch.cat([part.inputs for part in parts]) for parts in zip(*shards, strict=True)]


def test_map_style_dataset_is_read():
    splits = loaded(Numbered(20))
    assert (splits.input_shape, splits.num_classes, splits.train.num_samples) == ((3,), 20, 20)
    batches = list(Loader(splits.train, batch_size=6, seed=0, shuffle=True).batches(0))
    assert [batch.num_samples for batch in batches] == [6, 6, 6, 2]
    targets = torch.cat([batch.targets for batch in batches])
    assert sorted(targets.tolist()) == list(range(20)) and targets.dtype == torch.int64
    assert torch.equal(torch.cat([batch.inputs for batch in batches])[:, 0], targets.float())


def test_random_transforms_depend_on_the_position_alone():
    source = loaded(Drawing(20)).train
    whole = joined(source, 1)
    for num_shards in (2, 3, 7):
        assert all(torch.equal(one, other) for one, other in zip(whole, joined(source, num_shards), strict=True))
    resumed = joined(source, 1, first_batch=2)
    assert all(torch.equal(one, other) for one, other in zip(whole[2:], resumed, strict=True))
    drawn = torch.cat(whole)
    assert all(len(drawn[:, column].unique()) == 20 for column in range(3))


def test_reading_leaves_the_generators_of_the_process_alone():
    source = loaded(Drawing(20)).train
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(())
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    list(Loader(source, batch_size=6, seed=0, shuffle=True).batches(0))
    loaded(Drawing(20))
    assert (random.random(), np.random.rand(), torch.rand(())) == expected


def test_empty_part_has_the_right_shape():
    source = loaded(Numbered(20)).train
    (batch, *_) = Loader(source, batch_size=2, seed=0, shuffle=True, shard=3, num_shards=4).batches(0)
    assert batch.inputs.shape == (0, 3) and batch.targets.shape == (0,) and batch.targets.dtype == torch.int64


def test_whole_batches_are_asked_for_where_the_dataset_can():
    dataset = AtOnce(20, num_classes=20)
    source = loaded(dataset).train
    dataset.calls = 0
    list(Loader(source, batch_size=10, seed=0, shuffle=True).batches(0))
    assert dataset.calls == 2


def test_images_can_be_augmented():
    image = torch.arange(3 * 8 * 8.0).view(3, 8, 8)
    source = loaded(Giving((image, 0), size=30)).train
    whole = joined(source, 1, augment=("crop", "flip"))
    assert all(torch.equal(a, b) for a, b in zip(whole, joined(source, 4, augment=("crop", "flip")), strict=True))
    assert len(torch.cat(whole).unique(dim=0)) > 10


def test_failing_sample_is_named_and_chained():
    source = loaded(Failing(20, num_classes=20)).train
    with pytest.raises(DataError, match=r"reading sample 13 of the training set raised OSError: cannot open") as caught:
        list(Loader(source, batch_size=5, seed=0, shuffle=True).batches(0))
    assert isinstance(caught.value.__cause__, OSError)
    assert "user_data.py" in str(caught.value)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"label": 2}, "has nothing but its target 'label'"),
        (torch.zeros(3), r"the dataset gave a Tensor of shape \(3,\)"),
        ([1, 2, 3], "the dataset gave a list of 3"),
        (("text", 1), "inputs of the training set are a str"),
        ((torch.zeros(3), None), "cannot be stacked into a batch: sample 0 is a NoneType"),
        ((2.0, 1), "an input of the training set is a single number"),
        ((torch.zeros(2), -1), "label at position 0 is -1"),
    ],
)
def test_samples_that_are_not_pairs(item, message):
    with pytest.raises(DataError, match=message):
        loaded(Giving(item))


def test_samples_of_different_shapes():
    class Ragged(Numbered):
        def __getitem__(self, index):
            return torch.zeros(index + 1), 0

    source = loaded(Ragged(4, num_classes=1)).train
    with pytest.raises(DataError, match=r"cannot be stacked .*shape \(1,\).*shape \(2,\)"):
        source.gather(torch.tensor([0, 1]))


def test_label_beyond_the_declared_classes_is_found_when_read():
    source = loaded(Numbered(20, num_classes=15)).train
    with pytest.raises(DataError, match=r"label at position 1[5-9] is 1[5-9], but labels must be from 0 to 14"):
        list(Loader(source, batch_size=20, seed=0, shuffle=True).batches(0))


def test_dataset_without_samples():
    with pytest.raises(DataError, match="the training set has no samples"):
        loaded(Numbered(0))


def test_classes_are_counted_declared_or_asked_for(monkeypatch):
    assert loaded(Numbered(12)).num_classes == 12
    assert loaded(Numbered(12, num_classes=40)).num_classes == 40
    assert loaded(Subset(Numbered(12, num_classes=40), [1, 2])).num_classes == 40
    named, listed = Numbered(3), Numbered(3)
    named.classes, listed.targets = ["cat", "dog", "cow", "hen"], [0, 1, 6]
    assert (loaded(named).num_classes, loaded(listed).num_classes) == (4, 7)
    assert loaded(Giving((torch.zeros(2), 0.5))).num_classes is None
    monkeypatch.setattr("cordee.data.user_data.LARGEST_COUNTED", 5)
    with pytest.raises(DataError, match="give the Numbered an attribute num_classes"):
        loaded(Numbered(6))


def test_tensor_datasets_are_held_in_memory():
    dataset = TensorDataset(torch.arange(12.0).view(6, 2), torch.tensor([0, 1, 2, 0, 1, 2]))
    assert isinstance(loaded(dataset).train, ArraySource)
    part = loaded(Subset(dataset, [5, 0])).train
    assert isinstance(part, ArraySource)
    assert part.gather(torch.arange(2)).inputs.tolist() == [[10.0, 11.0], [0.0, 1.0]]


def test_limits_and_share_set_aside():
    splits = loaded(Numbered(20), test_fraction=0.25, train_limit=10, test_limit=3)
    assert isinstance(splits.train, DatasetSource)
    assert (splits.train.num_samples, splits.test.num_samples, splits.num_classes) == (10, 3, 20)
    train, test = (source.gather(torch.arange(source.num_samples)).targets for source in (splits.train, splits.test))
    assert not set(train.tolist()) & set(test.tolist())


@pytest.mark.parametrize("num_shards", [1, 3, 4])
@pytest.mark.parametrize("first_batch", [0, 1, 2])
def test_stream_is_cut_alike_for_any_number_of_shards(num_shards, first_batch):
    source = loaded(Stream(10)).train
    assert isinstance(source, IterableSource)
    loaders = [
        Loader(source, batch_size=4, seed=0, shuffle=True, shard=shard, num_shards=num_shards)
        for shard in range(num_shards)
    ]
    assert loaders[0].num_batches is None
    reference = list(Loader(source, batch_size=4, seed=0, shuffle=True).batches(5))
    shards = [list(loader.batches(5, first_batch)) for loader in loaders]
    together = [torch.cat([part.inputs for part in parts]) for parts in zip(*shards, strict=True)]
    assert len(together) == 3 - first_batch
    assert all(torch.equal(a.inputs, b) for a, b in zip(reference[first_batch:], together, strict=True))
    assert torch.cat([batch.inputs for batch in reference])[:, :2].tolist() == [[5.0, number] for number in range(10)]


def test_stream_augmented_alike_for_any_number_of_shards():
    class Pictures(Stream):
        def __iter__(self):
            generator = torch.Generator().manual_seed(0)
            for number in range(self.size):
                yield torch.rand(1, 8, 8, generator=generator), number

    source = loaded(Pictures(10)).train
    whole, *shards = (
        list(Loader(source, batch_size=4, seed=0, shuffle=True, augment=("crop",), **cut).batches(0))
        for cut in ({}, *({"shard": shard, "num_shards": 3} for shard in range(3)))
    )
    for expected, *parts in zip(whole, *shards, strict=True):
        assert torch.equal(expected.inputs, torch.cat([part.inputs for part in parts]))


def test_stream_is_closed_with_its_batches():
    dataset = Stream(10)
    batches = Loader(loaded(dataset).train, batch_size=4, seed=0, shuffle=True).batches(0)
    next(batches)
    assert not dataset.is_closed
    batches.close()
    assert dataset.is_closed


def test_streams_that_fail():
    with pytest.raises(DataError, match=r"reading sample 7 of the training set raised ValueError: line 7"):
        list(Loader(loaded(Stream(10, fail_at=7)).train, batch_size=4, seed=0, shuffle=True).batches(0))
    with pytest.raises(DataError, match="has no samples"):
        loaded(Stream(0))
    with pytest.raises(JobError, match=r"test_fraction = 0.5 cannot be set aside from an IterableDataset"):
        loaded(Stream(10), test_fraction=0.5)
    with pytest.raises(JobError, match=r"data.processes = 2: an IterableDataset is one stream"):
        Loader(loaded(Stream(10)).train, batch_size=4, seed=0, shuffle=True, processes=2)
    with pytest.raises(DataError, match="can only be read in order"):
        loaded(Stream(10)).train.gather(torch.tensor([1]))


def test_limited_stream():
    source = loaded(Stream(10), train_limit=6).train
    assert [batch.num_samples for batch in Loader(source, batch_size=4, seed=0, shuffle=True).batches(0)] == [4, 2]
