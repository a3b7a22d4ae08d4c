"""Images as the user has them: in folders by class, in tar files, or encoded in the column of a table. With Pillow."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import posixpath
import tarfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from cordee.core.env import cache_folder
from cordee.core.errors import DataError, JobError, nearest
from cordee.core.references import resolve
from cordee.data.datasets import DatasetSource
from cordee.data.source import Splits
from cordee.data.storage import DataFile, files_below, find_data_files, is_url, require_package, under_root, write_whole

Color = Literal["rgb", "gray"]

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
# Headers that are looked at before training: all of a small set, some of a large one. The rest is checked when read.
_NUM_LOOKED_AT = 2_000
_HEADER_BYTES = 1 << 16
_NUM_NAMED = 5


class ImageSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What images become: (channels, height, width) of bytes."""

    size: tuple[int, int] | None = None  # height and width that images are resized to
    color: Color = "rgb"
    expected: tuple[int, int] | None = None  # height and width that images must have, where they are not resized

    @classmethod
    def of_keys(cls, resize: Sequence[int] | None, color: Color) -> ImageSettings:
        """Return the settings that data.resize and data.color give."""
        if resize is not None and (len(resize) != 2 or min(resize) < 1):
            raise JobError(f"data.resize = {list(resize)} must be [height, width], of at least 1 each")
        return cls(size=None if resize is None else (resize[0], resize[1]), color=color)

    def refuse_any(self, what: str) -> None:
        """Raise JobError if something is set, for data without images."""
        if self.size is not None or self.color != "rgb":
            key = "resize" if self.size is not None else "color"
            raise JobError(f"data.{key} is for images, and {what} has no column of them: remove it")

    def of_first(self, content: bytes, name: str = "the first image") -> ImageSettings:
        """Return the settings with the size of an image as the one that all must have."""
        return msgspec.structs.replace(self, expected=self.size or header_size(content, name))

    def decode(self, content: bytes, name: str) -> Tensor:
        """Return an encoded image as bytes (channels, height, width). Raises DataError with its name."""
        pixels = np.array(self.open(content, name))
        return torch.from_numpy(pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1)))

    def open(self, content: bytes, name: str, *, keeps_depth: bool = False) -> Any:
        """Return the image as Pillow has it, in the colours and the size asked for.

        With `keeps_depth` pixels of more than 8 bits stay as they are; else they are refused.
        """
        pillow = _pillow()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about odd metadata
                with pillow.open(io.BytesIO(content)) as image:
                    found = (image.height, image.width)
                    if self.size is None and self.expected is not None and found != self.expected:
                        raise DataError(_other_size(name, found, self.expected))
                    if not keeps_depth:
                        _check_depth(image, name)
                    is_deep = image.mode.startswith(_DEEP)
                    converted = image.copy() if is_deep else image.convert("RGB" if self.color == "rgb" else "L")
        except DataError:
            raise
        except Exception as error:  # of any decoder
            raise DataError(f"{name} cannot be read as an image: {_why_unreadable(error)}") from error
        if self.size is not None and found != self.size:
            converted = converted.resize((self.size[1], self.size[0]), pillow.Resampling.BILINEAR)
        return converted


_DEEP = ("I", "F")  # modes of Pillow with more than 8 bits


def _check_depth(image: Any, name: str) -> None:
    """Refuse an image that does not fit into bytes: Pillow would make 255 of all larger numbers."""
    if image.mode.startswith(_DEEP):
        raise DataError(
            f"{name} has pixels of more than 8 bits ({image.mode}): convert it to 8 bits, or set data.transform, which "
            "is given the image as it is"
        )


def header_size(content: bytes, name: str, *, keeps_depth: bool = False) -> tuple[int, int]:
    """Return height and width of an encoded image, from its header. Raises DataError with its name."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with _pillow().open(io.BytesIO(content)) as image:
                if not keeps_depth:
                    _check_depth(image, name)
                return image.height, image.width
    except DataError:
        raise
    except Exception as error:  # of any decoder
        raise DataError(f"{name} cannot be read as an image: {_why_unreadable(error)}") from error


def _why_unreadable(error: Exception) -> str:
    if isinstance(error, require_package("PIL", "reading images", "images").UnidentifiedImageError):
        return "it is empty, damaged, or of a format that Pillow does not know"  # Pillow names an object in memory
    return str(error)


def _pillow() -> Any:
    return require_package("PIL.Image", "reading images", "images")


def _other_size(name: str, found: tuple[int, int], expected: tuple[int, int]) -> str:
    return (
        f"{name} has {found[0]} × {found[1]} pixels (height × width), and the first image has "
        f"{expected[0]} × {expected[1]}: "
        f"set data.resize = [{expected[0]}, {expected[1]}], say"
    )


class ImageDataset:
    """Encoded images with labels. A sample is read when it is asked for."""

    def __init__(
        self,
        names: Sequence[str],
        targets: Sequence[int],
        classes: Sequence[str],
        read: Callable[[int, int], bytes],
        settings: ImageSettings,
        transform: Callable[[Any], Any] | None,
    ) -> None:
        """`read(index, length)` gives an image as it is encoded, or its first bytes."""
        self.names = names
        self.targets, self.classes = list(targets), list(classes)
        self.settings = settings
        self._read, self._transform = read, transform

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        content, name = self._read(index, _WHOLE), self.names[index]
        if self._transform is None:
            return self.settings.decode(content, name), self.targets[index]
        return self._transform(self.settings.open(content, name, keeps_depth=True)), self.targets[index]

    def look_at_headers(self) -> None:
        """Find images that cannot be read, or have another size than the first, before training. Names some."""
        count = len(self)
        positions = np.unique(np.linspace(0, count - 1, min(count, _NUM_LOOKED_AT)).round().astype(int)).tolist()
        unreadable, sizes = [], Counter[tuple[int, int]]()
        example: dict[tuple[int, int], str] = {}
        for position in positions:
            try:
                size = self._size(position)
            except DataError as error:
                unreadable.append(str(error))
                continue
            sizes[size] += 1
            example.setdefault(size, self.names[position])
        if unreadable:
            more = f" ({len(unreadable)} images in all)" if len(unreadable) > 1 else ""
            raise DataError("; ".join(unreadable[:_NUM_NAMED]) + more)
        if self.settings.size is None and len(sizes) > 1 and self._transform is None:
            (usual, _), (other, _), *_ = sizes.most_common()
            raise DataError(
                f"images have {len(sizes)} different sizes (height × width): {usual[0]} × {usual[1]} "
                f"({sizes[usual]} of them, {example[usual]}), {other[0]} × {other[1]} ({example[other]}): "
                f"set data.resize = [{usual[0]}, {usual[1]}], say"
            )

    def _size(self, index: int) -> tuple[int, int]:
        name, keeps_depth = self.names[index], self._transform is not None
        try:
            return header_size(self._read(index, _HEADER_BYTES), name, keeps_depth=keeps_depth)
        except DataError:  # a header may be longer
            return header_size(self._read(index, _WHOLE), name, keeps_depth=keeps_depth)

    def expect_size(self, size: tuple[int, int] | None = None) -> tuple[int, int]:
        """Refuse, from now on, images of another size than `size`, or than the first one. Returns the size."""
        size = size or self.settings.size or self._size(0)
        if self._transform is None:  # which may well bring images to one size
            self.settings = msgspec.structs.replace(self.settings, expected=size)
        return size


_WHOLE = -1  # all bytes of an image


def _splits(name: str, train: ImageDataset, test: ImageDataset | None, notes: Sequence[str] = ()) -> Splits:
    sets = [dataset for dataset in (train, test) if dataset is not None]
    size = None
    for dataset in sets:
        dataset.look_at_headers()
        size = dataset.expect_size(size)
    sources = [DatasetSource(dataset, what) for dataset, what in zip(sets, ("the training set", "the test set"))]
    return Splits(
        train=sources[0],
        test=sources[1] if test is not None else None,
        input_shape=sources[0].input_shape,
        num_classes=len(train.classes),
        name=name,
        warnings=tuple(notes),
        class_names=tuple(train.classes),
    )


class _Transforms(NamedTuple):
    """What is done to an image of the training set and to one of the test set; None where nothing is."""

    train: Callable[[Any], Any] | None
    test: Callable[[Any], Any] | None

    @classmethod
    def of_keys(cls, transform: Any, test_transform: Any, test: str | None, path: Sequence[str]) -> _Transforms:
        if test_transform is not None and test is None:
            raise JobError(
                "data.test_transform is for the images of data.test, which is not set: set it, or remove test_transform"
            )
        train = None if transform is None else resolve("data.transform", transform, {}, python_path=path)
        if test_transform is None:
            return cls(train, train)
        return cls(train, resolve("data.test_transform", test_transform, {}, python_path=path))

    def of(self, key: str) -> Callable[[Any], Any] | None:
        """Return what is done to the images that data.`key` names."""
        return self.test if key == "test" else self.train


# Folders: a folder for each class.


def image_folder(
    path: str,
    test: str | None = None,
    root: str | None = None,
    resize: tuple[int, ...] | None = None,
    color: Color = "rgb",
    transform: Any = None,
    test_transform: Any = None,
    python_path: Sequence[str] = (),
) -> Splits:
    """Images of a folder that has a folder for each class, at any depth; the classes are in the order of their names.

    `transform` is given the image as Pillow has it, and returns an input. `test_transform` takes its place in the test
    set.
    """
    _pillow()
    settings = ImageSettings.of_keys(resize, color)
    transforms = _Transforms.of_keys(transform, test_transform, test, python_path)

    def dataset(where: str, key: str, classes: Sequence[str] | None) -> ImageDataset:
        found = _find_remote(where, root, key) if is_url(under_root(where, root, key)) else _find(where, root, key)
        names, files = zip(*((name, file) for group in found.values() for name, file in group))
        if classes is None:
            classes = sorted(found)
        if other := next((name for name in sorted(found) if name not in classes), None):
            raise DataError(
                f"data.{key} = {where!r} has the class folder {other!r}, which the training set has not"
                f"{nearest(other, classes)} (it has: {', '.join(classes[:12])})"
            )
        targets = [classes.index(name) for name, group in found.items() for _ in group]

        def read(index: int, length: int) -> bytes:
            with _opened(files[index]) as file:
                content: bytes = file.read(length)
                return content

        return ImageDataset(names, targets, classes, read, settings, transforms.of(key))

    train = dataset(path, "path", None)
    if len(train.classes) < 2:
        raise DataError(f"data.path = {path!r} has one class folder, {train.classes[0]!r}: there must be at least two")
    return _splits("image-folder", train, None if test is None else dataset(test, "test", train.classes))


def _opened(file: str | DataFile) -> Any:
    if isinstance(file, DataFile):
        return file.open()
    try:
        return Path(file).open("rb")
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from error


def _find(path: str, root: str | None, key: str) -> dict[str, list[tuple[str, str]]]:
    """Return the images of each class folder: what messages call them, and where they are."""
    top = Path(under_root(path, root, key))
    if not top.is_dir():
        beside = [entry.name for entry in top.parent.iterdir()] if top.parent.is_dir() else []
        raise DataError(f"data.{key} = {path!r} is not a folder{nearest(top.name, beside)}")
    entries = sorted(entry for entry in top.iterdir() if not entry.name.startswith("."))
    found: dict[str, list[tuple[str, str]]] = {}
    for folder in (entry for entry in entries if entry.is_dir()):
        images = sorted(str(file) for file in files_below(folder) if file.name.lower().endswith(IMAGE_SUFFIXES))
        found[folder.name] = [(name, name) for name in images]
    if not any(found.values()):
        loose = sum(entry.name.lower().endswith(IMAGE_SUFFIXES) for entry in entries)
        detail = f"it has {loose} images and no class folder with images" if loose else "no class folder has an image"
        raise DataError(f"data.{key} = {path!r}: {detail}; put the images of each class into a folder of its name")
    return found


def _find_remote(path: str, root: str | None, key: str) -> dict[str, list[tuple[str, DataFile]]]:
    found: dict[str, list[tuple[str, DataFile]]] = {}
    for file in find_data_files(path, IMAGE_SUFFIXES, key=key, root=root, hidden="."):
        name, separator, _ = file.name.partition("/")
        if not separator:
            raise DataError(
                f"data.{key} = {path!r}: {file.name} is in no class folder; put it into a folder of its class"
            )
        found.setdefault(name, []).append((file.url, file))
    return dict(sorted(found.items()))  # as a local folder is read: the names of files put "a-b/" before "a/"


# Tar files: members are read where they are.


class _Member(msgspec.Struct, frozen=True, array_like=True):
    """An image in a tar file."""

    name: str
    offset: int
    size: int
    label: str
    is_named_by_folder: bool


class _TarIndex(msgspec.Struct, frozen=True):
    """The images of a tar file; kept in the cache folder, as finding them means going through the file."""

    version: int
    members: list[_Member]


_INDEX_VERSION = 2


def image_tar(
    path: str,
    test: str | None = None,
    root: str | None = None,
    resize: tuple[int, ...] | None = None,
    color: Color = "rgb",
    transform: Any = None,
    test_transform: Any = None,
    python_path: Sequence[str] = (),
) -> Splits:
    """Images in tar files. The label of a.jpg is the text in a.cls beside it, else the folder that a.jpg is in."""
    _pillow()
    settings = ImageSettings.of_keys(resize, color)
    transforms = _Transforms.of_keys(transform, test_transform, test, python_path)
    known: list[str] | None = None

    def dataset(where: str, key: str) -> ImageDataset:
        nonlocal known
        found = [
            (file, member)
            for file in find_data_files(where, (".tar",), key=key, root=root)
            for member in _index_of(file).members
        ]
        if not found:
            raise DataError(f"data.{key} = {where!r}: no tar file has an image ({', '.join(IMAGE_SUFFIXES)})")
        if odd := next((m for _, m in found if m.is_named_by_folder != found[0][1].is_named_by_folder), None):
            raise DataError(
                f"data.{key} = {where!r}: {found[0][1].name} and {odd.name} have their labels in different ways; "
                "either every image has a .cls beside it, or none has"
            )
        labels = [member.label for _, member in found]
        if known is None:
            known = _classes_of(labels)
        places = {name: place for place, name in enumerate(known)}
        if other := next((label for label in labels if label not in places), None):
            raise DataError(f"data.{key} = {where!r} has the label {other!r}, which the training set has not")

        def read(index: int, length: int) -> bytes:
            file, member = found[index]
            return file.read(member.offset, member.size if length == _WHOLE else min(length, member.size))

        names = [f"{member.name} of {file.url}" for file, member in found]
        targets = [places[label] for label in labels]
        return ImageDataset(names, targets, known, read, settings, transforms.of(key))

    train = dataset(path, "path")
    return _splits("image-tar", train, None if test is None else dataset(test, "test"))


def _classes_of(labels: Sequence[str]) -> list[str]:
    """Return the classes: 0, 1, 2, … up to the largest where all labels are numbers, else the texts in order."""
    different = set(labels)
    if not all(label.isdecimal() and str(int(label)) == label for label in different):  # "007" is a text
        return sorted(different)
    return [str(number) for number in range(max(map(int, different)) + 1)]


def _index_of(file: DataFile) -> _TarIndex:
    key = hashlib.sha256(f"{file.url} {file.size} {file.stamp}".encode()).hexdigest()[:24]
    kept = cache_folder() / "data" / "tar" / f"{key}.msgpack"
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        index = msgspec.msgpack.decode(kept.read_bytes(), type=_TarIndex)
        if index.version == _INDEX_VERSION:
            return index
    index = _TarIndex(_INDEX_VERSION, _find_members(file))
    if file.stamp:  # else a changed file could not be told from this one
        with contextlib.suppress(OSError):  # the next time it takes as long again
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_whole(kept, msgspec.msgpack.encode(index))
    return index


def _find_members(file: DataFile) -> list[_Member]:
    images: list[tarfile.TarInfo] = []
    files: dict[str, tarfile.TarInfo] = {}
    labels: dict[str, str] = {}
    try:
        with file.open() as opened, tarfile.open(fileobj=opened, mode="r:") as archive:
            for member in archive:
                is_image = member.name.lower().endswith(IMAGE_SUFFIXES)
                if is_image and (member.islnk() or member.issym()):
                    images.append(_followed(file, member, files))
                if not member.isfile():
                    continue
                files[posixpath.normpath(member.name)] = member
                if is_image:
                    images.append(member)
                elif member.name.endswith(".cls"):
                    content = archive.extractfile(member)
                    assert content is not None
                    labels[_key_of(member.name)] = content.read(_HEADER_BYTES).decode(errors="replace").strip()
            # Where a file is cut off within a header, or before one, `tarfile` takes this for the end.
            opened.seek(archive.offset)
            if opened.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
                raise DataError(f"{file.url} is truncated: it has no end mark of a tar file. Write or copy it again")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DataError(
            f"{file.url} cannot be read as a tar file: {error}. A compressed one (.tar.gz) has to be unpacked first: "
            "its members cannot be read one by one"
        ) from error
    return [_member(file, image, labels) for image in images]


def _followed(file: DataFile, link: tarfile.TarInfo, files: Mapping[str, tarfile.TarInfo]) -> tarfile.TarInfo:
    """Return the file that a link of a tar file means, under the name of the link."""
    folder = posixpath.dirname(link.name) if link.issym() else ""
    target = files.get(posixpath.normpath(posixpath.join(folder, link.linkname)))
    if target is None:
        raise DataError(f"{file.url}: {link.name} is a link to {link.linkname}, which is not in it before the link")
    found = copy.copy(target)
    found.name = link.name
    return found


def _member(file: DataFile, image: tarfile.TarInfo, labels: Mapping[str, str]) -> _Member:
    folder = Path(image.name).parent.name
    label = labels.get(_key_of(image.name))
    if label is None and not folder:
        raise DataError(
            f"{file.url}: {image.name} has no label: add {_key_of(image.name)}.cls, or a folder of its class"
        )
    if image.offset_data + image.size > file.size:
        raise DataError(f"{file.url} is truncated: it ends within {image.name}")
    return _Member(image.name, image.offset_data, image.size, label if label is not None else folder, label is None)


def _key_of(name: str) -> str:
    """Return what the files of one sample have in common: the name up to the first dot."""
    folder, slash, base = name.rpartition("/")
    return f"{folder}{slash}{base.partition('.')[0]}"
