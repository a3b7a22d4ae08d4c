from __future__ import annotations

import io
import pickle
import struct
import tarfile

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cordee.core.errors import DataError
from cordee.core.settings import Data
from cordee.data import cifar, load_data
from cordee.data.cifar import read_python_batch

NUM_IMAGES = 3
TRAIN = [f"data_batch_{number}" for number in range(1, 6)]


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    monkeypatch.setattr(cifar, "IMAGES_PER_FILE", NUM_IMAGES)


def pixels_of(file_number: int, num_images: int = NUM_IMAGES) -> np.ndarray:
    return np.random.default_rng(file_number).integers(0, 256, (num_images, 3072), dtype=np.uint8)


def labels_of(file_number: int) -> list[int]:
    return [(file_number + index) % 10 for index in range(NUM_IMAGES)]


def binary_file(file_number: int) -> bytes:
    records = zip(labels_of(file_number), pixels_of(file_number))
    return b"".join(bytes([label]) + pixels.tobytes() for label, pixels in records)


def published_file(pixels: np.ndarray, labels: list[int]) -> bytes:
    """The bytes Python 2 wrote, opcode for opcode: strings are bytes, names are those of old NumPy."""

    def string(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value if len(value) < 256 else b"T" + struct.pack("<i", len(value)) + value

    def integer(value: int) -> bytes:
        return b"K" + bytes([value]) if 0 <= value < 256 else b"J" + struct.pack("<i", value)

    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x02cnumpy\nndarray\nq\x03" + integer(0) + b"\x85" + string(b"b")
        + b"\x87Rq\x04(" + integer(1) + integer(pixels.shape[0]) + integer(pixels.shape[1]) + b"\x86"
        + b"cnumpy\ndtype\nq\x05" + string(b"u1") + integer(0) + integer(1) + b"\x87Rq\x06("
        + integer(3) + string(b"|") + b"NNN" + integer(-1) + integer(-1) + integer(0) + b"tb\x89"
        + string(pixels.tobytes()) + b"tb"
    )  # fmt: skip
    label_list = b"]q\x07(" + b"".join(integer(label) for label in labels) + b"e"
    names = b"]q\x08(" + b"".join(string(b"image_%d.png" % index) for index in range(len(labels))) + b"e"
    return (
        b"\x80\x02}q\x01(" + string(b"data") + array + string(b"labels") + label_list
        + string(b"batch_label") + string(b"training batch 1 of 5") + string(b"filenames") + names + b"u."
    )  # fmt: skip


def python_file(file_number: int) -> bytes:
    return published_file(pixels_of(file_number), labels_of(file_number))


def write_set(folder, form: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate([*TRAIN, "test_batch"]):
        if form == "binary":
            (folder / f"{name}.bin").write_bytes(binary_file(number))
        else:
            (folder / name).write_bytes(python_file(number))


def check(splits) -> None:
    assert (splits.name, splits.input_shape, splits.num_classes) == ("cifar10", (3, 32, 32), 10)
    assert (splits.train.num_samples, splits.test.num_samples) == (5 * NUM_IMAGES, NUM_IMAGES)
    images, labels = splits.train.gather(torch.arange(5 * NUM_IMAGES))
    for number in range(5):
        part = slice(number * NUM_IMAGES, (number + 1) * NUM_IMAGES)
        assert labels[part].tolist() == labels_of(number)
        expected = torch.from_numpy(pixels_of(number)).view(-1, 3, 32, 32) / 255
        torch.testing.assert_close(images[part], expected)
    assert splits.test.gather(torch.arange(NUM_IMAGES)).targets.tolist() == labels_of(5)


@pytest.mark.parametrize("form", ["binary", "python"])
@pytest.mark.parametrize("folder", ["", "cifar10", "cifar-10-batches-bin", "cifar-10-batches-py"])
def test_both_versions_are_read(tmp_path, form, folder):
    write_set(tmp_path / folder, form)
    check(load_data(Data(use="cifar10", args={"root": str(tmp_path)}, normalize=False), seed=0))


@pytest.mark.parametrize("form", ["binary", "python"])
def test_published_archives_are_read_as_they_are(tmp_path, form):
    write_set(tmp_path / "made", form)
    with tarfile.open(tmp_path / f"cifar-10-{form}.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "made", "cifar-10-batches")
    check(load_data(Data(use="cifar10", args={"root": str(tmp_path)}, normalize=False), seed=0))


def test_normalised_by_channel(tmp_path):
    write_set(tmp_path, "binary")
    raw = load_data(Data(use="cifar10", args={"root": str(tmp_path)}, normalize=False), seed=0)
    scaled = load_data(Data(use="cifar10", args={"root": str(tmp_path)}), seed=0)
    index = torch.tensor([2])
    mean, deviation = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
    expected = (raw.train.gather(index).inputs - mean.view(3, 1, 1)) / deviation.view(3, 1, 1)
    torch.testing.assert_close(scaled.train.gather(index).inputs, expected, rtol=1e-5, atol=1e-5)


def test_truncated_binary_file(tmp_path):
    write_set(tmp_path, "binary")
    path = tmp_path / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-3073])  # a whole record: no multiple tells
    with pytest.raises(DataError, match=r"data_batch_3.bin is truncated: expected 9219 bytes .* found 6146"):
        load_data(Data(use="cifar10", args={"root": str(tmp_path)}), seed=0)


def test_label_out_of_range(tmp_path):
    write_set(tmp_path, "binary")
    path = tmp_path / "test_batch.bin"
    path.write_bytes(path.read_bytes()[: 2 * 3073] + b"\x0b" + path.read_bytes()[2 * 3073 + 1 :])
    with pytest.raises(DataError, match=r"test_batch.bin: the label at position 2 is 11, .* 0 to 9"):
        load_data(Data(use="cifar10", args={"root": str(tmp_path)}), seed=0)


def test_archives_that_are_damaged_or_incomplete(tmp_path):
    path = tmp_path / "cifar-10-python.tar.gz"
    path.write_bytes(b"not an archive")
    with pytest.raises(DataError, match="is damaged"):
        load_data(Data(use="cifar10", args={"root": str(tmp_path)}), seed=0)
    with tarfile.open(path, "w:gz") as archive:
        member = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
        member.size = 5
        archive.addfile(member, io.BytesIO(b"hello"))
    with pytest.raises(DataError, match="lacks data_batch_2"):
        load_data(Data(use="cifar10", args={"root": str(tmp_path)}), seed=0)


def test_python_version_as_written_by_new_numpy():
    content = pickle.dumps({"data": pixels_of(0), "labels": [1, 2, 300]}, protocol=3)
    images, labels = read_python_batch(content, "f")
    assert np.array_equal(images.numpy(), pixels_of(0))
    assert labels == [1, 2, 300]


class Attack:
    def __reduce__(self):
        return (pytest.fail, ("code of the file was run",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps({"data": Attack()}, protocol=2), "it names '.*ail', which this format does not need"),
        (pickle.dumps({"data": Attack()}, protocol=4), "it uses (FRAME|MEMOIZE|STACK_GLOBAL)"),
        (pickle.dumps([1, 2], protocol=3), "it holds a list, not a dict"),
        (pickle.dumps({"labels": []}, protocol=3), "no two-dimensional array 'data'"),
        (pickle.dumps({"data": pixels_of(0), "labels": [1]}, protocol=3), "3 images but 1 labels"),
        (pickle.dumps({"data": pixels_of(0), "labels": ["a"] * 3}, protocol=3), "no list of numbers"),
        (pickle.dumps({"data": pixels_of(0)[:, :9], "labels": [1] * 3}, protocol=3), "images have 9 bytes"),
        (pickle.dumps({"data": pixels_of(0).astype(float), "labels": [1] * 3}, protocol=3), "calls what"),
        (pickle.dumps({"data": np.asfortranarray(pixels_of(0)), "labels": [1] * 3}, protocol=3), "C order"),
        (python_file(0)[:-40], "is not a batch of CIFAR-10's Python version"),
        (b"", "is not a batch"),
        (b"\x80\x02}cos\nsystem\n(U\x04trueRu.", "it names 'os.system'"),
    ],
)
def test_nothing_but_the_format_is_admitted(content, message):
    with pytest.raises(DataError, match=message):
        read_python_batch(content, "data_batch_1")


@given(st.binary(max_size=120), st.integers(0, 400), st.integers(0, 120))
def test_random_and_altered_files_give_only_data_errors(noise, place, length):
    whole = published_file(pixels_of(0, 1), [7])
    altered = whole[:place] + noise + whole[place + length :]
    for content in (noise, altered):
        try:
            images, labels = read_python_batch(content, "f")
            assert images.shape[1] == 3072 and len(images) == len(labels)
        except DataError:
            pass
