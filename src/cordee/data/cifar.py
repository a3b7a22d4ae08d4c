"""CIFAR-10: 50,000 and 10,000 colour images of (3, 32, 32), in either of the two forms it is published in."""

from __future__ import annotations

import dataclasses
import enum
import gzip
import math
import pickletools
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import torch
from torch import Tensor

from cordee.core.errors import DataError
from cordee.data.files import Download, FileSet, locate
from cordee.data.source import ArraySource, Scale, Splits, check_classes

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


# The files of CIFAR-10's "Python version", read without running anything that is in them.
#
# They are written in Python's serialisation format, whose usual reader calls whatever function a file names.
# This one is a small interpreter over the opcodes that `pickletools.genops` lists: it knows plain values,
# containers, and the two calls by which NumPy writes an array of bytes, which it carries out itself as data.
# Everything else is refused, so the worst a file can do is not to be read.

IMAGE_BYTES = 3 * 32 * 32


def read_python_batch(content: bytes, name: str) -> tuple[Tensor, list[int]]:
    """Return the images (n, 3072) as uint8 and the labels of one file; DataError, with `name`, if it is not one."""
    try:
        held = _Interpreter().run(content)
        if not isinstance(held, dict):
            raise _RefusedError(f"it holds a {type(held).__name__}, not a dict")
        values = {_text(key): value for key, value in held.items()}
        images, labels = values.get("data"), values.get("labels")
        if not isinstance(images, _Array) or images.pixels is None or images.pixels.dim() != 2:
            raise _RefusedError("it has no two-dimensional array 'data'")
        if images.pixels.shape[1] != IMAGE_BYTES:
            raise _RefusedError(f"images have {images.pixels.shape[1]} bytes, expected {IMAGE_BYTES}")
        if not isinstance(labels, list) or not all(type(label) is int for label in labels):
            raise _RefusedError("it has no list of numbers 'labels'")
        if len(labels) != len(images.pixels):
            raise _RefusedError(f"it has {len(images.pixels)} images but {len(labels)} labels")
    except Exception as error:
        raise DataError(f"{name} is not a batch of CIFAR-10's Python version: {error}; get the file again") from error
    return images.pixels, labels


class _RefusedError(Exception):
    """A file that is not of the format."""


class _Name(enum.Enum):
    """The only names that a file may contain."""

    RECONSTRUCT = enum.auto()
    NDARRAY = enum.auto()
    DTYPE = enum.auto()


_GLOBALS = {
    "numpy.core.multiarray _reconstruct": _Name.RECONSTRUCT,
    "numpy._core.multiarray _reconstruct": _Name.RECONSTRUCT,  # as NumPy 2 writes it
    "numpy ndarray": _Name.NDARRAY,
    "numpy dtype": _Name.DTYPE,
}


class _ByteType:
    """Stands for numpy.dtype("u1")."""


class _Array:
    """Stands for a NumPy array, empty until its state is set."""

    pixels: Tensor | None = None

    def set_state(self, state: Any) -> None:
        version, shape, element, is_fortran, content = state
        if version != 1 or not isinstance(element, _ByteType) or is_fortran is not False:
            raise _RefusedError("an array that is not of bytes in C order")
        content = content.encode("latin-1") if isinstance(content, str) else content
        if not isinstance(content, bytes) or not all(type(size) is int and size > 0 for size in shape):
            raise _RefusedError("an array without its bytes")
        if math.prod(shape) != len(content):
            raise _RefusedError(f"an array of {' × '.join(map(str, shape))} with {len(content)} bytes")
        self.pixels = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(shape)


_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_VALUES = {
    "BININT", "BININT1", "BININT2",
    "SHORT_BINSTRING", "BINSTRING", "SHORT_BINBYTES", "BINBYTES", "BINUNICODE", "SHORT_BINUNICODE",
}  # fmt: skip


class _Interpreter:
    """One pass over a file. `run` returns what it holds; any exception means that it is refused."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, content: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name == "STOP":
                return self._stack.pop()
            self._step(opcode.name, argument)
        raise _RefusedError("it ends early")

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _VALUES:
            stack.append(argument)
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name == "MARK":
            stack.append(_MARK)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("EMPTY_DICT", "EMPTY_LIST"):
            stack.append({} if name == "EMPTY_DICT" else [])
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [tuple(self._checked(stack[-count:], count))]
        elif name == "TUPLE":
            values = self._pop_to_mark()
            stack.append(tuple(values))
        elif name in ("APPEND", "APPENDS"):
            values = [stack.pop()] if name == "APPEND" else self._pop_to_mark()
            self._top(list).extend(values)
        elif name in ("SETITEM", "SETITEMS"):
            values = self._pop_last_two() if name == "SETITEM" else self._pop_to_mark()
            self._top(dict).update(zip(values[::2], values[1::2], strict=True))
        elif name == "GLOBAL":
            if argument not in _GLOBALS:
                raise _RefusedError(f"it names {argument.replace(' ', '.')!r}, which this format does not need")
            stack.append(_GLOBALS[argument])
        elif name == "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            stack.append(self._called(function, arguments))
        elif name == "BUILD":
            state = stack.pop()
            if not isinstance(stack[-1], _ByteType):
                self._top(_Array).set_state(state)
        elif name != "PROTO":
            raise _RefusedError(f"it uses {name}, which this format does not need")

    def _called(self, function: Any, arguments: Any) -> Any:
        if function is _Name.RECONSTRUCT and arguments[0] is _Name.NDARRAY:
            return _Array()
        if function is _Name.DTYPE and _text(arguments[0]) == "u1":
            return _ByteType()
        raise _RefusedError("it calls what this format does not need")

    def _pop_to_mark(self) -> list[Any]:
        for index in range(len(self._stack) - 1, -1, -1):
            if self._stack[index] is _MARK:
                values = self._stack[index + 1 :]
                del self._stack[index:]
                return values
        raise _RefusedError("a mark is missing")

    def _pop_last_two(self) -> list[Any]:
        value, key = self._stack.pop(), self._stack.pop()
        return [key, value]

    def _top(self, kind: type[Any]) -> Any:
        if type(self._stack[-1]) is not kind:
            raise _RefusedError(f"a {kind.__name__} is missing")
        return self._stack[-1]

    def _checked(self, values: list[Any], count: int) -> list[Any]:
        if len(values) != count or _MARK in values:
            raise _RefusedError("a value is missing")
        return values


def _text(value: Any) -> Any:
    return value.decode("latin-1") if isinstance(value, bytes) else value
