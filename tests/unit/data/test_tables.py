"""Parquet and Arrow files, tables at hand: what becomes of them, and what is wrong with them."""

from __future__ import annotations

import datetime
import importlib
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch
from table_files import large, load, numbered, write

from cordee.core.errors import CordeeError, DataError, JobError, MissingExtraError
from cordee.core.job import Job
from cordee.core.settings import Data
from cordee.data import ArraySource, Loader, Source, load_data
from cordee.data.blocks import BlockSource
from cordee.data.parquet import ParquetFiles
from cordee.data.source import check_same, fingerprint


def everything(source: Source | None) -> tuple[torch.Tensor, torch.Tensor]:
    assert source is not None and source.num_samples is not None
    batch = source.gather(torch.arange(source.num_samples))
    return batch.inputs, batch.targets


def double(row: dict[str, Any]) -> tuple[torch.Tensor, int]:
    return torch.tensor([2 * row["a"], torch.rand(()).item()]), row["label"]


# What becomes of columns


def test_columns_become_features_and_the_label_classes(tmp_path: Path) -> None:
    splits = load(path=write(tmp_path / "a.parquet"))
    inputs, targets = everything(splits.train)
    assert isinstance(splits.train, ArraySource)
    assert (splits.num_classes, splits.input_shape, splits.test, splits.name) == (3, (2,), None, "parquet")
    assert inputs.dtype == torch.float32 and targets.dtype == torch.int64
    assert inputs.tolist() == [[float(n), -float(n)] for n in range(100)]
    assert targets.tolist() == [n % 3 for n in range(100)]


def test_large_files_give_the_same_samples_block_by_block(tmp_path: Path) -> None:
    path = large(tmp_path / "a.parquet")
    whole, blocks = load(path=path), load(path=path, memory_mb=1)
    assert isinstance(whole.train, ArraySource) and isinstance(blocks.train, BlockSource)
    some = torch.tensor([0, 399_999, 2_000, 1_999, 7, 123_456])
    for one, other in zip(whole.train.gather(some), blocks.train.gather(some)):
        assert torch.equal(one, other)
    assert (blocks.num_classes, blocks.input_shape) == (whole.num_classes, whole.input_shape)
    seen = torch.cat(
        [batch.inputs[:, 0] for batch in Loader(blocks.train, batch_size=1000, seed=0, shuffle=True).batches(1)]
    )
    assert torch.equal(seen.sort().values, torch.arange(400_000.0))
    assert not torch.equal(seen[:2_000].sort().values, seen[:2_000])


@pytest.mark.parametrize(
    ("column", "shape", "dtype"),
    [
        (pa.FixedSizeListArray.from_arrays(pa.array(range(24), pa.uint8()), 4), (4,), torch.float32),
        (pa.array([[1, 2, 3, 4]] * 6, pa.list_(pa.int32())), (4,), torch.int64),
        (pa.array([[0.5, 1, 2]] * 6, pa.large_list(pa.float64())), (3,), torch.float32),
        (pa.array([[[1.0, 2.0]] * 3] * 6), (3, 2), torch.float32),
        (pa.array([b"abcd"] * 6, pa.binary(4)), (4,), torch.float32),
        (pa.array([b"abcd"] * 6), (4,), torch.float32),
        (pa.array([7] * 6, pa.uint8()), (1,), torch.float32),
        (pa.array([True] * 6), (1,), torch.float32),
        (pa.array([2.5] * 6, pa.float16()), (1,), torch.float32),
    ],
)
def test_types_of_a_column(column: pa.Array, shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", pa.table({"x": column, "label": [0, 1, 2, 0, 1, 2]}), rows=4)
    inputs, _ = everything(load(path=path).train)
    assert (tuple(inputs.shape[1:]), inputs.dtype) == (shape, dtype)
    expected = column.to_pylist()
    if isinstance(expected[0], bytes):
        expected = [list(value) for value in expected]
    values = torch.tensor(expected).reshape(6, *shape)
    scale = 255 if shape == (4,) and dtype == torch.float32 else 1  # bytes become numbers from 0 to 1
    torch.testing.assert_close(inputs, (values / scale).to(dtype))


def test_kind_and_shape_are_as_asked_for(tmp_path: Path) -> None:
    column = pa.FixedSizeListArray.from_arrays(pa.array(range(24), pa.uint8()), 4)
    path = write(tmp_path / "a.parquet", pa.table({"x": column, "label": [0, 1, 2, 0, 1, 2]}))
    numbers, _ = everything(load(path=path, kind="numbers", shape=[1, 2, 2]).train)
    assert numbers.shape == (6, 1, 2, 2) and float(numbers.max()) == 23.0
    assert everything(load(path=path, kind="tokens").train)[0].dtype == torch.int64
    with pytest.raises(DataError, match=r"data.shape = \[5\] has 5 values, and a row of .* has 4 \('x'\)"):
        load(path=path, shape=[5])
    with pytest.raises(DataError, match=r"data.kind = 'tokens', but not all of 'a', 'b'"):
        load(path=write(tmp_path / "b.parquet"), kind="tokens")
    with pytest.raises(DataError, match=r"data.kind = 'bytes', but not all of 'a', 'b'"):
        load(path=tmp_path / "b.parquet", kind="bytes")


def test_sliced_and_chunked_tables_at_hand() -> None:
    column = pa.chunked_array([pa.array([b"ab", b"cd"]), pa.array([b"xx", b"ef"]).slice(1)])
    table = pa.table({"x": column, "label": pa.array([9, 0, 1, 0]).slice(1)})
    inputs, targets = everything(load_data(Data(use=table, args={"kind": "bytes"}), seed=0).train)
    assert torch.equal(
        (inputs * 255).round().to(torch.uint8), torch.tensor([list(b"ab"), list(b"cd"), list(b"ef")], dtype=torch.uint8)
    )
    assert targets.tolist() == [0, 1, 0]
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(10.0)), 2).slice(1, 3)
    inputs, _ = everything(load_data(Data(use=pa.table({"x": fixed, "label": [0, 1, 0]})), seed=0).train)
    assert inputs.tolist() == [[2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]


# Labels


def test_labels_of_texts_are_classes_with_names(tmp_path: Path) -> None:
    table = pa.table({"x": [1.0, 2.0, 3.0], "kind": ["oak", "ash", "oak"]})
    splits = load(path=write(tmp_path / "a.parquet", table, rows=2), label="kind")
    assert splits.class_names == ("ash", "oak") and splits.num_classes == 2
    assert everything(splits.train)[1].tolist() == [1, 0, 1]
    named = load(path=tmp_path / "a.parquet", label="kind", classes=["oak", "elm", "ash"])
    assert named.num_classes == 3 and everything(named.train)[1].tolist() == [0, 2, 0]
    assert "class 1 ('elm')" in named.warnings[0]
    with pytest.raises(DataError, match=r"the label of row 1 is 'ash', which is no class"):
        load(path=tmp_path / "a.parquet", label="kind", classes=["oak", "elm"])
    encoded = pa.table({"x": [1.0, 2.0], "label": pa.array(["b", "a"]).dictionary_encode()})
    assert everything(load(path=write(tmp_path / "d.parquet", encoded)).train)[1].tolist() == [1, 0]


def test_numbers_to_predict(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", pa.table({"x": [1.0, 2.0], "label": [0.5, 1.5]}))
    splits = load(path=path)
    assert splits.num_classes is None and everything(splits.train)[1].tolist() == [0.5, 1.5]
    counted = write(tmp_path / "b.parquet")
    assert load(path=counted, regression=True).num_classes is None
    with pytest.raises(DataError, match="has the type double, and the job names classes"):
        load(path=path, num_classes=3)
    with pytest.raises(JobError, match=r"data.regression = true predicts numbers"):
        load(path=counted, regression=True, num_classes=3)


def test_the_number_of_classes_comes_from_all_files(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", numbered(20, num_classes=3))
    write(tmp_path / "b.parquet", numbered(20, num_classes=7))
    assert load(path=tmp_path).num_classes == 7
    pq.write_table(numbered(20, num_classes=5), tmp_path / "b.parquet", write_statistics=False)
    assert load(path=tmp_path).num_classes == 5  # the labels are read


def test_labels_out_of_range_are_named_with_file_and_row(tmp_path: Path) -> None:
    path = large(tmp_path / "a.parquet", 300_000)
    splits = load(path=path, num_classes=3, memory_mb=1)
    assert splits.num_classes == 3
    for memory in (1, 256):
        with pytest.raises(
            DataError, match=r"row group 0 of .*a.parquet: the label at position 2 is 2, but labels must be from 0 to 1"
        ):
            load(path=path, num_classes=2, memory_mb=memory)
    pq.write_table(
        pa.concat_tables(
            [numbered(300_000, 3), pa.table({"a": pa.array([1.0], pa.float32()), "b": [0], "label": [8]})]
        ),
        path,
        row_group_size=1000,
    )
    splits = load(path=path, num_classes=3, memory_mb=1)
    with pytest.raises(DataError, match=r"row group 300 of .*the label at position 300000 is 8"):
        splits.train.gather(torch.tensor([300_000]))


@pytest.mark.parametrize("statistics", [True, False])
def test_odd_labels_are_refused(statistics: bool, tmp_path: Path) -> None:
    def wrong(labels: list[int], match: str) -> None:
        pq.write_table(
            pa.table({"x": [1.0] * len(labels), "label": labels}), tmp_path / "a.parquet", write_statistics=statistics
        )
        with pytest.raises(DataError, match=match):
            load(path=tmp_path / "a.parquet")

    wrong([1, 2, 3], r"labels in 'label' are from 1 to 3, and classes are counted from 0")
    wrong([0, -1, 2], r"the label at position 1 is -1")


def test_a_label_that_the_loss_ignores(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", pa.table({"x": [1.0, 2.0, 3.0], "label": [0, -100, 1]}))
    splits = load_data(Data(use="parquet", args={"path": str(tmp_path)}), seed=0, ignored=-100)
    assert splits.num_classes == 2
    write(tmp_path / "a.parquet", pa.table({"x": [1.0, 2.0, 3.0], "label": [0, 255, 1]}))
    splits = load_data(Data(use="parquet", args={"path": str(tmp_path)}), seed=0, ignored=255)
    assert splits.num_classes == 2, "the bounds in the footer say 255"


# Files, folders, patterns, URLs


def test_a_folder_a_pattern_and_a_url_are_the_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    write(tmp_path / "b.parquet", numbered(10, first=10))
    write(tmp_path / "a.parquet", numbered(10))
    write(tmp_path / "deep" / "c.parquet", numbered(10, first=20))
    write(tmp_path / "_ignored.parquet", numbered(10, first=90))
    (tmp_path / "notes.txt").write_text("not a table")
    for path in (str(tmp_path), f"{tmp_path}/**/[abc].parquet", tmp_path.as_uri(), f"{tmp_path.as_uri()}/"):
        assert everything(load(path=path).train)[0][:, 0].tolist() == list(range(30)), path
    assert everything(load(path=f"{tmp_path}/?.parquet").train)[0][:, 0].tolist() == list(range(20))
    assert load(path="a.parquet", root=str(tmp_path)).train.num_samples == 10


def test_files_behind_a_link_to_a_folder_count(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "elsewhere").mkdir()
    write(tmp_path / "here" / "a.parquet", numbered(10))
    write(tmp_path / "elsewhere" / "b.parquet", numbered(10, first=10))
    (tmp_path / "here" / "linked").symlink_to(tmp_path / "elsewhere")
    assert everything(load(path=tmp_path / "here").train)[0][:, 0].tolist() == list(range(20))


def test_files_of_an_fsspec_storage() -> None:
    memory = fsspec.filesystem("memory")
    try:
        for number in range(3):
            with memory.open(f"/store/part-{number}.parquet", "wb") as file:
                pq.write_table(numbered(100_000, first=100_000 * number), file, row_group_size=1000)
        splits = load(path="memory://store", memory_mb=1)
        assert isinstance(splits.train, BlockSource) and splits.train.num_samples == 300_000
        assert splits.train.gather(torch.tensor([0, 299_999])).inputs[:, 0].tolist() == [0.0, 299_999.0]
        assert load(path="memory://store/part-1.parquet").train.num_samples == 100_000
        with pytest.raises(DataError, match="'memory://store/other' does not exist"):
            load(path="memory://store/other")
        with pytest.raises(DataError, match="no file matches"):
            load(path="memory://store/*.csv")
    finally:
        memory.rm("/store", recursive=True)


def test_unknown_storage_is_named() -> None:
    with pytest.raises(DataError, match=r"data.path = 'nowhere://a/b' cannot be read: .*nowhere"):
        load(path="nowhere://a/b")


def test_arrow_files(tmp_path: Path) -> None:
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, numbered().schema) as writer:
        for batch in numbered(60_000).to_batches(max_chunksize=1000):
            writer.write_batch(batch)
    pyarrow.feather.write_feather(numbered(20_000, first=60_000), str(tmp_path / "b.feather"), chunksize=7_000)
    whole, blocks = load("arrow", path=tmp_path), load("arrow", path=tmp_path, memory_mb=1)
    assert isinstance(blocks.train, BlockSource) and len(blocks.train.blocks.sizes) == 63
    assert torch.equal(everything(whole.train)[0], everything(blocks.train)[0])
    assert everything(whole.train)[0][:, 0].tolist() == list(range(80_000))
    (tmp_path / "c.arrow").write_bytes(b"ARROW1 and then nothing of the kind")
    with pytest.raises(DataError, match=r"cannot read .*c.arrow: the file is damaged, truncated, or of another format"):
        load("arrow", path=tmp_path)


def test_a_table_at_hand_and_one_to_test_on() -> None:
    splits = load_data(Data(use=numbered(50), args={"test": numbered(20), "columns": ["b"]}), seed=0)
    assert (splits.train.num_samples, splits.test and splits.test.num_samples, splits.input_shape) == (50, 20, (1,))
    with pytest.raises(JobError, match=r"data has no setting 'colums'; did you mean 'columns'"):
        load_data(Data(use=numbered(50), args={"colums": ["b"]}), seed=0)


def make_table(size: int) -> pa.Table:
    return numbered(size)


def test_a_callable_that_gives_a_table() -> None:
    assert load_data(Data(use=make_table, args={"size": 40}), seed=0).train.num_samples == 40


# Parts of it


@pytest.mark.parametrize("memory_mb", [1, 256])
def test_test_fraction_and_limits(memory_mb: int, tmp_path: Path) -> None:
    path = large(tmp_path / "a.parquet", 100_000)
    splits = load(path=path, memory_mb=memory_mb, test_fraction=0.1, train_limit=500, test_limit=9_999)
    train, test = everything(splits.train)[0][:, 0], everything(splits.test)[0][:, 0]
    assert (len(train), len(test)) == (500, 9_999) and not set(train.tolist()) & set(test.tolist())
    other = load(path=path, memory_mb=memory_mb, test_fraction=0.1, seed=1)
    assert everything(other.test)[0][:9_999, 0].tolist() != test.tolist()


def test_a_test_set_of_its_own_has_the_same_columns(tmp_path: Path) -> None:
    train, test = write(tmp_path / "a.parquet"), write(tmp_path / "t.parquet", numbered(30))
    splits = load(path=train, test=test)
    assert splits.test is not None and splits.test.num_samples == 30
    write(test, pa.table({"a": [1.0], "b": [2], "label": [0]}))
    with pytest.raises(DataError, match=r"column 'a' has the type float in .*a.parquet and double in .*t.parquet"):
        load(path=train, test=test)
    write(test, pa.table({"a": numbered()["a"], "label": numbered()["label"]}))
    refused(r"t.parquet has no column 'b', which .*a.parquet has", path=train, test=test)
    with pytest.raises(JobError, match=r"data.test_fraction = 0.1, but parquet has a test set"):
        load(path=train, test=train, test_fraction=0.1)


def test_rows_need_not_be_read_to_compare_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every worker compares its data when it starts: 16 row groups, twice, may be gigabytes."""
    path = large(tmp_path / "a.parquet", 60_000)
    splits = load(path=path, transform=double, num_classes=3, memory_mb=1, test_fraction=0.01)

    def read(*_: Any) -> None:
        raise AssertionError("a row group was read")

    monkeypatch.setattr(ParquetFiles, "table", read)
    assert fingerprint(splits).count(f"({splits.train.digest()})") == 2  # type: ignore[attr-defined]


def test_rows_by_a_transform_of_ones_own(tmp_path: Path) -> None:
    path = large(tmp_path / "a.parquet", 60_000)
    splits = load(path=path, transform=double, num_classes=3, memory_mb=1, test_fraction=0.01)
    assert splits.test is not None and splits.test.num_samples == 600 and splits.num_classes == 3
    settings = {"batch_size": 50, "seed": 0, "shuffle": True}
    here = list(Loader(splits.train, **settings).batches(0, 1180))
    there = list(Loader(splits.train, processes=2, **settings).batches(0, 1180))
    for one, other in zip(here, there, strict=True):  # random draws too
        assert torch.equal(one.inputs, other.inputs) and torch.equal(one.targets, other.targets)
    assert all(float(value) % 2 == 0 for value in here[0].inputs[:, 0])
    for key, value in (("shape", [2]), ("kind", "tokens"), ("regression", True), ("resize", [4, 4]), ("color", "gray")):
        with pytest.raises(JobError, match=rf"data.{key} has no meaning with data.transform"):
            load(path=path, transform=double, **{key: value})
    with pytest.raises(JobError, match=r"data.transform.use = 'nomodule:f'|no module 'nomodule'"):
        load(path=path, transform="nomodule:f")


@pytest.mark.parametrize(("key", "value"), [("kind", "tokens"), ("regression", True), ("color", "gray")])
def test_columns_that_stay_apart_have_no_settings_of_others(key: str, value: object, tmp_path: Path) -> None:
    data = Data(use="parquet", inputs=("a", "b"), target="label", args={"path": str(write(tmp_path / "a.parquet"))})
    load_data(data, seed=0)
    with pytest.raises(JobError, match=rf"data.{key} and data.inputs both say what the columns are"):
        load_data(msgspec.structs.replace(data, args={**data.args, key: value}), seed=0)


def test_blocks_that_shuffle_badly_are_warned_of(tmp_path: Path) -> None:
    assert not load(path=large(tmp_path / "a.parquet"), memory_mb=1).warnings
    (warning,) = load(path=large(tmp_path / "b.parquet", rows=10_000), memory_mb=1).warnings
    assert "are shuffled among 3 of 40 blocks at a time" in warning
    (warning,) = load(path=large(tmp_path / "c.parquet", rows=200_000), memory_mb=1).warnings
    assert "row group 0 of" in warning and "takes 3 MB, more than half of data.memory_mb = 1" in warning


# Whether two hosts have the same


def test_the_fingerprint_is_of_the_footers(tmp_path: Path) -> None:
    one = load(path=large(tmp_path / "a.parquet"), memory_mb=1)
    (tmp_path / "elsewhere").mkdir()
    check_same(fingerprint(one), load(path=large(tmp_path / "elsewhere" / "b.parquet"), memory_mb=1))
    changed = numbered(400_000).to_pandas()
    changed.loc[200_000, "b"] = 17_000_000
    other = write(tmp_path / "c.parquet", pa.Table.from_pandas(changed, preserve_index=False), rows=2_000)
    with pytest.raises(DataError, match="the data of this worker are not those of the run"):
        check_same(fingerprint(one), load(path=other, memory_mb=1))


def test_paths_are_whole_in_the_job_so_that_any_worker_finds_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    args = Job(model="mlp", data={"use": "parquet", "path": "a.parquet", "test": "b.parquet"}).data.args
    assert args == {"path": f"{tmp_path}/a.parquet", "test": f"{tmp_path}/b.parquet"}
    rooted = Job(model="mlp", data={"use": "parquet", "path": "a.parquet", "root": "here"}).data.args
    assert rooted == {"path": "a.parquet", "root": f"{tmp_path}/here"}
    assert Job(model="mlp", data={"use": "parquet", "path": "s3://b/a"}).data.args == {"path": "s3://b/a"}
    assert Job(model="mlp", data={"use": "mine:make", "path": "a"}).data.args == {"path": "a"}
    with pytest.raises(DataError, match=r"data.path = '/a' is a whole path, and data.root = '/b'"):
        load(path="/a", root="/b")


# Bad input


def refused(match: str, error: type[CordeeError] = DataError, use: str = "parquet", **keys: Any) -> None:
    with pytest.raises(error, match=match):
        load(use, **keys)


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    write(tmp_path / "train.parquet")
    refused(
        r"data.path = '.*/trian.parquet' does not exist; did you mean 'train.parquet'\?",
        path=tmp_path / "trian.parquet",
    )
    refused(r"no file matches: .* has train.parquet", path=tmp_path / "*.pq")
    refused(r"no file matches: there is no folder /nowhere", path="/nowhere/*.parquet")
    (tmp_path / "empty").mkdir()
    refused(r"the folder has no file that ends in .parquet or .parq or .pq: .*/empty is empty", path=tmp_path / "empty")
    refused(r"data.test = '.*none' does not exist", path=tmp_path / "train.parquet", test=tmp_path / "none")
    refused(r"data needs 'path': set data.path", JobError)


def test_files_that_are_empty_truncated_or_something_else(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.parquet", numbered(1000)).read_bytes()
    (tmp_path / "b.parquet").write_bytes(b"")
    refused(r"data.path: .*b.parquet is empty \(0 bytes\)", path=tmp_path)
    (tmp_path / "b.parquet").write_bytes(whole[: len(whole) // 2])
    refused(r"cannot read the footer of .*b.parquet: the file is damaged, truncated", path=tmp_path)
    (tmp_path / "b.parquet").write_text("a,b\n1,2\n")
    refused(r"cannot read the footer of .*b.parquet", path=tmp_path)
    damaged = bytearray(whole)
    damaged[4:400] = bytes(396)
    (tmp_path / "b.parquet").write_bytes(damaged)
    refused(r"cannot read row group 0 of .*b.parquet: the file is damaged", path=tmp_path / "b.parquet")
    write(tmp_path / "b.parquet", numbered(0))
    refused(r"b.parquet has no samples", path=tmp_path / "b.parquet")
    assert load(path=tmp_path).train.num_samples == 1000  # a file without rows among others does no harm


def test_columns_that_do_not_exist_or_do_not_fit(tmp_path: Path) -> None:
    table = (
        numbered(6)
        .append_column("city", pa.array(["x"] * 6))
        .append_column("day", pa.array([datetime.date(2026, 1, 1)] * 6))
    )
    path = write(tmp_path / "a.parquet", table)
    refused(
        r"data.columns: .* has no column 'ab'.* \(it has: 'a', 'b', 'label', 'city', 'day'\)",
        path=path,
        columns=["ab"],
    )
    refused(r"data.label: .* has no column 'labels'; did you mean 'label'\?", path=path, label="labels")
    refused(
        r"column 'city' of .* has the type string, which is not numbers: set data.columns = \['a', 'b'\]", path=path
    )
    refused(r"column 'day' of .* has the type date32", path=path, columns=["day"])
    refused(r"data.columns has the label 'label' in it", JobError, path=path, columns=["a", "label"])
    refused(r"data.columns = \[\] names no column", JobError, path=path, columns=[])
    refused(r"the label 'day' of .* has the type date32", path=path, columns=["a"], label="day")
    refused(r"there are no inputs", path=write(tmp_path / "b.parquet", pa.table({"label": [0, 1]})))


def test_ragged_lists_and_nulls_are_named_by_row(tmp_path: Path) -> None:
    ragged = pa.table({"x": [[1.0, 2.0]] * 4 + [[1.0]], "label": [0, 1, 0, 1, 0]})
    refused(
        r"column 'x' of row group 0 of .*: row 0 has 2 values and row 4 has 1",
        path=write(tmp_path / "a.parquet", ragged, rows=5),
    )
    refused(
        r"inputs of the shape \(1,\).*the first rows .* have \(2,\)", path=write(tmp_path / "a.parquet", ragged, rows=4)
    )
    nulls = pa.table({"x": [1.0, None, 3.0], "label": [0, 1, 0]})
    refused(r"column 'x' of row group 0 of .* has 1 nulls", path=write(tmp_path / "b.parquet", nulls))
    pq.write_table(nulls, tmp_path / "b.parquet", write_statistics=False)
    refused(r"column 'x' of row group 0 of .*: row 1 has no value \(null\)", path=tmp_path / "b.parquet")
    inside = pa.table({"x": [[1.0, 2.0], [1.0, None]], "label": [0, 1]})
    refused(r"column 'x' of lists of row group 0 of .*has no value", path=write(tmp_path / "c.parquet", inside))
    not_a_number = pa.table({"x": [1.0, 2.0, float("nan")], "label": [0, 1, 0]})
    refused(
        r"row group 0 of .*sample 2 has a value that is infinite or not a number",
        path=write(tmp_path / "d.parquet", not_a_number),
    )
    none = pa.table(
        {"x": [[], []], "label": [0, 1]}, schema=pa.schema([("x", pa.list_(pa.float32())), ("label", pa.int64())])
    )
    refused(r"row 0 has no values", path=write(tmp_path / "e.parquet", none))


def test_files_of_different_schemas_are_named(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet")
    write(tmp_path / "b.parquet", numbered().rename_columns(["a", "c", "label"]))
    refused(r"b.parquet has no column 'b', which .*a.parquet has", path=tmp_path)
    write(tmp_path / "b.parquet", numbered().append_column("more", pa.array(range(100))))
    refused(r"b.parquet has the column 'more', which .*a.parquet has not", path=tmp_path)
    write(tmp_path / "b.parquet", numbered().set_column(1, "b", pa.array(["x"] * 100)))
    refused(r"column 'b' has the type int64 in .*a.parquet and string in .*b.parquet", path=tmp_path)
    write(tmp_path / "a.parquet", numbered().rename_columns(["a", "a", "label"]))
    refused(r"a.parquet has two columns of the name 'a': rename one", path=tmp_path / "a.parquet")


def test_a_file_that_changes_under_training_is_noticed(tmp_path: Path) -> None:
    path = large(tmp_path / "a.parquet")
    splits = load(path=path, memory_mb=1)
    large(path, 300_000)
    with pytest.raises(DataError, match=r"a.parquet was changed while it is trained on"):
        splits.train.gather(torch.tensor([200_000]))


def test_settings_that_do_not_fit(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet")
    refused(r"data.memory_mb = 0 must be at least 1", JobError, path=path, memory_mb=0)
    refused(r"data.num_classes = 1 must be at least 2", JobError, path=path, num_classes=1)
    refused(r"data.classes has a name twice", JobError, path=path, classes=["a", "a"])
    refused(r"data.resize is for images", JobError, path=path, resize=[8, 8])
    refused(r"data has no setting 'colum'", JobError, path=path, colum=["a"])
    refused(r"data.kind = 'words' does not fit", JobError, path=path, kind="words")


@pytest.mark.parametrize(
    ("use", "package", "extra"),
    [
        ("parquet", "pyarrow", "parquet"),
        ("arrow", "pyarrow", "parquet"),
        ("csv", "pyarrow", "parquet"),
        ("huggingface", "datasets", "huggingface"),
        ("image-folder", "PIL.Image", "images"),
        ("image-tar", "PIL.Image", "images"),
    ],
)
def test_a_missing_package_says_which_extra_to_install(
    use: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = importlib.import_module

    def missing(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == package.partition(".")[0]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return found(name, *rest)

    monkeypatch.setattr("cordee.data.storage.importlib.import_module", missing)
    with pytest.raises(MissingExtraError, match=rf"pip install 'cordee\[{extra}\]'"):
        load(use, path=tmp_path)
