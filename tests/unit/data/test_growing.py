"""Data that keeps arriving: the order of the stream, places in it, and what does not belong there."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import IterableDataset

from cordee.core.batch import Batch
from cordee.core.errors import DataError, JobError
from cordee.core.settings import Data
from cordee.core.shards import Shards
from cordee.data import GrowingSource, Loader, Place, load_data
from cordee.data.online import OnlineStream, newest, span_of
from cordee.training.online_data import decide

ALONE = Shards(0, 1, 1)


def write(folder: Path, name: str, first: int, count: int, **changes: Any) -> None:
    """Write samples whose input is their number."""
    numbers = np.arange(first, first + count)
    arrays = {"x": numbers.reshape(-1, 1).astype(np.float32), "y": numbers % 3, **changes}
    arrays = {key: value for key, value in arrays.items() if value is not None}
    whole = folder / f"{name}.part"
    if name.endswith(".npz"):
        with whole.open("wb") as file:
            np.savez(file, **arrays)
    else:
        safetensors.numpy.save_file(arrays, whole)
    whole.rename(folder / name)


def source_of(folder: Path, **settings: Any) -> GrowingSource:
    data = Data(use="folder", args={"root": str(folder), "num_classes": 3}, **settings)
    source = load_data(data, seed=0).train
    assert isinstance(source, GrowingSource)
    return source


def numbers_of(batch: Batch) -> list[int]:
    return batch.inputs[:, 0].int().tolist()


def drain(stream: OnlineStream) -> list[list[int]]:
    """Return all batches that are there now."""
    found = []
    while num_samples := stream.ready():
        found.append(numbers_of(stream.take(num_samples).part))
    return found


def test_files_are_taken_in_the_order_of_their_names_as_they_come(tmp_path: Path) -> None:
    write(tmp_path, "b.safetensors", 5, 4)
    write(tmp_path, "a.npz", 0, 5)
    stream = OnlineStream(source_of(tmp_path), Place(), batch_size=4, holdout=0.0, shards=ALONE)
    assert drain(stream) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    write(tmp_path, "c.npz", 9, 1)
    assert drain(stream) == [] and not stream.is_ended
    write(tmp_path, "d.npz", 10, 7)
    (tmp_path / "e.csv").write_text("not ours")
    assert drain(stream) == [[8, 9, 10, 11], [12, 13, 14, 15]]
    (tmp_path / "END").touch()
    assert stream.ready() == 0, "that it is the end is taken note of"
    assert drain(stream) == [[16]] and stream.is_ended


def test_a_place_is_found_again_also_when_what_is_before_it_is_gone(tmp_path: Path) -> None:
    for index in range(4):
        write(tmp_path, f"{index}.npz", 10 * index, 10)
    source = source_of(tmp_path)
    stream = OnlineStream(source, Place(), batch_size=6, holdout=0.0, shards=ALONE)
    places = []
    for _ in range(6):
        taken = stream.take(stream.ready())
        places.append((taken.place, numbers_of(taken.part)[-1]))
    for place, last in places:
        again = OnlineStream(source, place, batch_size=2, holdout=0.0, shards=ALONE)
        assert drain(again)[0] == [last + 1, last + 2]
    (tmp_path / "0.npz").unlink()
    assert places[2][0] == Place(18, "1.npz", 8)
    assert drain(OnlineStream(source, places[2][0], batch_size=2, holdout=0.0, shards=ALONE))[0] == [18, 19]
    assert places[4][0] == Place(30, "2.npz", 10)
    (tmp_path / "2.npz").unlink()
    assert drain(OnlineStream(source, places[4][0], batch_size=2, holdout=0.0, shards=ALONE))[0] == [30, 31]


def test_what_is_to_come_can_be_measured(tmp_path: Path) -> None:
    write(tmp_path, "0.npz", 0, 5)
    batch = next(Loader(source_of(tmp_path), batch_size=9, seed=0, shuffle=True).batches(0))
    assert (batch.inputs.shape, batch.targets.shape) == ((9, 1), (9,))


def test_shares_and_what_is_set_aside_make_the_whole(tmp_path: Path) -> None:
    write(tmp_path, "0.npz", 0, 100)
    source = source_of(tmp_path)
    streams = [OnlineStream(source, Place(), batch_size=9, holdout=0.1, shards=Shards(i, i + 1, 2)) for i in (0, 1)]
    seen, ring = [], None
    for _ in range(5):
        taken = [stream.take(stream.ready()) for stream in streams]
        assert sum(len(one.part.targets) for one in taken) == 9
        assert torch.equal(taken[0].aside.inputs, taken[1].aside.inputs)
        seen += [*numbers_of(taken[0].part), *numbers_of(taken[1].part)]
        ring = newest(ring, taken[0].aside, 3)
        assert streams[0].mark == streams[1].mark
    assert seen == [number for number in range(49) if number % 10 != 9]
    assert ring is not None and numbers_of(ring) == [19, 29, 39]


@given(st.integers(0, 1000), st.integers(1, 100), st.integers(2, 20))
def test_a_span_holds_just_enough_samples_to_train_on(start: int, wanted: int, every: int) -> None:
    length = span_of(start, wanted, every)
    kept = [i for i in range(start, start + length) if (i + 1) % every]
    assert len(kept) == wanted and kept[-1] == start + length - 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": np.ones((4, 2), np.float32)}, r"1\.npz have the shape \(2,\), those before \(1,\)"),
        ({"y": np.array([0, 1, 3, 0])}, r"1\.npz: the label at position 2 is 3, but labels must be from 0 to 2"),
        ({"y": np.array([0.5, 1, 2, 0])}, r"the targets of .*1\.npz are fractions, those before were not"),
        ({"y": np.array([0, 1])}, r"1\.npz has 4 inputs but 2 targets"),
        ({"y": None}, r"1\.npz has no arrays x and y \(or inputs and targets\); it has: x"),
        ({"x": np.full((4, 1), np.nan, np.float32)}, "sample 0 has a value that is infinite or not a number"),
    ],
)
def test_a_file_that_does_not_belong_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write(tmp_path, "0.npz", 0, 4)
    stream = OnlineStream(source_of(tmp_path), Place(), batch_size=8, holdout=0.0, shards=ALONE)
    write(tmp_path, "1.npz", 4, 4, **changes)
    os.utime(tmp_path / "1.npz", (0, 0))
    with pytest.raises(DataError, match=message):
        stream.ready()


def test_a_file_that_would_never_be_taken_is_an_error(tmp_path: Path) -> None:
    for name in ("0", "2"):
        write(tmp_path, f"{name}.npz", 0, 4)
    stream = OnlineStream(source_of(tmp_path), Place(), batch_size=8, holdout=0.0, shards=ALONE)
    stream.take(stream.ready())
    assert stream.ready() == 0
    write(tmp_path, "1.npz", 4, 4)
    with pytest.raises(DataError, match=r"1\.npz came after 2\.npz, whose name is later.*rename it, then --resume"):
        stream.ready()


def test_a_file_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    write(tmp_path, "0.npz", 0, 4)
    stream = OnlineStream(source_of(tmp_path), Place(), batch_size=8, holdout=0.0, shards=ALONE)
    write(tmp_path, "whole.npz", 4, 4)
    content = (tmp_path / "whole.npz").read_bytes()
    (tmp_path / "whole.npz").unlink()
    (tmp_path / "1.npz").write_bytes(content[: len(content) // 2])
    assert stream.ready() == 0
    (tmp_path / "1.npz").write_bytes(content)
    assert stream.ready() == 8
    (tmp_path / "2.npz").write_bytes(content[: len(content) // 2])
    stream.take(8)
    os.utime(tmp_path / "2.npz", (0, 0))
    with pytest.raises(DataError, match=r"2\.npz cannot be read: .*rename it when it is whole"):
        stream.ready()


@pytest.mark.parametrize(
    ("files", "settings", "error", "message"),
    [
        ([], {}, DataError, r"no \.npz or \.safetensors file in .* yet"),
        (["0.npz"], {"args": {"num_classes": None}}, DataError, r"are classes: set data\.num_classes"),
        (["0.npz"], {"holdout": 0.6}, JobError, r"data\.holdout = 0\.6 must be at least 0 and at most 0\.5"),
        (["0.npz"], {"processes": 2}, JobError, r"data\.processes = 2 has no meaning for data that grows"),
        (["0.npz"], {"train_limit": 5}, JobError, r"data\.train_limit = 5 has no meaning"),
    ],
)
def test_what_a_folder_cannot_be(
    tmp_path: Path, files: list[str], settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    for name in files:
        write(tmp_path, name, 0, 4)
    args = {"root": str(tmp_path), "num_classes": 3, **settings.pop("args", {})}
    with pytest.raises(error, match=message):
        load_data(Data(use="folder", args=args, **settings), seed=0)


def test_holding_out_is_for_data_that_grows() -> None:
    with pytest.raises(JobError, match=r"set data\.test_fraction = 0\.1 instead"):
        load_data(Data(use="iris", holdout=0.1), seed=0)
    with pytest.raises(JobError, match=r"data\.online = true is for an IterableDataset, and iris is none"):
        load_data(Data(use="iris", online=True), seed=0)


# Iterables --------------------------------------------------------------------------------------------------


class Ticker(IterableDataset[tuple[Tensor, int]]):
    """Delivers up to `limit` samples, and tells which were asked for."""

    num_classes = 3

    def __init__(self, limit: int) -> None:
        self.limit, self.first, self.more = limit, 0, threading.Event()

    def seek(self, num_samples: int) -> None:
        self.first = num_samples

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        for number in range(self.first, self.limit):
            if number == 12:
                self.more.wait(20)
            yield torch.tensor([float(number)]), number % 3


def ready_soon(stream: OnlineStream) -> int:
    deadline = time.monotonic() + 10
    while not (num_samples := stream.ready()) and not stream.is_ended:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return num_samples


@pytest.mark.parametrize("can_seek", [True, False])
def test_an_iterable_is_waited_for_without_standing_still(can_seek: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not can_seek:
        monkeypatch.delattr(Ticker, "seek")
    ticker = Ticker(21)
    source = load_data(Data(use=ticker, online=True), seed=0).train
    assert isinstance(source, GrowingSource)
    stream = OnlineStream(source, Place(), batch_size=8, holdout=0.0, shards=ALONE)
    taken = stream.take(ready_soon(stream))
    assert numbers_of(taken.part) == list(range(8)) and taken.place.samples == 8
    assert stream.ready() == 0, "the rest is not there yet"
    ticker.more.set()
    assert numbers_of(stream.take(ready_soon(stream)).part) == list(range(8, 16))
    assert numbers_of(stream.take(ready_soon(stream)).part) == list(range(16, 21))
    assert ready_soon(stream) == 0 and stream.is_ended
    stream.close()
    again = OnlineStream(source, taken.place, batch_size=8, holdout=0.0, shards=ALONE)
    assert numbers_of(again.take(ready_soon(again)).part) == list(range(8, 16))
    assert ticker.first == (8 if can_seek else 0)
    again.close()


def test_what_an_iterable_raises_is_told_with_the_sample() -> None:
    class Broken(Ticker):
        def __iter__(self) -> Iterator[tuple[Tensor, int]]:
            yield from super().__iter__()
            raise ZeroDivisionError("the user's own mistake")

    source = load_data(Data(use=Broken(5), online=True), seed=0).train
    assert isinstance(source, GrowingSource)
    stream = OnlineStream(source, Place(), batch_size=8, holdout=0.0, shards=ALONE)
    with pytest.raises(DataError, match="reading sample 5 of the training set raised ZeroDivisionError"):
        ready_soon(stream)
    stream.close()


@pytest.mark.parametrize("limit", [40, 20])  # other samples, or too few of them
def test_an_iterable_that_does_not_begin_anew_is_not_continued(limit: int) -> None:
    class Queue(IterableDataset[tuple[Tensor, int]]):
        """Goes on where it was, as a connection does."""

        num_classes = 40

        def __init__(self) -> None:
            self.numbers = iter(range(limit))

        def __iter__(self) -> Iterator[tuple[Tensor, int]]:
            return ((torch.tensor([float(number)]), number) for number in self.numbers)

    source = load_data(Data(use=Queue(), online=True), seed=0).train
    assert isinstance(source, GrowingSource)
    stream = OnlineStream(source, Place(), batch_size=7, holdout=0.0, shards=ALONE)
    place = stream.take(ready_soon(stream)).place
    stream.close()
    again = OnlineStream(source, place, batch_size=7, holdout=0.0, shards=ALONE)
    with pytest.raises(DataError, match="gave other samples than before when it was iterated over again"):
        ready_soon(again)
    again.close()


def test_streams_of_other_labels_have_another_mark() -> None:
    def mark(shift: int) -> int:
        ticker = Ticker(12)
        ticker.first = shift
        source = load_data(Data(use=ticker, online=True), seed=0).train
        assert isinstance(source, GrowingSource)
        stream = OnlineStream(source, Place(), batch_size=4, holdout=0.0, shards=ALONE)
        stream.take(ready_soon(stream))
        stream.close()
        return stream.mark

    assert mark(0) == mark(3) != mark(1)  # of inputs it says nothing: they may be changed at random


# Agreeing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "action"),
    [
        ([16, 16], "take"),
        ([16, 0], "wait"),
        ([16, 1], "interrupt"),
        ([0, 2], "time"),
        ([4, 16], "idle"),
        ([20, 20], "take"),  # it came just in time
        ([8, 8], "end"),
        ([8, 0], "wait"),
        ([9, 8], "interrupt"),
    ],
)
def test_what_members_do(words: list[int], action: str) -> None:
    assert decide(words) == action


def test_members_that_see_different_files_do_not_go_on() -> None:
    with pytest.raises(DataError, match="names of new files must come after those that are there"):
        decide([16 + (1 << 8), 16 + (2 << 8)])
    with pytest.raises(DataError, match="different data behind the same place"):
        decide([16, 8])  # it would be waited for for ever
