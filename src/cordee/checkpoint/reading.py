"""Loading: nothing in a checkpoint is believed before it was checked, and nothing in it can run."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from cordee.checkpoint.layout import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    MAX_VALUES_BYTES,
    VALUES,
    Manifest,
    Written,
    decode_manifest,
    decode_values,
    is_previous,
    parse,
    parse_mapped,
    part_of,
    step_of,
)
from cordee.checkpoint.state import CHUNK_BYTES, State
from cordee.core.errors import CheckpointError
from cordee.core.file_memory import map_file


class Loaded(NamedTuple):
    """The newest whole checkpoint, and why newer ones were passed over."""

    state: State
    path: Path
    step: int
    damaged: list[tuple[Path, str]]


class Verified(NamedTuple):
    """The newest whole checkpoint, and why newer ones were passed over. Nothing of it is loaded."""

    path: Path
    damaged: list[tuple[Path, str]]


# Returns the content of a file of at most so many bytes, or raises CheckpointError.
Reader: TypeAlias = Callable[[Path, int], bytes]


def load(path: Path, read: Reader | None = None) -> State:
    """Return the state in one checkpoint; CheckpointError says which file of it is wrong, and how.

    Each file is read once, by `read` if it is given, and what was hashed is what is decoded. Tensors are on the CPU and
    own their memory.
    """
    read = read or _read
    manifest = read_manifest(path, read)
    num_bytes = sum(file.num_bytes for file in manifest.files.values())
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_bytes > memory_bytes:
        raise CheckpointError(f"{path} holds {num_bytes} bytes, this machine has {memory_bytes} bytes of memory")
    values: dict[str, object] = {}
    tensors: dict[str, Tensor] = {}
    for name, written in manifest.files.items():
        content = _read_verified(path / name, written, read)
        try:
            if name == VALUES:
                values = decode_values(content)
            else:
                tensors.update({f"{part_of(name)}.{key}": value for key, value in parse(content).items()})
        except CheckpointError as error:
            raise CheckpointError(f"{path / name} {error}") from None
    return State(tensors, values)


def verify(path: Path) -> None:
    """Read all of a checkpoint, a chunk at a time; CheckpointError says which file of it is wrong, and how."""
    for name, written in read_manifest(path).files.items():
        digest = hashlib.sha256()
        with _opened(path / name) as (descriptor, size):
            if size != written.num_bytes:
                raise CheckpointError(f"{path / name} has {size} bytes instead of {written.num_bytes}")
            while chunk := os.read(descriptor, CHUNK_BYTES):
                digest.update(chunk)
        if digest.hexdigest() != written.sha256:
            raise CheckpointError(_changed(path / name))


def map_state(path: Path) -> State:
    """Return the state in a checkpoint that was verified, without reading its tensors: what is looked at is read.

    Tensors are views of the files; changes stay in this process. Raises CheckpointError for other files.
    """
    manifest, values = read_manifest(path), read_values(path)
    tensors: dict[str, Tensor] = {}
    for name, written in manifest.files.items():
        if name != VALUES:
            mapped = _map_tensors(path / name, written.num_bytes)
            tensors.update({f"{part_of(name)}.{key}": tensor for key, tensor in mapped.items()})
    return State(tensors, values)


def map_verified(path: Path) -> State:
    """Return the same, of a checkpoint that is verified first: whatever its size, it takes little memory."""
    verify(path)
    return map_state(path)


def read_values(path: Path) -> dict[str, Any]:
    """Return the plain values of a checkpoint. Raises CheckpointError for another manifest or file of values."""
    return decode_values(_read_verified(path / VALUES, read_manifest(path).files[VALUES], _read))


def _map_tensors(path: Path, num_bytes: int) -> dict[str, Tensor]:
    with _opened(path) as (descriptor, size):
        if size != num_bytes:  # what is read beyond the end of a mapped file ends the process
            raise CheckpointError(f"{path} has {size} bytes instead of {num_bytes}")
        flat = map_file(descriptor, size)
    try:
        return parse_mapped(flat)
    except CheckpointError as error:
        raise CheckpointError(f"{path} {error}") from None


def newest_whole(root: Path) -> Verified | None:
    """Return the newest whole checkpoint in `root` without loading it; otherwise like `load_newest`."""
    damaged: list[tuple[Path, str]] = []
    for path in reversed(list_checkpoints(root)):
        try:
            verify(path)
        except CheckpointError as error:
            damaged.append((path, str(error)))
        else:
            return Verified(path, damaged)
    if damaged:
        raise _none_whole(str(root), damaged)
    return None


def load_newest(root: Path) -> Loaded | None:
    """Return the newest whole checkpoint in `root`; None if there is none of any kind.

    Raises CheckpointError if there are checkpoints and all of them are damaged.
    """
    return load_first_whole(reversed(list_checkpoints(root)), str(root))


def load_first_whole(paths: Iterable[Path], where: str, read: Reader | None = None) -> Loaded | None:
    """Return the first of these checkpoints that is whole. Like `load_newest`, which looks for them in `where`."""
    damaged: list[tuple[Path, str]] = []
    for path in paths:
        try:
            state = load(path, read)
        except CheckpointError as error:
            damaged.append((path, str(error)))
        else:
            return Loaded(state, path, step_of(path) or 0, damaged)
    if damaged:
        raise _none_whole(where, damaged)
    return None


def _none_whole(where: str, damaged: list[tuple[Path, str]]) -> CheckpointError:
    return CheckpointError(f"no checkpoint in {where} is whole: {'; '.join(reason for _, reason in damaged)}")


def list_checkpoints(root: Path) -> list[Path]:
    """Return the checkpoints in `root`, oldest first, whole or not; none if `root` is not there.

    Raises CheckpointError if `root` is a link or cannot be read.
    """
    refuse_link(root)
    try:
        found = [path for path in root.iterdir() if step_of(path) is not None]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"cannot read {root}: {error.strerror}") from error
    return sorted(found, key=lambda path: (step_of(path), not is_previous(path)))


def refuse_link(root: Path) -> None:
    """Raise CheckpointError if the folder of a run's checkpoints is a link: what it leads to is not the run's."""
    if root.is_symlink():
        raise CheckpointError(
            f"{root} is a link, and no links are followed: put the folder itself there, or the whole run elsewhere "
            "with --run-dir"
        )


def looks_whole(path: Path) -> bool:
    """Return whether the manifest is right and every file has its size: cheap, and blind to flipped bits."""
    try:
        manifest = read_manifest(path)
        return all((path / name).stat().st_size == file.num_bytes for name, file in manifest.files.items())
    except (CheckpointError, OSError):
        return False


def damage_of(path: Path) -> str | None:
    """Return what is wrong with a checkpoint, after reading all of it, or None if it is whole."""
    try:
        load(path)
    except CheckpointError as error:
        return str(error)
    return None


def read_manifest(path: Path, read: Reader | None = None) -> Manifest:
    """Return the manifest of a checkpoint, read by `read` if it is given; CheckpointError if it is wrong."""
    content = (read or _read)(path / MANIFEST, MAX_MANIFEST_BYTES)
    try:
        manifest = decode_manifest(content)
    except CheckpointError as error:
        raise CheckpointError(f"{path / MANIFEST} {error}") from None
    if step_of(path) not in (None, manifest.step):
        raise CheckpointError(f"{path / MANIFEST} is of step {manifest.step}: the directory was renamed or mixed up")
    return manifest


def _read_verified(path: Path, written: Written, read: Reader) -> bytes:
    if path.name == VALUES and written.num_bytes > MAX_VALUES_BYTES:
        raise CheckpointError(f"{path} has {written.num_bytes} bytes, more than the {MAX_VALUES_BYTES} allowed")
    content = read(path, written.num_bytes)
    if len(content) != written.num_bytes:
        raise CheckpointError(f"{path} is cut short: {len(content)} bytes instead of {written.num_bytes}")
    if hashlib.sha256(content).hexdigest() != written.sha256:
        raise CheckpointError(_changed(path))
    return content


def _changed(path: Path) -> str:
    return f"{path} does not match its SHA-256 in the manifest: its content has changed"


def read_piece(root: Path, name: str, file: str, offset: int, num_bytes: int) -> tuple[bytes, int]:
    """Return bytes of one file of a checkpoint in `root`, and the size of the file. Nothing is verified.

    Raises CheckpointError, also for names that no checkpoint has.
    """
    path = root / name
    if step_of(path) is None or path.name != name:
        raise CheckpointError(f"{name!r} is no checkpoint")
    if file not in (MANIFEST, VALUES) and part_of(file) is None:
        raise CheckpointError(f"{file!r} is no file of a checkpoint")
    with _opened(path / file) as (descriptor, size):
        return os.pread(descriptor, num_bytes, offset), size


def _read(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file of at most `max_bytes`; anything else is a CheckpointError."""
    with _opened(path) as (descriptor, size):
        if size > max_bytes:
            raise CheckpointError(f"{path} has {size} bytes, at most {max_bytes} were expected")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(size)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[int, int]]:
    """Yield the descriptor and the size of a regular file of a checkpoint; anything else is a CheckpointError."""
    if path.parent.is_symlink():
        raise CheckpointError(f"{path.parent} is a link, and no links are followed: copy the checkpoint there")
    try:
        # Not through links, and without waiting for a writer should it be a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path} is not a regular file")
            yield descriptor, status.st_size
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
