"""The launcher's side of `checkpoint.storage`: takes the run's place there, brings checkpoints, has them put, waits.

Only the launcher writes to the storage: all checkpoints of a run reach its directory, whoever has trained. Members read
the mark that it leaves there, so that a storage which is not shared is found before training.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from cordee.checkpoint.layout import VALUES, decode_values
from cordee.checkpoint.reading import damage_of, list_checkpoints
from cordee.checkpoint.storage import WITHIN_S, Retries, Storage, within
from cordee.checkpoint.stored_run import Owner, StoredRun, find_runs, run_name
from cordee.checkpoint.uploading import Heartbeat, Uploaded, Uploader
from cordee.cluster.processes import is_alive
from cordee.communication.this_host import host_id
from cordee.core import Job
from cordee.core.errors import CheckpointError, CordeeError, RunDirectoryError, StorageError
from cordee.core.fault_points import reach
from cordee.monitoring import AnyEvent, Monitor, RunDirectory, Summary, events
from cordee.monitoring.files import write_atomically
from cordee.monitoring.run_directory import DATA_FILE, JOB_FILE, STORAGE_FILE

log = logging.getLogger("cordee.storage")

LEAVING_S = 5.0  # for what is said to the storage at the end
FIRST_NOTE_S, NOTE_EVERY_S, LOOK_EVERY_S = 1.0, 10.0, 0.1


def open_storage(job: Job) -> Storage | None:
    """Connect to the storage of a job, if it has one. Raises CordeeError if it does not answer."""
    url = job.checkpoint.storage
    if not url:
        return None
    storage = Storage(url)
    ask = Retries(num_attempts=3)
    try:
        within(WITHIN_S, f"checkpoint.storage = {url!r}", lambda: ask(storage.require))
    except StorageError as error:
        raise StorageError(f"{error}; checkpoint.storage = '' trains without a storage") from None
    return storage


class Found(NamedTuple):
    """A run in a storage."""

    started: float  # unix seconds, of its last attempt
    name: str


def find_stored(storage: Storage, job_name: str) -> Found | None:
    """Return the newest run of a job in the storage."""
    runs = Retries()(lambda: find_runs(storage))
    return max((Found(owner.started, name) for name, owner in runs.items() if owner.job == job_name), default=None)


def bring_run(storage: Storage, path: Path) -> None:
    """Make the directory of a run that only the storage has. Does nothing where the directory is there."""
    if (path / JOB_FILE).exists():
        return
    run = StoredRun(storage, run_name(path))
    retries = Retries()
    owner, text, data = retries(run.read_owner), retries(run.read_job), retries(run.read_data)
    if owner is None or text is None:
        names = ", ".join(sorted(retries(lambda: find_runs(storage)))) or "none"
        raise RunDirectoryError(
            f"there is no run directory {path}, and no run '{run.name}' in {storage.url} (it has: {names})"
        )
    with RunDirectory.create(path, text):
        write_atomically(path / STORAGE_FILE, owner.run.encode())
        if data is not None:
            write_atomically(path / DATA_FILE, data.encode())


class Claim:
    """The place of a run in its storage, which this attempt alone writes to."""

    def __init__(self, run: StoredRun, owner: Owner, heartbeat: Heartbeat) -> None:
        self.run = run
        self.owner = owner
        self.heartbeat = heartbeat


@contextlib.contextmanager
def claimed(
    storage: Storage | None, job: Job, directory: RunDirectory, data: str, *, is_new: bool, say: Callable[[str], None]
) -> Iterator[Claim | None]:
    """Inside, the run has its place in the storage, and shows there that it lives. Nothing without a storage.

    `data` is the fingerprint of what it trains on.
    Raises RunDirectoryError if another run has it, and StorageError if it cannot be written.
    """
    if storage is None:
        yield None
        return
    run = StoredRun(storage, run_name(directory.path))
    owner = Owner(
        run=_identify(directory.path),
        attempt=secrets.token_hex(8),
        job=job.name,
        host=socket.gethostname(),
        host_id=host_id(),
        pid=os.getpid(),
        started=time.time(),
    )
    retries = Retries(num_attempts=4)
    retries(lambda: run.claim(owner, is_new=is_new, is_dead=_is_dead, on_wait=say))
    retries(lambda: run.write_job(job.to_toml()))
    retries(lambda: run.write_data(data))
    heartbeat = Heartbeat(run, owner)
    heartbeat.start()
    try:
        yield Claim(run, owner, heartbeat)
    finally:
        heartbeat.stop()
        try:
            within(LEAVING_S, storage.url, lambda: run.release(owner))
        except CordeeError as error:  # the next attempt finds out that this one is dead
            log.info("%s", error)


def _identify(path: Path) -> str:
    """Return which run a directory is of, for storages; a new name the first time."""
    file = path / STORAGE_FILE
    try:
        return file.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        identity = secrets.token_hex(16)
        write_atomically(file, identity.encode())
        return identity
    except (OSError, UnicodeDecodeError) as error:
        raise RunDirectoryError(f"{file} cannot be read: {error}") from None


def _is_dead(owner: Owner) -> bool | None:
    return not is_alive(owner.pid) if owner.host_id == host_id() else None


class RunStorage:
    """Has the checkpoints of a run put into its storage, and reports it."""

    def __init__(
        self, claim: Claim, job: Job, directory: RunDirectory, monitor: Monitor, flag: Callable[[], bool]
    ) -> None:
        self._claim = claim
        self._monitor = monitor
        self._flag = flag
        self._rules = job.checkpoint
        self._root = directory.checkpoints
        self._uploader: Uploader | None = None

    @property
    def marker(self) -> str:
        """What members look for in the storage."""
        return self._claim.owner.attempt

    def bring_checkpoints(self) -> Collection[int]:
        """Bring the newest complete checkpoint into the run directory, if the storage has a newer one; and the best.

        Returns the steps of those in the storage that cannot be used.
        """
        run, retries = self._claim.run, Retries()
        local = next((path for path in reversed(list_checkpoints(self._root)) if damage_of(path) is None), None)
        local_step = -1 if local is None else _step(local)
        started_s = time.monotonic()
        fetched = run.fetch_newest(self._root, local_step, retries)
        if fetched.step is None and local is None and fetched.damaged:
            reasons = "; ".join(damage.reason for damage in fetched.damaged)
            raise CheckpointError(f"no checkpoint in {run.where} is complete: {reasons}")
        used = f"step-{fetched.step}" if fetched.step is not None else local.name if local is not None else ""
        for damage in fetched.damaged:
            self._warn(f"checkpoint step-{damage.step} of the storage cannot be used ({damage.reason}); using {used}")
        if fetched.step is not None:
            self._report_fetched(fetched.step, started_s)
        if self._rules.keep_best and used:
            self._bring_best(self._root / used, retries)
        return [damage.step for damage in fetched.damaged]

    def start(self, damaged: Collection[int]) -> None:
        """Have checkpoints put from now on; those in the run directory first."""
        uploader = self._uploader = Uploader(
            self._claim.run,
            self.marker,
            self._root,
            keep=self._rules.keep,
            on_uploaded=self._report_uploaded,
            on_problem=self._warn,
            damaged=damaged,
        )
        uploader.start()
        self._claim.heartbeat.on_lost(uploader.lose)

    def emit(self, event: AnyEvent) -> None:
        """Take the events of the run: a new checkpoint is put into the storage."""
        if isinstance(event, events.Checkpoint) and self._uploader is not None:
            self._uploader.wake()

    def close(self) -> None:
        """Nothing is kept open as a sink."""

    def finish(self, summary: Summary, *, at_once: bool) -> Summary:
        """Wait for what is still to be put, unless the run stops `at_once`; return the summary with what is missing."""
        uploader = self._uploader
        if uploader is None:
            return summary
        uploader.finish()
        if not at_once:
            self._wait(uploader)
        missing = uploader.missing()
        if missing:
            names = ", ".join(f"step-{step}" for step in missing)
            self._warn(
                f"not in {self._claim.run.where}: {names}. The run directory has "
                f"{'it' if len(missing) == 1 else 'them'}; --resume there puts what is missing into the storage"
            )
        return msgspec.structs.replace(summary, not_in_storage=missing)

    def leave(self) -> None:
        """Put nothing any more."""
        if self._uploader is not None:
            self._uploader.leave()
            self._uploader.wait(LEAVING_S)

    def _wait(self, uploader: Uploader) -> None:
        was_stopping, note_s = self._flag(), time.monotonic() + FIRST_NOTE_S
        try:
            while not uploader.wait(LOOK_EVERY_S):
                if self._flag() and not was_stopping:
                    return
                if time.monotonic() >= note_s:
                    note_s = time.monotonic() + NOTE_EVERY_S
                    self._report_waiting(uploader)
        except KeyboardInterrupt:  # what was trained is saved in the run directory
            log.info("the user does not wait for the storage")

    def _report_waiting(self, uploader: Uploader) -> None:
        under_way, missing = uploader.progress, uploader.missing()
        self._monitor.emit(
            events.Uploading(
                steps=missing,
                path=self._claim.run.where,
                step=under_way.step if under_way else None,
                done_bytes=under_way.done_bytes if under_way else 0,
                total_bytes=under_way.total_bytes if under_way else 0,
            )
        )

    def _bring_best(self, newest: Path, retries: Retries) -> None:
        """Bring the checkpoint that was best when it was evaluated, where the run directory lacks it."""
        values = decode_values((newest / VALUES).read_bytes())
        best = values.get("progress", {}).get("best_step", -1)
        if best < 0 or (self._root / f"step-{best}").exists():
            return
        started_s = time.monotonic()
        try:
            self._claim.run.fetch(best, self._root, retries)
        except CheckpointError as error:
            self._warn(f"the best checkpoint, step-{best}, cannot be brought from the storage: {error}")
        else:
            self._report_fetched(best, started_s)

    def _report_uploaded(self, uploaded: Uploaded) -> None:
        path = f"{self._claim.run.where}/checkpoints/step-{uploaded.step}"
        self._monitor.emit(
            events.Stored(step=uploaded.step, path=path, seconds=uploaded.seconds, num_bytes=uploaded.num_bytes)
        )

    def _report_fetched(self, step: int, started_s: float) -> None:
        reach("storage.fetched", StorageError)
        path = f"{self._claim.run.where}/checkpoints/step-{step}"
        self._monitor.emit(events.Fetched(step=step, path=path, seconds=time.monotonic() - started_s))

    def _warn(self, message: str) -> None:
        self._monitor.emit(events.Warned(message=message))


@contextlib.contextmanager
def storing(
    claim: Claim | None, job: Job, directory: RunDirectory, monitor: Monitor, flag: Callable[[], bool], *, resume: bool
) -> Iterator[RunStorage | None]:
    """Inside, checkpoints of the run are put into its storage. Nothing without a claim."""
    if claim is None:
        yield None
        return
    storage = RunStorage(claim, job, directory, monitor, flag)
    storage.start(storage.bring_checkpoints() if resume else ())
    monitor.add(storage)
    try:
        yield storage
    finally:
        storage.leave()


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-").partition(".")[0])
