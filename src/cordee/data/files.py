"""Where the files of a data set are looked for, and the message when they are not there."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import http.client
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path
from typing import TypeVar

from cordee.core.env import cache_folder, data_folders
from cordee.core.errors import DataError, StorageError

T = TypeVar("T")

SYSTEM_FOLDER = Path("/usr/share/datasets")


@dataclasses.dataclass(frozen=True)
class FileSet:
    """What is known of a data set that is read from files."""

    name: str
    title: str
    needed: str  # the files, in words
    folders: tuple[str, ...]  # subfolders it is looked for in, beside the place itself
    downloads: tuple[Download, ...]
    advice: tuple[str, ...] = ()  # other ways to get the files


class PassedOver(str):
    """Why a folder that has files of the right names is not used."""

    __slots__ = ()


def locate(files: FileSet, find: Callable[[Path], T | PassedOver | None], *, root: str | None, download: bool) -> T:
    """Return what `find` finds in the first folder that holds the whole set, fetching it if `download` is set.

    With `root` only that place is looked in. Raises DataError with all places searched and what to put there.
    """
    places = [Path(root).expanduser()] if root is not None else standard_places()
    searched = candidates(files, places)
    passed_over = []
    for folder in searched:
        found = find(folder) if folder.is_dir() else None
        if isinstance(found, PassedOver):
            passed_over.append(found)
        elif found is not None:
            return found
    if not download:
        raise DataError(_missing(files, searched, passed_over, root))
    target = places[0] if root is not None else download_folder(files)
    fetch(files.downloads, target, advice=" ".join(_advice(files, target, with_download=False)))
    found = find(target)
    assert found is not None and not isinstance(found, PassedOver), (
        f"{files.name} was fetched to {target} but is not found there"
    )
    return found


def standard_places() -> list[Path]:
    """Return where data sets are looked for when the job does not say: CORDEE_DATA, the cache, the system."""
    return [*data_folders(), cache_folder() / "data", SYSTEM_FOLDER]


def download_folder(files: FileSet) -> Path:
    return cache_folder() / "data" / files.name


def candidates(files: FileSet, places: Sequence[Path]) -> list[Path]:
    """Return the folders to look in, in order: each place itself, then its subfolders named after the set."""
    return [folder for place in places for folder in (place, *(place / name for name in files.folders))]


def _missing(files: FileSet, searched: Sequence[Path], passed_over: Sequence[str], root: str | None) -> str:
    where = f"data.root = {root!r} does not hold" if root is not None else "cannot find"
    target = Path(root).expanduser() if root is not None else download_folder(files)
    lines = [
        f"{where} the files of {files.title}",
        f"  needed:   {files.needed}",
        *(f"  {'searched:' if index == 0 else '         '} {folder}" for index, folder in enumerate(searched)),
        *(f"  not used: {reason}" for reason in passed_over),
        *(f"  {line}" for line in _advice(files, target, with_download=True)),
    ]
    if root is not None:
        lines.append("  Without data.root they are also looked for in $CORDEE_DATA, the cache and system folders.")
    return "\n".join(lines)


def _advice(files: FileSet, target: Path, *, with_download: bool) -> list[str]:
    advice = [f"Put the files into {target}, or name their folder in data.root or $CORDEE_DATA.", *files.advice]
    if with_download:
        advice.append("With a network: set data.download = true.")
    return advice


# Fetching the files of a data set, checked before they get their name.

_CHUNK_BYTES = 1 << 20
_TIMEOUT_S = 30.0


@dataclasses.dataclass(frozen=True)
class Download:
    """A file to fetch: its name, the folders on the web that have it (tried in order), and its SHA-256."""

    file_name: str
    mirrors: tuple[str, ...]
    sha256: str


def fetch(downloads: Sequence[Download], folder: Path, *, advice: str) -> None:
    """Bring those files into `folder` that it lacks.

    A file gets its name only when it is whole and has the right checksum. Raises DataError, ending with
    `advice`, if no mirror gives such a file; StorageError if it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"cannot make the folder {folder}: {error.strerror}; set data.root or CORDEE_CACHE"
        ) from error
    for download in downloads:
        if not (folder / download.file_name).exists():
            _fetch_one(download, folder, advice)


def _fetch_one(download: Download, folder: Path, advice: str) -> None:
    failures = []
    for mirror in download.mirrors:
        url = f"{mirror.rstrip('/')}/{download.file_name}"
        try:
            handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{download.file_name}.", suffix=".part")
            os.close(handle)
        except OSError as error:
            raise StorageError(f"cannot write into {folder}: {error.strerror}") from error
        try:
            failure = _receive(url, Path(temporary), download.sha256)
            if failure is None:
                Path(temporary).replace(folder / download.file_name)
                return
            failures.append(f"{url}: {failure}")
        finally:
            with contextlib.suppress(FileNotFoundError):
                Path(temporary).unlink()
    raise DataError(f"cannot fetch {download.file_name} ({'; '.join(failures)}). {advice}")


def _receive(url: str, path: Path, sha256: str) -> str | None:
    """Write what `url` gives to `path` and return None, or what went wrong."""
    digest = hashlib.sha256()
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response, path.open("wb", buffering=0) as file:
            while chunk := response.read(_CHUNK_BYTES):
                digest.update(chunk)
                _write(file, chunk)
    except urllib.error.HTTPError as error:
        error.close()
        return f"the server answered {error.code} {error.reason}"
    except (OSError, http.client.HTTPException) as error:
        return str(getattr(error, "reason", None) or error) or type(error).__name__
    if digest.hexdigest() != sha256:
        return f"the checksum is {digest.hexdigest()}, expected {sha256}: the file was damaged or replaced"
    return None


def _write(file: FileIO, content: bytes) -> None:
    # Distinguished here from failures of the network, which are OSErrors as well.
    try:
        while content:
            content = content[file.write(content) :]
    except OSError as error:
        raise StorageError(f"cannot write the download {file.name}: {error.strerror}") from error
