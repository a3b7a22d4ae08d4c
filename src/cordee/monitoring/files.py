"""Files that are whole or not there, and JSON that is always valid."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from cordee.core.errors import RunDirectoryError, StorageError


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` by `content`, so that whoever reads sees the old or the new content, also after a crash.

    Raises `StorageError`, and leaves `path` as it was, when the disk is full or refuses.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):  # the first error is the one to report
            temporary.unlink()
        raise StorageError(f"cannot write {path}: {reason(error)}") from error


def open_regular(path: Path) -> BinaryIO:
    """Open a file of a run directory for reading.

    Raises RunDirectoryError if it is a link, a pipe, a device or a folder: a run directory may come from anybody, and
    a link in it could show any file of this host.
    """
    try:
        # Opening a pipe would wait for somebody who writes.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise RunDirectoryError(f"{path} is a link, which is not followed") from None
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise RunDirectoryError(f"{path} is not a regular file")


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Return what is in a file of a run directory. Raises RunDirectoryError if it is more, or no regular file."""
    with open_regular(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise RunDirectoryError(f"{path} has more than {most_bytes:,} bytes: it is damaged")
    return content


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reason(error: OSError) -> str:
    """Return what the system says, in lower case: "no space left on device"."""
    text = error.strerror or str(error)
    return text[:1].lower() + text[1:]


def to_json(value: Any) -> bytes:
    """Return `value` as one line of JSON. NaN and infinities become null; tensors of one element, numbers."""
    try:
        return msgspec.json.encode(value, enc_hook=_plain)
    except UnicodeEncodeError:  # file names that are not valid UTF-8
        return msgspec.json.encode(_printable(msgspec.to_builtins(value, enc_hook=_plain)))


def _plain(value: Any) -> Any:
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "size", None) is not None and _count(value) == 1:
        return item()
    return str(value)


def _count(value: Any) -> int:
    return int(value.numel() if hasattr(value, "numel") else value.size)


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {_printable(key): _printable(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_printable(inner) for inner in value]
    return value
