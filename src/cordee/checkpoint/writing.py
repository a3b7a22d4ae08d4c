"""Saving: a checkpoint is whole under its name, or it is not there."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from cordee.checkpoint.layout import (
    MANIFEST,
    VALUES,
    NewFile,
    Written,
    encode_files,
    encode_manifest,
    memory_of,
    step_of,
    write_file,
)
from cordee.checkpoint.reading import Loaded, damage_of, list_checkpoints, load_newest, looks_whole, refuse_link
from cordee.checkpoint.state import State, require_plain
from cordee.core.errors import CheckpointError, StorageError
from cordee.core.fault_points import reach

_TEMPORARY = re.compile(r"\.step-[0-9]+\.(?P<host>[\w-]+)\.(?P<pid>[0-9]+)\.[0-9]+\.tmp", re.ASCII)
_HOST = re.sub(r"[^\w-]", "_", socket.gethostname(), flags=re.ASCII) or "host"
_serial = itertools.count()
_in_use: set[Path] = set()  # the temporary directories that threads of this process are busy with


def save(root: Path, step: int, state: State, *, keep: int, protected: Collection[int] = ()) -> Path:
    """Write `root/step-N`, then remove the oldest ones so that `keep` whole ones up to step N are left.

    Whole ones of the steps in `protected` stay besides.

    Local. When it returns, the checkpoint is on the disk and survives a power cut. If the process dies on
    the way, all that was there before is still there and whole. Checkpoints of later steps, left over from
    before a fall-back, are not touched. Wholeness is judged by the manifest and the sizes here; hashes are
    checked when loading.

    Raises StorageError when the disk is full or cannot be written, with everything that was there intact and
    nothing temporary left; CheckpointError, before anything is written, for a state that cannot be saved; StorageError
    as well if `root` is a link.
    """
    files = encode_files(state)
    draft = Draft(root, step)
    try:
        for name, pieces in files.items():
            for piece in pieces:
                draft.append(name, piece)
        return draft.finish(keep=keep, protected=protected)
    finally:
        draft.discard()


class Draft:
    """A checkpoint that is being written in `root`, file by file. Nothing is seen of it before it is finished.

    What raises StorageError discards the draft: nothing temporary is left, and what was there before is intact.
    """

    def __init__(self, root: Path, step: int) -> None:
        assert step >= 0, step
        self._root, self._step = root, step
        self._target = root / f"step-{step}"
        self._written: dict[str, Written] = {}
        self._file: tuple[str, NewFile] | None = None  # that pieces are added to
        self._temporary = contextlib.ExitStack()
        with self._storing():
            refuse_link(root)
            _make_root(root)
            remove_stale(root)
            self._folder = self._temporary.enter_context(_temporary(root, step))
            self._folder.mkdir()
            reach("checkpoint.folder", OSError)

    def append(self, name: str, piece: bytes | memoryview) -> None:
        """Add bytes to a file; all of one file come before those of the next."""
        with self._storing():
            if self._file is None or self._file[0] != name:
                self._end_file()
                self._file = (name, NewFile(self._folder / name))
            self._file[1].append(piece)

    @property
    def folder(self) -> Path:
        """Where the files are until the checkpoint has its name."""
        return self._folder

    def allocate(self, name: str, header: bytes, num_bytes: int) -> None:
        """Make a file of `num_bytes` that begins with `header`. Others fill it; `seal` ends it."""
        with self._storing():
            file = NewFile(self._folder / name)
            try:
                file.append(header)
                file.resize(num_bytes)
            finally:
                file.close()

    def seal(self, name: str, read_back: Callable[[Path], Written]) -> None:
        """End a file that was allocated; `read_back` brings it to the disk and returns what it is."""
        with self._storing():
            self._written[name] = read_back(self._folder / name)
            reach("checkpoint.file", OSError)

    def sync(self) -> None:
        """Bring what was added to the disk: less is left to be done when a large file ends."""
        with self._storing():
            if self._file is not None:
                self._file[1].sync()

    def end_files(self) -> dict[str, Written]:
        """Return size and hash of every file, when all bytes are added."""
        with self._storing():
            self._end_file()
        return self._written

    def finish(self, *, keep: int, protected: Collection[int]) -> Path:
        """Give the checkpoint its name, then remove older ones."""
        assert keep >= 1, keep
        files = self.end_files()
        with self._storing():
            write_file(self._folder / MANIFEST, [encode_manifest(self._step, files)])
            reach("checkpoint.manifest", OSError)
            fsync_directory(self._folder)
            _put_in_place(self._folder, self._target)
        self.discard()
        try:
            reach("checkpoint.saved", OSError)
            _prune(self._root, self._step, keep, protected)
        except OSError as error:
            raise StorageError(
                f"{self._target} is saved, but older ones cannot be removed: {reason_of(error)}"
            ) from error
        return self._target

    def discard(self) -> None:
        """Leave nothing behind. Does nothing to a checkpoint that has its name."""
        if self._file is not None:
            self._file[1].close()
            self._file = None
        self._temporary.close()

    def _end_file(self) -> None:
        if self._file is not None:
            name, file = self._file
            self._written[name] = file.sync()
            file.close()
            self._file = None
            reach("checkpoint.values" if name == VALUES else "checkpoint.file", OSError)

    @contextlib.contextmanager
    def _storing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, CheckpointError) as error:
            self.discard()
            reason = reason_of(error) if isinstance(error, OSError) else str(error)
            raise StorageError(f"cannot save the checkpoint {self._target}: {reason}") from error


def fsync_directory(path: Path) -> None:
    """Bring the directory's entries, as opposed to the files' contents, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def superfluous(
    found: Sequence[tuple[Path, bool]], step: int, keep: int, protected: Collection[int] = ()
) -> list[Path]:
    """Return which of the checkpoints (oldest first, each with whether it is whole) to remove after saving `step`.

    Those of later steps stay, and whole ones of `protected` steps. A damaged one stays for the user to look at until
    `keep` newer ones are whole.
    """
    kept: set[int] = set()
    spared: set[int] = set()
    removed = []
    for path, is_whole in reversed(found):
        its_step = step_of(path)
        assert its_step is not None
        if its_step > step:
            continue
        if is_whole and its_step in protected and its_step not in spared:
            spared.add(its_step)
            if len(kept) < keep:
                kept.add(its_step)
        elif len(kept) >= keep or its_step in kept:  # the latter: replaced by the one of the same step
            removed.append(path)
        elif is_whole:
            kept.add(its_step)
    return removed


def _make_root(root: Path) -> None:
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    root.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        fsync_directory(folder.parent)


def _put_in_place(temporary: Path, target: Path) -> None:
    """Give a finished directory its name; what had the name before is loadable until the new one has it, and after."""
    previous = target.with_name(f"{target.name}.previous")
    if os.path.lexists(target):
        if os.path.lexists(previous):
            # A replacement was cut short by a crash: one of the two is enough, if it is whole.
            _remove(previous if damage_of(target) is None else target)
        if os.path.lexists(target):
            target.rename(previous)
            reach("checkpoint.set_aside", OSError)
            fsync_directory(target.parent)
    try:
        reach("checkpoint.rename", OSError)
        temporary.rename(target)
    except OSError:
        if os.path.lexists(previous) and not os.path.lexists(target):
            previous.rename(target)
        raise
    reach("checkpoint.renamed", OSError)
    fsync_directory(target.parent)


def _prune(root: Path, step: int, keep: int, protected: Collection[int]) -> None:
    found = [(path, looks_whole(path)) for path in list_checkpoints(root)]
    for path in superfluous(found, step, keep, protected):
        _remove(path)


def _remove(checkpoint: Path) -> None:
    """Delete a checkpoint so that it is never seen half deleted."""
    with _temporary(checkpoint.parent, step_of(checkpoint) or 0) as doomed:
        reach("checkpoint.remove", OSError)
        checkpoint.rename(doomed)
        reach("checkpoint.removing", OSError)
        fsync_directory(checkpoint.parent)
        if doomed.is_dir() and not doomed.is_symlink():
            shutil.rmtree(doomed)
        else:
            doomed.unlink()


@contextlib.contextmanager
def _temporary(root: Path, step: int) -> Iterator[Path]:
    """Yield a free temporary name, protected from this process' other threads; nothing is left under it after."""
    path = root / f".step-{step}.{_HOST}.{os.getpid()}.{next(_serial)}.tmp"
    _in_use.add(path)
    try:
        yield path
    finally:
        # After a failed write the disk may refuse this as well: then the next save removes it.
        shutil.rmtree(path, ignore_errors=True)
        _in_use.discard(path)


def remove_stale(root: Path) -> None:
    """Remove what dead processes of this host left behind; other hosts' processes cannot be asked."""
    for path in root.iterdir():
        match = _TEMPORARY.fullmatch(path.name)
        if match and match["host"] == _HOST and path not in _in_use and not _is_other_process(int(match["pid"])):
            shutil.rmtree(path, ignore_errors=True)  # another saver may be removing it too


def _is_other_process(pid: int) -> bool:
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def reason_of(error: OSError) -> str:
    """Return what the system says, and of which file."""
    where = f" ({error.filename})" if error.filename else ""
    return f"{error.strerror or error}{where}"


class Store(Protocol):
    """Where a worker saves and finds the checkpoints of a run: a folder, or a coordinator that has access to it."""

    def save(self, step: int, state: State, *, keep: int, protected: Collection[int]) -> Path:
        """Save a checkpoint and remove older ones, like the function `save`."""

    def names(self) -> list[str]:
        """Return the names of the checkpoints, oldest first, whole or not."""

    def load_newest(self) -> Loaded | None:
        """Return the newest whole checkpoint, like the function `load_newest`."""


class Folder:
    """The checkpoints in a folder that this process has access to."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def save(self, step: int, state: State, *, keep: int, protected: Collection[int]) -> Path:
        return save(self.root, step, state, keep=keep, protected=protected)

    def names(self) -> list[str]:
        return [path.name for path in list_checkpoints(self.root)]

    def load_newest(self) -> Loaded | None:
        return load_newest(self.root)


# Saving while training continues: the state is copied, and a thread writes the copy.


@dataclass(frozen=True)
class Saved:
    """What became of one checkpoint: where it is, or why it is not there."""

    step: int
    seconds: float  # that writing it took
    stall_s: float  # that training stood still for it
    path: Path | None = None
    problem: StorageError | None = None


@dataclass(frozen=True)
class Request:
    """A checkpoint to be saved."""

    step: int
    state: State
    keep: int  # how many are left
    protected: Collection[int]  # steps that are left besides
    since_s: float  # when training stopped for it, by `time.perf_counter`


class CheckpointWriter:
    """Saves one checkpoint at a time in `store`, in a thread or at once.

    With a thread, `start` returns when the state is copied: the caller may change its tensors. The copy is kept and
    used again, so the first one costs memory and the others only time. A process that ends before `wait` loses
    the checkpoint being written, and only that.
    """

    def __init__(self, store: Store, on_saved: Callable[[Saved], None]) -> None:
        """`on_saved` is called by whoever writes: the thread, or `write`."""
        self._store = store
        self._on_saved = on_saved
        self._copies = Copies()
        self._thread: threading.Thread | None = None
        self._step: int | None = None
        self._error: Exception | None = None

    @property
    def step(self) -> int | None:
        """The step whose checkpoint is being written, if one is."""
        return self._step if self._thread is not None and self._thread.is_alive() else None

    def start(self, request: Request) -> None:
        """Have it saved by a thread. Waits for the one before; raises CheckpointError if the state cannot be saved."""
        self.wait()
        staged = replace(request, state=self._copies.copy(request.state))
        self.start_prepared(request.step, self._saving(staged), since_s=request.since_s)

    def write(self, request: Request) -> None:
        """Save it before returning, without a copy. Waits for the one before."""
        self.write_prepared(request.step, self._saving(request), since_s=request.since_s)

    def start_prepared(self, step: int, save: Callable[[], Path], *, since_s: float) -> None:
        """Have a thread call `save`, which needs nothing that training changes. Waits for the one before."""
        self.wait()
        reach("checkpoint.staged")
        stall_s = time.perf_counter() - since_s
        self._step = step
        # A daemon: a process that has to end at once does not wait for the disk.
        self._thread = threading.Thread(
            target=self._write_apart, args=(step, save, since_s, stall_s), name="cordee-checkpoint", daemon=True
        )
        self._thread.start()

    def write_prepared(self, step: int, save: Callable[[], Path], *, since_s: float) -> None:
        """Call `save` before returning. Waits for the one before."""
        self.wait()
        self._write(step, save, since_s, None)

    def wait(self) -> None:
        """Return when nothing is being written. Raises what the writing raised, but for a disk's refusal."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _saving(self, request: Request) -> Callable[[], Path]:
        return partial(self._store.save, request.step, request.state, keep=request.keep, protected=request.protected)

    def _write(self, step: int, save: Callable[[], Path], since_s: float, stall_s: float | None) -> None:
        started_s = time.perf_counter()
        path: Path | None = None
        problem: StorageError | None = None
        try:
            path = save()
        except StorageError as error:
            problem = error
        reach("checkpoint.written")
        now_s = time.perf_counter()
        stall_s = now_s - since_s if stall_s is None else stall_s
        self._on_saved(Saved(step, now_s - started_s, stall_s, path, problem))

    def _write_apart(self, step: int, save: Callable[[], Path], since_s: float, stall_s: float) -> None:
        try:
            self._write(step, save, since_s, stall_s)
        except Exception as error:  # noqa: BLE001 - for the thread that trains
            self._error = error


class Copies:
    """A copy of a state on the CPU, whose memory the next copy uses again."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def copy(self, state: State) -> State:
        """Return a copy that is valid until the next call. Names of one weight share a copy as they share the weight.

        Raises CheckpointError for a tensor that cannot be saved.
        """
        tensors: dict[str, Tensor] = {}
        first_names: dict[object, str] = {}
        for name, tensor in state.tensors.items():
            require_plain(name, tensor)
            first = first_names.setdefault(memory_of(tensor), name)
            tensors[name] = self._copy(name, tensor.detach()) if first == name else tensors[first]
        self._tensors = {name: tensors[name] for name in first_names.values()}
        return State(tensors, copy.deepcopy(state.values))

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        target = self._tensors.get(name)
        if target is None or target.shape != tensor.shape or target.dtype != tensor.dtype:
            target = torch.empty(tensor.shape, dtype=tensor.dtype)
        return target.copy_(tensor)
