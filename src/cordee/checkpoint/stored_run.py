"""The checkpoints of one run in a storage, and who may write them.

    STORAGE/
      lenet-20261118-101500/      the name of the run directory, percent-encoded
        run.json                  which run this is, and which attempt at it writes here; members look for it
        beat                      a number that goes up while that attempt lives
        job.toml                  the job, so that the run can be resumed where there is no run directory
        data                      a fingerprint of what the run trains on
        checkpoints/
          step-200/               the same files as in the run directory; the manifest is put last and removed first

Object stores have no rename: a checkpoint without its manifest is not there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

import msgspec

from cordee.checkpoint.layout import MANIFEST, MAX_MANIFEST_BYTES, Manifest, decode_manifest, step_of
from cordee.checkpoint.storage import WITHIN_S, RefusedByStorageError, Retries, Storage, within
from cordee.checkpoint.writing import Draft
from cordee.core.errors import CheckpointError, CordeeError, RunDirectoryError, StorageError
from cordee.core.fault_points import reach
from cordee.version import __version__

OWNER, BEAT, JOB, DATA, CHECKPOINTS = "run.json", "beat", "job.toml", "data", "checkpoints"
MAX_SMALL_BYTES = 1 << 20
BEAT_EVERY_S = 10.0
SILENT_S = 35.0  # an attempt whose beat has not changed for so long is dead
LOOK_EVERY_S = 1.0
SETTLE_S = 2.0
SHARED_WITHIN_S = 5.0  # a network file system may show a new file a little later on other hosts
KEEP_ALL = 1 << 30


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The content of run.json."""

    format: int = 1
    run: str  # of all attempts at this run
    attempt: str  # of this one
    job: str  # name
    host: str
    host_id: str
    pid: int  # of the launcher
    started: float  # unix seconds
    is_ended: bool = False
    cordee: str = __version__

    def describe(self) -> str:
        return f"process {self.pid} on host {self.host}"


class TakenOverError(RefusedByStorageError):
    """Another attempt at the run writes to its place in the storage now."""


class Damage(NamedTuple):
    """Why a checkpoint in the storage cannot be used."""

    step: int
    reason: str


class Fetched(NamedTuple):
    """What was brought from the storage: the step, if any, and the newer ones that cannot be used."""

    step: int | None
    damaged: list[Damage]


class StoredRun:
    """What a storage holds of one run. Every problem with the storage is a StorageError."""

    def __init__(self, storage: Storage, name: str) -> None:
        """`name` is that of the run directory."""
        self.storage = storage
        self.name = name
        self._prefix = quote(name, safe="")
        if self._prefix in ("", ".", ".."):
            raise RunDirectoryError(f"a run directory called {name!r} cannot be kept in {storage.url}: choose another")

    @property
    def where(self) -> str:
        return self.storage.where(self._prefix)

    def read_owner(self) -> Owner | None:
        """Return whose run is there; None where there is none. Raises StorageError for a file that is damaged."""
        content = self.storage.read(self._at(OWNER), MAX_SMALL_BYTES)
        if content is None:
            return None
        try:
            return msgspec.json.decode(content, type=Owner)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StorageError(f"{self.storage.where(self._at(OWNER))} is damaged: {error}") from None

    def claim(
        self,
        owner: Owner,
        *,
        is_new: bool,
        is_dead: Callable[[Owner], bool | None],
        on_wait: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Make `owner` the only attempt that writes here.

        `is_dead` says of an earlier attempt whether it has ended without a word, or None where that cannot be seen from
        here: then its beat is watched for a while. Raises RunDirectoryError if another attempt is alive, or the place
        belongs to another run.
        """
        known = self.read_owner()
        is_taken_over = known is not None and not known.is_ended and is_dead(known) is None
        if known is None and self.steps():
            raise RunDirectoryError(
                f"{self.where} holds checkpoints and no {OWNER}: it is not known whose they are. Choose another "
                "--run-dir or checkpoint.storage"
            )
        if known is not None:
            if known.attempt != owner.attempt:  # else it was written, and the answer was lost
                self._refuse_other(known, owner, is_new=is_new)
                self._refuse_living(known, is_dead, on_wait)
            self.storage.write(self._at(OWNER), msgspec.json.encode(owner))
        elif not self.storage.create(self._at(OWNER), msgspec.json.encode(owner)):
            raise StorageError(f"{self.where} was taken by another run at this moment")  # looked at again
        reach("storage.claimed", StorageError)
        if is_taken_over:
            time.sleep(SETTLE_S)  # another may have come to the same conclusion: the last to write has it
        self.check_owner(owner.attempt)

    def release(self, owner: Owner) -> None:
        """Say that this attempt is over, unless another has taken over."""
        self.check_owner(owner.attempt)
        self.storage.write(self._at(OWNER), msgspec.json.encode(msgspec.structs.replace(owner, is_ended=True)))

    def beat(self, owner: Owner, number: int) -> None:
        """Show that this attempt lives. Raises TakenOverError if another has taken over."""
        self.check_owner(owner.attempt)
        self.storage.write(self._at(BEAT), b"%d" % number)

    def check_owner(self, attempt: str) -> None:
        """Raise TakenOverError unless this attempt is the one that writes here."""
        found = self.read_owner()
        if found is None or found.attempt != attempt:
            who = "nobody" if found is None else found.describe()
            raise TakenOverError(f"{self.where} belongs to {who} now: another attempt at this run took over")

    def read_job(self) -> str | None:
        return self._read_text(JOB)

    def write_job(self, text: str) -> None:
        self.storage.write(self._at(JOB), text.encode())

    def read_data(self) -> str | None:
        """Return the fingerprint of the data; None for a run of an earlier version."""
        return self._read_text(DATA)

    def write_data(self, fingerprint: str) -> None:
        self.storage.write(self._at(DATA), fingerprint.encode())

    def _read_text(self, name: str) -> str | None:
        content = self.storage.read(self._at(name), MAX_SMALL_BYTES)
        return None if content is None else content.decode("utf-8", "replace")

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints that are there, complete or not, oldest first."""
        found = [step_of(Path(name)) for name in self.storage.folders(self._at(CHECKPOINTS))]
        return sorted(step for step in found if step is not None)

    def find_manifest(self, step: int) -> Manifest:
        """Return the manifest of a checkpoint. Raises CheckpointError where it is not complete by names and sizes."""
        where = self.storage.where(self._step(step))
        content = self.storage.read(f"{self._step(step)}/{MANIFEST}", MAX_MANIFEST_BYTES)
        if content is None:
            raise CheckpointError(f"{where} has no {MANIFEST}: it was not put there completely")
        try:
            manifest = decode_manifest(content)
        except CheckpointError as error:
            raise CheckpointError(f"{where}/{MANIFEST} {error}") from None
        if manifest.step != step:
            raise CheckpointError(f"{where}/{MANIFEST} is of step {manifest.step}")
        sizes = self.storage.sizes(self._step(step))
        for name, written in manifest.files.items():
            if name not in sizes:
                raise CheckpointError(f"{where}/{name} is missing")
            if sizes[name] != written.num_bytes:
                raise CheckpointError(f"{where}/{name} has {sizes[name]} bytes instead of {written.num_bytes}")
        return manifest

    def put(
        self, step: int, manifest: bytes, files: Mapping[str, Callable[[], Iterable[bytes]]], retries: Retries
    ) -> None:
        """Put a checkpoint there, the manifest last; an incomplete or other one of this step is replaced."""
        folder = self._step(step)
        retries(lambda: self.storage.remove(f"{folder}/{MANIFEST}"))
        for name, pieces in files.items():

            def put(name: str = name, pieces: Callable[[], Iterable[bytes]] = pieces) -> None:
                reach("storage.put_file", StorageError)
                self.storage.put(f"{folder}/{name}", pieces)

            retries(put)

        def publish() -> None:
            reach("storage.put_manifest", StorageError)
            self.storage.write(f"{folder}/{MANIFEST}", manifest)

        retries(publish)
        reach("storage.put_done", StorageError)

    def remove(self, step: int) -> None:
        """Remove a checkpoint, the manifest first: what is left half-way is not there."""
        folder = self._step(step)
        reach("storage.remove", StorageError)
        self.storage.remove(f"{folder}/{MANIFEST}")
        reach("storage.removing", StorageError)
        for name in self.storage.sizes(folder):
            self.storage.remove(f"{folder}/{name}")
        self.storage.remove_folder(folder)

    def fetch_newest(self, root: Path, newer_than: int, retries: Retries) -> Fetched:
        """Bring the newest complete checkpoint after step `newer_than` into the folder `root`, verified.

        Raises StorageError where the storage does not answer: that is no reason to use an older one.
        """
        damaged = []
        for step in reversed(retries(self.steps)):
            if step <= newer_than:
                break
            try:
                self.fetch(step, root, retries)
            except CheckpointError as error:
                damaged.append(Damage(step, str(error)))
            else:
                return Fetched(step, damaged)
        return Fetched(None, damaged)

    def fetch(self, step: int, root: Path, retries: Retries) -> None:
        """Bring one checkpoint into the folder `root`. Raises CheckpointError if it is not complete, or was changed."""
        manifest = retries(lambda: self.find_manifest(step))
        retries(lambda: self._download(manifest, root))

    def _download(self, manifest: Manifest, root: Path) -> None:
        folder = self._step(manifest.step)
        draft = Draft(root, manifest.step)
        try:
            for name in sorted(manifest.files):
                reach("storage.fetch", StorageError)
                for piece in self.storage.pieces(f"{folder}/{name}"):
                    draft.append(name, piece)
            found = draft.end_files()
            for name, written in manifest.files.items():
                if found.get(name) != written:
                    raise CheckpointError(
                        f"{self.storage.where(folder)}/{name} does not match its SHA-256 in the manifest: its content "
                        "has changed"
                    )
            draft.finish(keep=KEEP_ALL, protected=())
        finally:
            draft.discard()

    def _refuse_other(self, known: Owner, owner: Owner, *, is_new: bool) -> None:
        if is_new:
            raise RunDirectoryError(
                f"{self.where} holds a run already, of {known.describe()}: continue it with --resume, or choose "
                "another --run-dir (its name is that of the run in the storage)"
            )
        if known.run != owner.run:
            raise RunDirectoryError(
                f"{self.where} holds another run than this run directory, of {known.describe()}: choose another "
                "checkpoint.storage"
            )

    def _refuse_living(
        self, known: Owner, is_dead: Callable[[Owner], bool | None], on_wait: Callable[[str], None]
    ) -> None:
        if known.is_ended:
            return
        dead = is_dead(known)
        if dead is None:
            on_wait(
                f"waiting up to {SILENT_S:g} s to see whether {known.describe()}, which wrote to {self.where} last, "
                "is still alive"
            )
            dead = self._is_silent()
        if not dead:
            raise RunDirectoryError(
                f"{self.where} is written by {known.describe()}, which is alive: wait for that run to end, or end it"
            )

    def _is_silent(self) -> bool:
        """Whether the beat stays as it is. Clocks of two hosts are not compared: they may differ."""
        first = self.storage.read(self._at(BEAT), MAX_SMALL_BYTES)
        deadline_s = time.monotonic() + SILENT_S
        while time.monotonic() < deadline_s:
            time.sleep(LOOK_EVERY_S)
            if self.storage.read(self._at(BEAT), MAX_SMALL_BYTES) != first:
                return False
        return True

    def _at(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _step(self, step: int) -> str:
        return f"{self._prefix}/{CHECKPOINTS}/step-{step}"


def run_name(path: str | Path) -> str:
    """Return the name that the run in this directory has in a storage."""
    return Path(os.path.abspath(path)).name  # noqa: PTH100 - a link keeps its own name


def is_stored(url: str, path: Path) -> bool:
    """Return whether a storage, if there is one, has the run of this directory. Raises CordeeError if it cannot say."""
    if not url:
        return False
    run = StoredRun(Storage(url), run_name(path))
    return within(WITHIN_S, url, lambda: Retries(num_attempts=3)(run.read_owner)) is not None


def find_runs(storage: Storage) -> dict[str, Owner]:
    """Return the runs in a storage, by name. What is no run, or damaged, is passed over."""
    found = {}
    for folder in storage.folders():
        if (name := unquote(folder)) and quote(name, safe="") == folder:
            try:
                owner = StoredRun(storage, name).read_owner()
            except RunDirectoryError:
                continue
            if owner is not None:
                found[name] = owner
    return found


def why_not_shared(url: str, name: str, attempt: str, retries: Retries | None = None) -> str:
    """Return why this process cannot read what the launcher of the run wrote into its storage; nothing if it can."""
    try:
        run = StoredRun(Storage(url), name)
        deadline_s = time.monotonic() + SHARED_WITHIN_S
        while True:
            owner = within(WITHIN_S, url, lambda: (retries or Retries(num_attempts=3))(run.read_owner))
            if owner is not None and owner.attempt == attempt:
                return ""
            if time.monotonic() > deadline_s:
                break
            time.sleep(SHARED_WITHIN_S / 10)
    except CordeeError as error:
        return str(error)
    if owner is None:
        return f"{run.where}/{OWNER}, which the launcher has written, is not there: the storage is not shared"
    return f"{run.where}/{OWNER} is of {owner.describe()}, not of this attempt: the storage is a copy, not shared"
