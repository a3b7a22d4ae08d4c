"""Samples of any build become batches, and what cannot is said by name."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from cordee.core.errors import CordeeError, DataError, JobError
from cordee.core.settings import Data
from cordee.data.load import load_data
from cordee.data.loader import Loader
from cordee.data.samples import SampleFormat


class Listed(Dataset[Any]):
    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


@dataclass
class Sample:
    image: Tensor
    mask: Any
    label: int


def load(use: Any, **settings: Any) -> Any:
    return load_data(Data(use=use, **settings), seed=0)


def padded(samples: list[dict[str, Any]]) -> Any:
    longest = max(len(sample["ids"]) for sample in samples)
    rows = [sample["ids"] + [0] * (longest - len(sample["ids"])) for sample in samples]
    return UserDict(ids=np.array(rows, dtype=np.int32), labels=np.array([sample["label"] for sample in samples]))


RAGGED = [{"ids": list(range(1, 2 + i % 5)), "label": i % 3} for i in range(23)]


def test_dicts_dataclasses_and_long_tuples() -> None:
    dicts = [{"x": np.full(2, i, np.float64), "m": [True, False], "label": i % 2} for i in range(6)]
    batch = load(Listed(dicts)).train.gather(torch.tensor([3, 1]))
    assert batch.inputs["x"].dtype == torch.float32 and batch.inputs["x"].tolist() == [[3, 3], [1, 1]]
    assert batch.inputs["m"].dtype == torch.bool and batch.targets.tolist() == [1, 1]
    named = load(Listed(dicts), inputs=("m",), target="x").train.gather(torch.tensor([0]))
    assert list(named.inputs) == ["m"] and named.targets.tolist() == [[0.0, 0.0]]
    several = load(Listed(dicts), inputs=("m",), target=("x", "label")).train.gather(torch.tensor([5]))
    assert list(several.targets) == ["x", "label"]
    parts = [Sample(torch.ones(2, 2), None, i % 2) for i in range(4)]
    batch = load(Listed(parts)).train.gather(torch.tensor([0, 1]))
    assert list(batch.inputs) == ["image", "mask"] and batch.inputs["mask"] is None and batch.targets.tolist() == [0, 1]
    batch = load(Listed([(torch.ones(2), {"deep": torch.zeros(3)}, 1) for _ in range(4)])).train.gather(torch.arange(2))
    assert batch.inputs[1]["deep"].shape == (2, 3)
    # Bytes among several inputs may be a mask: they stay whole numbers.
    assert load({"m": np.ones((4, 2), np.uint8), "label": [0, 1, 0, 1]}).train.gather(torch.arange(1)).inputs[
        "m"
    ].tolist() == [[1, 1]]


def test_data_without_targets() -> None:
    assert load(Listed([{"x": torch.ones(2)}] * 3)).train.gather(torch.arange(2)).targets is None


def test_a_collate_function_makes_the_batches() -> None:
    splits = load(Listed(RAGGED), collate=padded, test_fraction=0.2)
    assert splits.num_classes == 3
    loader = Loader(splits.train, batch_size=4, seed=0, shuffle=True, shard=1, num_shards=2)
    for batch in loader.batches(0):
        if batch.num_samples:
            longest = (batch.inputs["ids"] > 0).sum(1).max()
            assert (
                batch.inputs["ids"].shape == (batch.num_samples, longest) and batch.inputs["ids"].dtype == torch.int64
            )


@pytest.mark.parametrize("processes", [0, 2])
def test_shards_are_collated_by_themselves_where_they_must_not_depend_on_others(processes: int) -> None:
    source = load(Listed(RAGGED), collate=padded).train

    def pieces(first: int, held: int) -> list[list[Any]]:
        loader = Loader(
            source,
            batch_size=8,
            seed=0,
            shuffle=True,
            shard=first,
            num_shards=4,
            num_held=held,
            in_pieces=True,
            processes=processes,
        )
        return [[p.inputs["ids"].tolist() for p in (b if held > 1 else [b])] for b in loader.batches(0)]

    all_held, halves = pieces(0, 4), zip(pieces(0, 2), pieces(2, 2), strict=True)
    assert all_held == [[*one, *two] for one, two in halves]
    alone = zip(*(pieces(shard, 1) for shard in range(4)), strict=True)
    assert all_held == [[piece for own in step for piece in own] for step in alone]


class Flow(IterableDataset[Any]):
    num_classes = 3

    def __iter__(self) -> Any:
        return iter(RAGGED)


def test_streams_are_collated_too() -> None:
    loader = Loader(load(Flow(), collate=padded).train, batch_size=8, seed=0, shuffle=False, num_held=2, num_shards=2)
    assert [batch.num_samples for batch in loader.batches(0)] == [8, 8, 7]
    split = Loader(
        load(Flow(), collate=padded).train,
        batch_size=8,
        seed=0,
        shuffle=False,
        num_held=2,
        num_shards=2,
        in_pieces=True,
    )
    assert [[piece.num_samples for piece in batch] for batch in split.batches(0)] == [[4, 4], [4, 4], [4, 3]]


GOOD = {"x": torch.ones(2), "label": 0}


@pytest.mark.parametrize(
    ("samples", "settings", "message"),
    [
        ([{"x": "text", "label": 0}], {}, "inputs of the training set, 'x', are a str: .* leave them out"),
        (
            [GOOD, {"y": torch.ones(2), "label": 0}],
            {"train_limit": 2},
            "keys 'x', sample 1 is a dict with the keys 'y'",
        ),
        (
            [GOOD, {"x": torch.ones(3), "label": 0}],
            {},
            r"'x', cannot be stacked .*shape \(2,\).*shape \(3,\).*data.coll",
        ),
        (RAGGED, {}, "a list of 1, sample 1 is a list of 2: bring all .* or set data.collate"),
        ([GOOD], {"inputs": ("z",)}, r"data.inputs names 'z', and sample 0 of the training set has none .*x, label\)"),
        ([GOOD], {"target": "labels"}, r"names 'labels', and sample 0 .* has none; did you mean 'label'"),
        ([(torch.ones(2), 1)], {"target": "y"}, "data.target names parts of a dict, and sample 0 .* is a tuple of 2"),
        ([GOOD], {"collate": lambda samples: 5}, "what data.collate made of the training set must be a pair"),
        (
            [GOOD],
            {"collate": lambda samples: {"x": [["a"]]}},
            "in what data.collate made .*, 'x', '0', '0', are a str",
        ),
        ([GOOD], {"collate": lambda s: {"x": torch.ones(3, 2)}}, "batch of 1 samples .* inputs 'x' has 3 rows"),
        (
            [GOOD],
            {"collate": lambda s: {"x": torch.ones(1), "n": torch.tensor(1)}},
            "its inputs 'n' is a single number",
        ),
        ([GOOD], {"collate": lambda s: 1 / 0}, "data.collate raised ZeroDivisionError for 1 samples"),
    ],
)
def test_bad_samples(samples: list[Any], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        source = load(Listed(samples), **settings).train
        source.gather(torch.arange(len(samples)))


@pytest.mark.parametrize(
    ("use", "settings", "message"),
    [
        ("digits", {"collate": padded}, "data.collate makes batches .*digits is made of arrays"),
        ("digits", {"inputs": ("x",)}, "data.inputs chooses parts of a sample by name, and the samples of digits"),
        (
            {"a": torch.ones(3, 2), "b": torch.ones(4, 2)},
            {},
            "'b' of the training set have 4 rows, and .* 'a' .* have 3",
        ),
        ({"a": torch.full((2, 2), float("nan"))}, {}, "inputs 'a' of the training set: sample 0 has a value"),
        ({"a": ["x", "y"], "label": [0, 1]}, {}, "the inputs 'a' of the training set have the type"),
        ("digits", {"collate": "nowhere:nothing"}, "no module 'nowhere'"),
    ],
)
def test_bad_settings(use: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CordeeError, match=message):
        load(use, **settings)


def test_augmentation_is_for_one_image() -> None:
    source = load(
        {"a": torch.ones(4, 3, 8, 8), "b": torch.ones(4, 1), "c": torch.ones(4, 1), "label": [0, 1, 0, 1]}
    ).train
    with pytest.raises(JobError, match=r"data.augment = .* is for images"):
        Loader(source, batch_size=2, seed=0, shuffle=True, augment=["flip"])


def test_what_collate_draws_follows_from_the_samples() -> None:
    def drawing(samples: list[Any]) -> Any:
        return {"x": torch.rand(len(samples), 2), "label": torch.tensor([sample["label"] for sample in samples])}

    made = SampleFormat(collate=drawing)
    state = torch.get_rng_state()
    one, two = (made.batch([GOOD, GOOD], [0, 1], "it", seed=seed) for seed in (7, 7))
    assert torch.equal(one.inputs["x"], two.inputs["x"]) and torch.equal(state, torch.get_rng_state())
