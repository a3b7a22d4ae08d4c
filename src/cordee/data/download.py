"""Fetching the files of a data set, checked before they get their name."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import http.client
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from io import FileIO
from pathlib import Path

from cordee.core.errors import DataError, StorageError

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
    # Told apart here from failures of the network, which are OSErrors as well.
    try:
        while content:
            content = content[file.write(content) :]
    except OSError as error:
        raise StorageError(f"cannot write the download {file.name}: {error.strerror}") from error
