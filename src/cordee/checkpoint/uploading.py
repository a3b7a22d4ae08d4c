"""Puts the checkpoints of a run into its storage, beside the training: what the run directory holds, newest first."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cordee.checkpoint.layout import MANIFEST, Written, is_previous, step_of
from cordee.checkpoint.reading import list_checkpoints, looks_whole, read_manifest
from cordee.checkpoint.storage import PIECE_BYTES, RefusedByStorageError, Retries
from cordee.checkpoint.stored_run import BEAT_EVERY_S, Owner, StoredRun, TakenOverError
from cordee.checkpoint.writing import superfluous
from cordee.core.errors import CheckpointError, StorageError

log = logging.getLogger("cordee.storage")


class Uploaded(NamedTuple):
    """A checkpoint that is in the storage."""

    step: int
    seconds: float
    num_bytes: int


class UploadProgress(NamedTuple):
    """How much of the checkpoint that is being put into the storage is there."""

    step: int
    done_bytes: int
    total_bytes: int


class _Local(NamedTuple):
    """A complete checkpoint of the run directory."""

    step: int
    path: Path
    files: dict[str, Written]


class Uploader:
    """A thread that has a storage follow the folder of a run's checkpoints. Nothing that it does ends the training.

    The newest checkpoint goes first: where the storage is slower than the training, older ones that the run directory
    does not keep any more are left out. After each one, those are removed from the storage that neither `keep` nor the
    run directory keeps, which holds the best one, say.
    """

    def __init__(
        self,
        run: StoredRun,
        attempt: str,
        root: Path,
        *,
        keep: int,
        on_uploaded: Callable[[Uploaded], None],
        on_problem: Callable[[str], None],
        damaged: Collection[int] = (),
        retries: Callable[[threading.Event], Retries] = lambda leave: Retries(leave=leave),
    ) -> None:
        """`attempt` is the one that has claimed the run.

        `on_problem` is told once for each step that could not be put, and once when nothing can be any more. Steps in
        the storage that are `damaged` are replaced whatever their manifests say.
        """
        self._run = run
        self._attempt = attempt
        self._root = root
        self._keep = keep
        self._on_uploaded, self._on_problem = on_uploaded, on_problem
        self._damaged = set(damaged)
        self._leave = threading.Event()
        self._retries = retries(self._leave)
        self._wake = threading.Event()
        self._wake.set()
        self._is_finishing = False
        self._stored: dict[int, dict[str, Written]] | None = None  # what is complete there, once it was looked at
        self._reported: set[object] = set()
        self._progress: UploadProgress | None = None
        self._thread = threading.Thread(target=self._work, name="cordee-upload", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Look for new checkpoints."""
        self._wake.set()

    def finish(self) -> None:
        """There will be no more checkpoints: end when everything was tried once more."""
        self._is_finishing = True
        self._wake.set()

    def wait(self, timeout_s: float) -> bool:
        """Return whether the thread has ended, after at most `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def leave(self) -> None:
        """Put nothing any more. What is being put is not there."""
        self._leave.set()
        self._wake.set()

    def lose(self, reason: str) -> None:
        """Another attempt writes to the storage now: leave, and say so."""
        self.leave()
        self._report("lost", f"{reason}; nothing more of this attempt is put there, training continues")

    @property
    def progress(self) -> UploadProgress | None:
        """What is being put, if something is."""
        return self._progress

    def missing(self) -> list[int]:
        """Return the steps of complete checkpoints in the run directory that are not in the storage, oldest first."""
        return sorted(found.step for found in self._pending())

    def _work(self) -> None:
        while not self._leave.is_set():
            self._wake.wait()
            self._wake.clear()
            is_last = self._is_finishing
            self._put_pending()
            if is_last:
                return

    def _put_pending(self) -> None:
        tried: set[int] = set()
        while not self._leave.is_set():
            pending = [found for found in self._pending() if found.step not in tried]
            if not pending:
                return
            newest = max(pending, key=lambda found: found.step)
            tried.add(newest.step)
            try:
                self._put_one(newest)
            except TakenOverError as error:
                self.lose(str(error))
            except (StorageError, CheckpointError) as error:
                if not self._leave.is_set():
                    self._report(newest.step, f"checkpoint {newest.path.name} is not in the storage: {error}")
                if not isinstance(error, (RefusedByStorageError, CheckpointError)):
                    return  # it does not answer: the others would fare no better
            finally:
                self._progress = None

    def _pending(self) -> list[_Local]:
        stored = self._stored or {}
        return [found for found in self._local() if stored.get(found.step) != found.files]

    def _local(self) -> list[_Local]:
        found = []
        with contextlib.suppress(CheckpointError):  # the folder cannot be read, which saving says as well
            for path in list_checkpoints(self._root):
                step = step_of(path)
                if step is None or is_previous(path) or not looks_whole(path):
                    continue
                with contextlib.suppress(CheckpointError):  # removed at this moment
                    found.append(_Local(step, path, read_manifest(path).files))
        return found

    def _put_one(self, local: _Local) -> None:
        self._retries(self._check_owner)
        if self._stored is None:
            self._stored = self._retries(self._look)
        if self._stored.get(local.step) == local.files:
            return
        started_s = time.monotonic()
        num_bytes = sum(file.num_bytes for file in local.files.values())
        with contextlib.ExitStack() as stack:
            try:
                content = (local.path / MANIFEST).read_bytes()
                # All at once: training may remove the checkpoint meanwhile, and open files stay readable.
                opened = {name: stack.enter_context((local.path / name).open("rb")) for name in local.files}
            except FileNotFoundError:
                return  # it is not kept any more
            except OSError as error:
                raise CheckpointError(f"{local.path} cannot be read: {error.strerror}") from None
            files, done_bytes = {}, 0
            for name, written in local.files.items():
                files[name] = partial(self._pieces, local, name, opened[name].fileno(), (done_bytes, num_bytes))
                done_bytes += written.num_bytes
            self._progress = UploadProgress(local.step, 0, num_bytes)
            self._stored.pop(local.step, None)
            self._run.put(local.step, content, files, self._retries)
        self._stored[local.step] = local.files
        self._on_uploaded(Uploaded(local.step, time.monotonic() - started_s, num_bytes))
        self._prune(local.step)

    def _check_owner(self) -> None:
        self._run.check_owner(self._attempt)

    def _look(self) -> dict[int, dict[str, Written]]:
        """Return which checkpoints are complete in the storage, by names and sizes."""
        found = {}
        for step in self._run.steps():
            with contextlib.suppress(CheckpointError):  # put again, or removed like others
                manifest = self._run.find_manifest(step)
                if step not in self._damaged:
                    found[step] = manifest.files
        return found

    def _pieces(self, local: _Local, name: str, descriptor: int, place: tuple[int, int]) -> Iterator[bytes]:
        """Yield a file of a checkpoint. Raises CheckpointError at its end if it is not what the manifest says."""
        before_bytes, total_bytes = place
        written, digest, offset = local.files[name], hashlib.sha256(), 0
        while piece := os.pread(descriptor, PIECE_BYTES, offset):
            if self._leave.is_set():
                raise RefusedByStorageError("left before everything was put there")
            digest.update(piece)
            offset += len(piece)
            yield piece
            self._progress = UploadProgress(local.step, before_bytes + offset, total_bytes)
        if Written(offset, digest.hexdigest()) != written:
            raise CheckpointError(f"{local.path / name} does not match its SHA-256 in the manifest")

    def _prune(self, step: int) -> None:
        """Remove from the storage what is not kept."""
        assert self._stored is not None
        try:
            self._retries(self._check_owner)  # what another attempt puts there is not this one's to remove
            stored = [(Path(f"step-{found}"), found in self._stored) for found in self._retries(self._run.steps)]
            kept = {found.step for found in self._local()}
            # Counted from where the run is: an older one may have been put after a newer one.
            for path in superfluous(stored, max({step, *kept}), self._keep, kept):
                old = step_of(path)
                assert old is not None
                self._stored.pop(old, None)
                self._retries(partial(self._run.remove, old))
        except TakenOverError:
            raise
        except StorageError as error:
            self._report("prune", f"older checkpoints cannot be removed from the storage: {error}")

    def _report(self, key: object, message: str) -> None:
        log.warning("%s", message)
        if key not in self._reported:
            self._reported.add(key)
            self._on_problem(message)


class Heartbeat:
    """A thread that shows in the storage that this attempt lives, and notices when another has taken over."""

    def __init__(self, run: StoredRun, owner: Owner, every_s: float = BEAT_EVERY_S) -> None:
        self._run, self._owner, self._every_s = run, owner, every_s
        self._on_lost: Callable[[str], None] = lambda _: None
        self._lost = ""
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="cordee-storage-beat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def on_lost(self, act: Callable[[str], None]) -> None:
        """Have `act` called, with the reason, when another has taken over: now, if that is known."""
        with self._lock:
            self._on_lost = act
            if self._lost:
                act(self._lost)

    def stop(self) -> None:
        """Stop; a request that is under way is not waited for."""
        self._is_over.set()
        self._thread.join(timeout=1.0)

    def _work(self) -> None:
        number = 0
        while not self._is_over.is_set():
            number += 1
            try:
                self._run.beat(self._owner, number)
            except TakenOverError as error:
                with self._lock:
                    self._lost = str(error)
                    self._on_lost(self._lost)
                return
            except StorageError as error:  # tried again in a moment
                log.info("%s", error)
            self._is_over.wait(self._every_s)
