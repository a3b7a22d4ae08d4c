"""CIFAR-10: 50,000 and 10,000 colour images of (3, 32, 32), in either of the two forms it is published in."""

from __future__ import annotations

import dataclasses
import gzip
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Literal

import torch
from torch import Tensor

from cordee.core.errors import DataError
from cordee.data.arrays import check_classes
from cordee.data.cifar_python import IMAGE_BYTES, read_python_batch
from cordee.data.download import Download
from cordee.data.files import FileSet, locate
from cordee.data.source import ArraySource, Scale, Splits

IMAGES_PER_FILE = 10_000
_NUM_CLASSES = 10
_LARGEST_PYTHON_FILE = 64 << 20  # the published ones have 31 MB
_NAMES = {
    "binary": (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"),
    "python": (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"),
}
_ARCHIVES: dict[str, Literal["binary", "python"]] = {
    "cifar-10-binary.tar.gz": "binary",
    "cifar-10-python.tar.gz": "python",
}


def cifar10(root: str | None = None, download: bool = False, *, normalize: bool = True) -> Splits:
    """Colour images of ten kinds of animals and vehicles (Krizhevsky 2009).

    Read from the binary or the Python version, unpacked or as the published archive. Normalised with the mean
    and deviation of each channel over all training pixels divided by 255.
    """
    scale = Scale.standardizing((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)) if normalize else None
    found = locate(CIFAR10, find_cifar_files, root=root, download=download)
    batches = [_decode(found.form, content, name) for name, content in _contents(found)]
    train, test = _joined(batches[:-1], scale), _joined(batches[-1:], scale)
    return Splits(train, test, input_shape=(3, 32, 32), num_classes=_NUM_CLASSES, name=CIFAR10.name)


CIFAR10 = FileSet(
    name="cifar10",
    title="CIFAR-10",
    needed=(
        "data_batch_1.bin to data_batch_5.bin and test_batch.bin; or data_batch_1 to data_batch_5 and test_batch; "
        "or cifar-10-binary.tar.gz; or cifar-10-python.tar.gz"
    ),
    folders=("cifar10", "cifar-10-batches-bin", "cifar-10-batches-py"),
    downloads=(
        Download(
            "cifar-10-binary.tar.gz",
            ("https://www.cs.toronto.edu/~kriz",),
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        ),
    ),
    advice=("They are published at https://www.cs.toronto.edu/~kriz/cifar.html.",),
)


@dataclasses.dataclass(frozen=True)
class CifarFiles:
    """Where the set was found, and in which form."""

    form: Literal["binary", "python"]
    path: Path  # a folder, or an archive


def find_cifar_files(folder: Path) -> CifarFiles | None:
    """Return the form the folder holds all of, or None."""
    forms: tuple[Literal["binary", "python"], ...] = ("binary", "python")
    for form in forms:
        if all((folder / name).is_file() for name in _NAMES[form]):
            return CifarFiles(form, folder)
    for archive, form in _ARCHIVES.items():
        if (folder / archive).is_file():
            return CifarFiles(form, folder / archive)
    return None


def read_binary_batch(content: bytes, name: str) -> tuple[Tensor, list[int]]:
    """Return the images (n, 3072) as uint8 and the labels of one file of the binary version."""
    expected = IMAGES_PER_FILE * (1 + IMAGE_BYTES)
    if len(content) != expected:
        raise DataError(
            f"{name} is {'truncated' if len(content) < expected else 'too long'}: expected {expected} bytes "
            f"({IMAGES_PER_FILE} × {1 + IMAGE_BYTES}), found {len(content)}; get the file again"
        )
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(IMAGES_PER_FILE, 1 + IMAGE_BYTES)
    return records[:, 1:], records[:, 0].tolist()


def _decode(form: str, content: bytes, name: str) -> tuple[Tensor, Tensor]:
    images, numbers = read_binary_batch(content, name) if form == "binary" else read_python_batch(content, name)
    if len(images) != IMAGES_PER_FILE:
        raise DataError(f"{name} has {len(images)} images, expected {IMAGES_PER_FILE}; get the file again")
    labels = torch.tensor([max(-1, min(number, 1 << 30)) for number in numbers], dtype=torch.int64)
    check_classes(labels, _NUM_CLASSES, name)
    return images.reshape(-1, 3, 32, 32), labels


def _joined(batches: list[tuple[Tensor, Tensor]], scale: Scale | None) -> ArraySource:
    images, labels = zip(*batches)
    return ArraySource(torch.cat(images), torch.cat(labels), scale)


def _contents(found: CifarFiles) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the six files, in order."""
    names = _NAMES[found.form]
    try:
        if found.path.is_dir():
            for name in names:
                path = found.path / name
                if path.stat().st_size > _LARGEST_PYTHON_FILE:
                    raise DataError(f"{path} has {path.stat().st_size} bytes, far more than a file of CIFAR-10")
                yield str(path), path.read_bytes()
        else:
            yield from _archived(found.path, names)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{found.path} is damaged: {error or type(error).__name__}; get the file again") from error
    except OSError as error:
        raise DataError(f"cannot read {found.path}: {error.strerror or error}") from error


def _archived(path: Path, names: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    # Nothing is unpacked to disk: a member's path is only compared, and its bytes are read into memory.
    contents = {}
    with tarfile.open(path, "r:gz") as archive:
        for member in archive:
            name = PurePosixPath(member.name).name
            if name in names and member.isreg():
                if member.size > _LARGEST_PYTHON_FILE:
                    raise DataError(f"{path}: {member.name} has {member.size} bytes, far more than a file of CIFAR-10")
                opened = archive.extractfile(member)
                assert opened is not None
                contents[name] = opened.read()
    missing = [name for name in names if name not in contents]
    if missing:
        raise DataError(f"{path} lacks {', '.join(missing)}; get the file again")
    yield from ((f"{path}:{name}", contents[name]) for name in names)
