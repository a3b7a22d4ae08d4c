"""Data sets of the library `datasets`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from table_files import load
from test_images import picture
from test_tables import everything, refused

from cordee.core.errors import DataError, JobError
from cordee.core.settings import Data
from cordee.data import ArraySource, Loader, load_data
from cordee.data.blocks import BlockSource

datasets = pytest.importorskip("datasets")


def numbered(size: int = 60) -> Any:
    features = datasets.Features(
        {
            "x": datasets.Sequence(datasets.Value("float32"), length=2),
            "label": datasets.ClassLabel(names=["ash", "elm", "oak"]),
        }
    )
    rows = {"x": [[float(n), -float(n)] for n in range(size)], "label": [n % 3 for n in range(size)]}
    return datasets.Dataset.from_dict(rows, features=features)


def make_numbered() -> Any:
    return numbered(30)


def double(row: dict[str, Any]) -> tuple[torch.Tensor, int]:
    return 2 * torch.tensor(row["x"]), row["label"]


def test_a_live_data_set_has_columns_classes_and_names() -> None:
    splits = load_data(Data(use=numbered()), seed=0)
    assert (splits.num_classes, splits.class_names, splits.input_shape) == (3, ("ash", "elm", "oak"), (2,))
    inputs, targets = everything(splits.train)
    assert isinstance(splits.train, ArraySource)
    assert inputs[:, 0].tolist() == list(range(60)) and targets.tolist() == [n % 3 for n in range(60)]


def test_rows_that_were_selected_filtered_or_shuffled_are_in_their_order() -> None:
    chosen = numbered().filter(lambda row: row["label"] != 1).shuffle(seed=1).select(range(10))
    inputs, _ = everything(load_data(Data(use=chosen), seed=0).train)
    assert inputs[:, 0].tolist() == [row[0] for row in chosen["x"]]


def test_the_columns_of_a_format_are_those_that_are_used() -> None:
    rows = numbered().add_column("number", list(range(60)))
    rows.set_format("torch", columns=["x", "label"])
    splits = load_data(Data(use=rows), seed=0)
    assert splits.input_shape == (2,)
    with pytest.raises(DataError, match="no column 'number'"):
        load_data(Data(use=rows, args={"columns": ("number",)}), seed=0)


def test_a_transform_of_the_data_set_is_refused() -> None:
    """Rows are read as they are stored, so that it would have no effect."""
    rows = numbered()
    rows.set_transform(lambda batch: {"x": [[0.0, 0.0] for _ in batch["x"]], "label": batch["label"]})
    with pytest.raises(DataError, match=r"the training set has a transform .*set_transform.*data.transform"):
        load_data(Data(use=rows), seed=0)


def test_classes_of_the_test_set_in_another_order_are_refused(tmp_path: Path) -> None:
    other = datasets.Features({**numbered().features, "label": datasets.ClassLabel(names=["oak", "elm", "ash"])})
    both = datasets.DatasetDict(
        train=numbered(), test=datasets.Dataset.from_dict(numbered(3).to_dict(), features=other)
    )
    both.save_to_disk(tmp_path / "both")
    refused(
        r"class 0 is 'ash' in the training set and 'oak' in the test set", use="huggingface", path=tmp_path / "both"
    )


def test_what_was_saved_to_disk(tmp_path: Path) -> None:
    numbered(400_000).save_to_disk(tmp_path / "one", num_shards=3)
    splits = load("huggingface", path=tmp_path / "one", memory_mb=1, test_fraction=0.1)
    assert isinstance(splits.train, BlockSource) and splits.train.num_samples == 360_000
    batches = Loader(splits.train, batch_size=5_000, seed=0, shuffle=True).batches(0)
    found = torch.cat([batch.inputs[:, 0] for batch in batches])
    tested = everything(splits.test)[0][:, 0]
    assert torch.cat([found, tested]).sort().values.tolist() == list(range(400_000))
    datasets.DatasetDict({"train": numbered(50), "test": numbered(20), "extra": numbered(5)}).save_to_disk(
        tmp_path / "dict"
    )
    splits = load("huggingface", path=tmp_path / "dict")
    assert splits.train.num_samples == 50 and splits.test is not None and splits.test.num_samples == 20
    splits = load("huggingface", path=tmp_path / "dict", split="extra", test_split="train")
    assert splits.train.num_samples == 5 and splits.test is not None and splits.test.num_samples == 50
    refused(
        r"data.split = 'trian': the DatasetDict has no such split; did you mean 'train'",
        use="huggingface",
        path=tmp_path / "dict",
        split="trian",
    )
    refused(
        r"data.split and data.test_split are for a DatasetDict",
        JobError,
        use="huggingface",
        path=tmp_path / "one",
        split="extra",
    )


def test_a_callable_that_gives_the_data_set() -> None:
    splits = load("huggingface", dataset=make_numbered, columns=["x"])
    assert splits.train.num_samples == 30 and splits.class_names == ("ash", "elm", "oak")
    rows = load("huggingface", dataset=make_numbered, transform=double, num_classes=3)
    assert everything(rows.train)[0][:3, 0].tolist() == [0.0, 2.0, 4.0]
    refused(r"needs data.path, .* or data.dataset", JobError, use="huggingface")


def test_images(tmp_path: Path) -> None:
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    rows = {"image": [{"bytes": picture(n), "path": None} for n in range(4)], "label": [0, 1, 0, 1]}
    data = datasets.Dataset.from_dict(rows, features=features)
    splits = load_data(Data(use=data, args={"color": "gray"}), seed=0)
    assert (splits.input_shape, splits.num_classes, splits.class_names) == ((1, 4, 6), 2, ("cat", "dog"))
    assert everything(splits.train)[1].tolist() == [0, 1, 0, 1]


def test_what_is_no_data_set_with_random_access(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"is a datasets.*IterableDataset, not a Dataset.*A stream has no random access"
    ):
        load_data(Data(use=numbered().to_iterable_dataset()), seed=0)
    refused(
        r"data.path = '.*nothing' does not exist, or was not saved with save_to_disk",
        use="huggingface",
        path=tmp_path / "nothing",
    )
    refused(
        r"the training set has no column 'lable'; did you mean 'label'",
        use="huggingface",
        dataset=make_numbered,
        label="lable",
    )
    empty = numbered().select([])
    with pytest.raises(DataError, match="the training set has no samples"):
        load_data(Data(use=empty), seed=0)
