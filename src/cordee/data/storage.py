"""Files of the user's that data is read from: on this host or behind an fsspec URL, by name, folder or pattern."""

from __future__ import annotations

import dataclasses
import glob
import importlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from cordee.core.errors import DataError, MissingExtraError, nearest

_NUM_SHOWN = 6  # names that a message lists


@dataclasses.dataclass(frozen=True)
class DataFile:
    """A file to read from. Opened again for each reading, so that threads and processes do not share a position."""

    url: str  # as fsspec takes it, or a path
    name: str  # within the folder or pattern that was asked for
    size: int
    stamp: str = ""  # changes when the file does, as far as the storage says so
    files: Any = dataclasses.field(default=None, repr=False)  # fsspec's file system; None: a file of this host

    @property
    def local(self) -> Path | None:
        return None if self.files is not None else Path(self.url)

    def open(self) -> IO[bytes]:
        """Open the file to be read. Raises DataError if that cannot be done."""
        try:
            if self.files is None:
                return Path(self.url).open("rb")
            file: IO[bytes] = self.files.open(self.url, "rb")
            return file
        except Exception as error:  # of any storage
            raise DataError(f"cannot read {self.url}: {_reason(error)}") from error

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes of the file. Raises DataError if they are not all there."""
        try:
            with self.open() as file:
                file.seek(offset)
                content = file.read(length)
        except Exception as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"cannot read {self.url}: {_reason(error)}") from error
        if len(content) != length:
            raise DataError(
                f"{self.url} has {self.size:,} bytes at the start, and now ends before byte {offset + length:,}: "
                "do not change data that is being trained on"
            )
        return content

    def check_unchanged(self) -> None:
        """Raise DataError if the file is another one than at the start, as far as that can be seen at once."""
        if self.files is None:
            now = _local_file(Path(self.url), self.name)
            if (now.size, now.stamp) != (self.size, self.stamp):
                raise DataError(f"{self.url} was changed while it is trained on: put the former file back and resume")


def is_url(path: str) -> bool:
    return "://" in path


def is_there(path: str) -> bool:
    """Return whether there is such a file, on this host or behind an fsspec URL. Raises DataError if nobody can say."""
    if not is_url(path):
        return Path(path).exists()
    fsspec = require_package("fsspec", path, "storage")
    try:
        files, name = fsspec.core.url_to_fs(path)
        return bool(files.exists(name))
    except Exception as error:  # of any storage
        raise DataError(f"{path} cannot be read: {_reason(error)}") from error


def find_data_files(
    path: str, suffixes: Sequence[str], *, key: str = "path", root: str | None = None, hidden: str = "._"
) -> list[DataFile]:
    """Return the files that `path` means, in the order of their names: a file, those of a folder, those of a pattern.

    In folders, at any depth, files with one of the `suffixes` count, but not those in whose path a name begins with one
    of the characters `hidden`. `path` may be an fsspec URL. A `root` is where a relative path begins. Raises DataError
    if there are none.
    """
    full = under_root(path, root, key)
    find = _find_remote if is_url(full) else _find_local
    found = find(full, suffixes, key, hidden)
    if not found:
        raise DataError(f"data.{key} = {path!r}: no file matches{_beside(full)}")
    for file in found:
        if file.size == 0:
            raise DataError(f"data.{key}: {file.url} is empty (0 bytes): write it again, or remove it")
    return sorted(found, key=lambda file: file.name)


def under_root(path: str, root: str | None, key: str) -> str:
    if root is None:
        return path if is_url(path) else str(Path(path).expanduser())
    if is_url(path) or Path(path).is_absolute():
        raise DataError(
            f"data.{key} = {path!r} is a whole path, and data.root = {root!r} is where relative ones begin: "
            f"remove data.root, or make data.{key} relative to it"
        )
    return f"{root.rstrip('/')}/{path}"


def _find_local(path: str, suffixes: Sequence[str], key: str, hidden: str) -> list[DataFile]:
    place = Path(path)
    if place.is_dir():
        names = [
            str(file.relative_to(place))
            for file in files_below(place)
            if _is_counted(file.relative_to(place).parts, suffixes, hidden) and file.is_file()
        ]
        if not names:
            raise DataError(
                f"data.{key} = {path!r}: the folder has no file that ends in {' or '.join(suffixes)}{_inside(place)}"
            )
        return [_local_file(place / name, name) for name in names]
    if place.exists():
        return [_local_file(place, place.name)]
    if _has_pattern(path):
        return [
            _local_file(Path(name), name)
            for name in glob.glob(path, recursive=True)  # noqa: PTH207 - a pattern may begin anywhere
            if Path(name).is_file()
        ]
    names = [entry.name for entry in place.parent.iterdir()] if place.parent.is_dir() else []
    raise DataError(f"data.{key} = {path!r} does not exist{nearest(place.name, names)}")


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder, at any depth, also through links. Hidden files and folders do not count."""
    for where, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in folders:
            below = Path(where, name)
            if below.is_symlink() and Path(where).resolve().is_relative_to(below.resolve()):
                raise DataError(f"{below} is a link to a folder that it is in: remove it")
        yield from (Path(where, name) for name in names if not name.startswith("."))


def _local_file(path: Path, name: str) -> DataFile:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"cannot read {path}: {_reason(error)}") from error
    if not os.access(path, os.R_OK):
        raise DataError(f"cannot read {path}: permission denied")
    return DataFile(str(path), name, status.st_size, str(status.st_mtime_ns))


def _find_remote(url: str, suffixes: Sequence[str], key: str, hidden: str) -> list[DataFile]:
    fsspec = require_package("fsspec", f"data.{key} = {url!r}", "storage")
    try:
        files, path = fsspec.core.url_to_fs(url)
        if _has_pattern(path) and not files.exists(path):
            found = [(name, name) for name in files.glob(path) if not files.isdir(name)]
        elif files.isdir(path):
            prefix = f"{path.rstrip('/')}/"
            inside = [(name, name.removeprefix(prefix)) for name in files.find(path)]
            found = [(name, short) for name, short in inside if _is_counted(Path(short).parts, suffixes, hidden)]
        elif files.exists(path):
            found = [(path, path.rpartition("/")[2])]
        else:
            raise DataError(f"data.{key} = {url!r} does not exist")
        return [_remote_file(files, name, short) for name, short in found]
    except DataError:
        raise
    except ImportError as error:
        raise DataError(
            f"data.{key} = {url!r} needs another package: {error}; or pip install 'cordee[storage]'"
        ) from error
    except Exception as error:  # of any storage
        raise DataError(f"data.{key} = {url!r} cannot be read: {_reason(error)}") from error


def _remote_file(files: Any, path: str, name: str) -> DataFile:
    info = files.info(path)
    stamp = next((str(info[word]) for word in ("ETag", "etag", "mtime", "created") if info.get(word)), "")
    return DataFile(path, name, int(info.get("size") or 0), stamp, files)


def _is_counted(parts: Sequence[str], suffixes: Sequence[str], hidden: str) -> bool:
    return parts[-1].lower().endswith(tuple(suffixes)) and not any(part.startswith(tuple(hidden)) for part in parts)


def _has_pattern(path: str) -> bool:
    return any(character in path for character in "*?[")


def _beside(path: str) -> str:
    """Return what there is where a pattern was looked for."""
    folder = Path(path).parent
    while _has_pattern(str(folder)):
        folder = folder.parent
    if is_url(path) or not folder.is_dir():
        return "" if is_url(path) else f": there is no folder {folder}"
    return _inside(folder)


def _inside(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    if not names:
        return f": {folder} is empty"
    return f": {folder} has {', '.join(names[:_NUM_SHOWN])}{', …' if len(names) > _NUM_SHOWN else ''}"


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def require_package(name: str, feature: str, extra: str) -> Any:
    """Return an optional package. Raises MissingExtraError, which says what to install, if there is none."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.partition(".")[0] != name.partition(".")[0]:
            raise
        raise MissingExtraError(feature, extra) from None


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that others see whole or not at all. Raises OSError."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
