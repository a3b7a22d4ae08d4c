"""A place for checkpoints outside of the run directory: any URL that fsspec opens, or a folder that hosts share.

Names are relative to the place, with '/' between their parts. Nothing relies on renaming, locking or listing in order:
object stores have none of it. fsspec and its drivers are imported when a storage is opened, never before.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from cordee.core.errors import CordeeError, JobError, MissingExtraError, StorageError, nearest

log = logging.getLogger("cordee.storage")

PIECE_BYTES = 8 << 20  # of a file, that is read at once
WITHIN_S = 60.0  # what is asked before training begins is answered, or the storage is taken for unreachable

T = TypeVar("T")


class RefusedByStorageError(StorageError):
    """What trying again does not change: no permission, no such bucket, not supported."""


class Retries:
    """Calls what speaks to a storage, and calls it again when it fails; the wait in between is longer each time."""

    def __init__(
        self,
        num_attempts: int = 6,
        first_s: float = 1.0,
        longest_s: float = 30.0,
        leave: threading.Event | None = None,
    ) -> None:
        """`leave`, once it is set, ends the waiting."""
        self._num_attempts = num_attempts
        self._first_s, self._longest_s = first_s, longest_s
        self._leave = leave or threading.Event()

    def __call__(self, action: Callable[[], T]) -> T:
        """Return what `action` returns at the first attempt that succeeds. Raises the StorageError of the last one.

        A refusal is not tried again.
        """
        for wait_s in [self._first_s * 2**number for number in range(self._num_attempts - 1)]:
            try:
                return action()
            except RefusedByStorageError:
                raise
            except StorageError as error:
                log.info("trying again in %.1f s: %s", min(wait_s, self._longest_s), error)
                if self._leave.wait(min(wait_s, self._longest_s)):
                    raise
        return action()


class Storage:
    """An open storage. Any thread may use it. Every problem is a StorageError that names the place.

    What drivers say is repeated without what may be a credential.
    """

    def __init__(self, url: str) -> None:
        """Connect to `url`. Raises JobError, or MissingExtraError, where that cannot be right."""
        self.url = url
        self._files, self._root = _connect(url)

    def require(self) -> None:
        """Raise RefusedByStorageError if the place is not there. A prefix in a bucket comes with its first file."""
        is_folder = getattr(self._files, "local_file", False)
        with self._doing("use as checkpoint.storage", ""):
            # Listed, since drivers take every error for an answer when they are asked whether something exists.
            if self._is_there(self._root):
                return
            if not is_folder and self._is_there(self._root.strip("/").partition("/")[0]):
                return
        how = f"make it (mkdir -p {self._root}), or mount it" if is_folder else "make it first"
        raise RefusedByStorageError(f"checkpoint.storage = {self.url!r} is not there: {how}")

    def _is_there(self, path: str) -> bool:
        try:
            self._files.ls(path, detail=False)
        except FileNotFoundError:
            return False
        return True

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """Return the content of a small file; None if it is not there."""
        with self._doing("read", name):
            try:
                with self._files.open(self._path(name), "rb") as file:
                    content: bytes = file.read(max_bytes + 1)
            except FileNotFoundError:
                return None
            if len(content) > max_bytes:
                raise RefusedByStorageError(f"{self.where(name)} has more than the {max_bytes} bytes it may have")
            return content

    def pieces(self, name: str) -> Iterator[bytes]:
        """Yield the content of a file. Raises StorageError if it is not there."""
        with self._doing("read", name), self._files.open(self._path(name), "rb", block_size=PIECE_BYTES) as file:
            while piece := file.read(PIECE_BYTES):
                yield piece

    def write(self, name: str, content: bytes) -> None:
        """Write a small file, in place of an earlier one."""
        with self._doing("write", name):
            self._with_folder(name, lambda path: self._files.pipe_file(path, content))

    def create(self, name: str, content: bytes) -> bool:
        """Write a small file unless there is one; return whether it was written.

        Of two that do so at once one succeeds where the driver can tell; elsewhere look again at what is there.
        """
        with self._doing("write", name):
            try:
                self._with_folder(name, lambda path: self._create(path, content))
            except FileExistsError:
                return False
            return True

    def _create(self, path: str, content: bytes) -> None:
        if getattr(self._files, "local_file", False):
            with self._files.open(path, "xb") as file:
                file.write(content)
        else:
            self._files.pipe_file(path, content, mode="create")

    def put(self, name: str, pieces: Callable[[], Iterable[bytes]]) -> None:
        """Write a file. What is there after a failure is of no use to anybody."""

        def write(path: str) -> None:
            with self._files.open(path, "wb") as file:
                for piece in pieces():
                    file.write(piece)

        with self._doing("write", name):
            self._with_folder(name, write)

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the files in a folder, by name, with their sizes; none if it is not there."""
        return {name: size for name, size in self._list(folder) if size >= 0}

    def folders(self, folder: str = "") -> list[str]:
        """Return the names of the folders in a folder."""
        return sorted(name for name, size in self._list(folder) if size < 0)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with self._doing("remove", name), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def remove_folder(self, folder: str) -> None:
        """Remove an empty folder, where folders exist without files."""
        with contextlib.suppress(Exception):  # drivers raise what they like; an empty folder harms nobody
            if self._files.isdir(path := self._path(folder)):
                self._files.rmdir(path)

    def where(self, name: str = "") -> str:
        """Return the address of a file or folder, for messages."""
        return f"{self.url.rstrip('/')}/{name}" if name else self.url

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}".rstrip("/") if name else self._root

    def _list(self, folder: str) -> list[tuple[str, int]]:
        """Return what is in a folder, with sizes; -1 is a folder."""
        with self._doing("list", folder):
            self._files.invalidate_cache()
            path = self._path(folder)
            try:
                entries = self._files.ls(path, detail=True)
            except FileNotFoundError:
                return []
            inside = [entry for entry in entries if entry["name"].rstrip("/").lstrip("/") != path.lstrip("/")]
            return [
                (entry["name"].rstrip("/").rpartition("/")[2], -1 if entry["type"] == "directory" else entry["size"])
                for entry in inside
            ]

    def _with_folder(self, name: str, write: Callable[[str], None]) -> None:
        """Write a file, in a new folder if need be. The storage itself, a bucket say, is never made: it would be one
        that nobody asked for, on this host alone maybe.
        """
        path = self._path(name)
        try:
            write(path)
        except FileNotFoundError:
            if not self._files.isdir(self._root):
                raise
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            write(path)

    @contextlib.contextmanager
    def _doing(self, what: str, name: str) -> Iterator[None]:
        try:
            yield
        except CordeeError:
            raise
        except Exception as error:  # noqa: BLE001 - drivers raise what they like
            is_final = isinstance(
                error, (FileNotFoundError, PermissionError, NotADirectoryError, NotImplementedError, TypeError)
            )
            kind = RefusedByStorageError if is_final or _lacks_credentials(error) else StorageError
            # Without the original: a traceback in a log would repeat what is left out here.
            raise kind(f"cannot {what} {self.where(name)}: {describe(error)}") from None


def within(seconds: float, what: str, action: Callable[[], T]) -> T:
    """Return what `action` returns. Raises StorageError if that takes too long; it is left to itself then."""
    found: list[T] = []
    problems: list[Exception] = []

    def run() -> None:
        try:
            found.append(action())
        except Exception as error:  # noqa: BLE001 - for the one who waits
            problems.append(error)

    thread = threading.Thread(target=run, name="storage", daemon=True)
    thread.start()
    deadline_s = time.monotonic() + seconds
    while thread.is_alive() and time.monotonic() < deadline_s:
        thread.join(0.1)  # in short turns: Ctrl-C is heard in between
    if problems:
        raise problems[0]
    if not found:
        raise StorageError(f"{what} did not answer within {seconds:g} s: is it reachable from this host?")
    return found[0]


def describe(error: BaseException) -> str:
    """Return what an error of a driver says, in one line and without what may be a credential."""
    if isinstance(error, FileNotFoundError):
        text = f"there is no such bucket, folder or file ({error.strerror or error})"
    elif isinstance(error, PermissionError):
        text = f"permission denied ({error.strerror or error})"
    elif isinstance(error, OSError):
        text = str(error.strerror or error) or type(error).__name__
    else:
        text = f"{type(error).__name__}: {error}"
    return conceal(" ".join(text.split()))[:500]


def conceal(text: str) -> str:
    """Return the text with '***' for what may be a credential: users in URLs, signatures, keys. Pure."""
    text = re.sub(r"://[^/@\s'\"]+@", "://***@", text)
    names = r"x-amz-[a-z-]+|signature|sig|[a-z_]*token|password|[a-z_]*secret[a-z_]*|[a-z_]*access_?key[a-z_]*"
    text = re.sub(rf"(?i)\b({names})(['\"]?\s*[=:]\s*['\"]?)[^&\s'\",]+", r"\1\2***", text)
    return re.sub(r"\b(?:AKIA|ASIA)[A-Z0-9]{8,}", "***", text)


def _lacks_credentials(error: Exception) -> bool:
    return "credential" in type(error).__name__.lower()  # of botocore, and of google.auth


def _connect(url: str) -> tuple[Any, str]:
    import fsspec

    # Listings must be what is there now: others write, too.
    options = {"use_listings_cache": False, "skip_instance_cache": True}
    scheme, separator, _ = url.partition("://")
    setting = f"checkpoint.storage = {url!r}"
    try:
        if not separator:
            return fsspec.filesystem("file", **options), url
        files, root = fsspec.core.url_to_fs(url, **options)
        return files, str(root)
    except ImportError as error:
        if scheme in ("s3", "s3a"):
            raise MissingExtraError(setting, "storage") from None
        raise JobError(f"{setting} needs a package that is not installed: {describe(error)}") from None
    except ValueError as error:
        known = fsspec.available_protocols()
        if scheme not in known:
            raise JobError(f"{setting}: '{scheme}' is no protocol that fsspec knows{nearest(scheme, known)}") from None
        raise JobError(f"{setting} cannot be opened: {describe(error)}") from None
    except Exception as error:  # noqa: BLE001 - drivers raise what they like
        raise StorageError(f"{setting} cannot be opened: {describe(error)}") from None
