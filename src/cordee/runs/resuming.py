"""Continuing a run: which one, with which job, and how a user is told that it can be."""

from __future__ import annotations

import contextlib
import shlex
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from cordee import checkpoint
from cordee.checkpoint.storage import Storage
from cordee.core import Job
from cordee.core.env import runs_folder
from cordee.core.errors import CheckpointError, JobError, RunDirectoryError
from cordee.core.job import changed_keys
from cordee.core.settings import PLAIN_KERNELS
from cordee.data.load import BUILTIN_DATA
from cordee.data.source import Splits, compare_with_start, fingerprint
from cordee.monitoring import RunDirectory, list_runs, new_run_path
from cordee.monitoring.run_directory import CHECKPOINTS, DATA_FILE
from cordee.runs.federation.store import STORE_FILE
from cordee.runs.storage import find_stored
from cordee.strategies.choice import choose_strategy, foreign_settings


def find_run_path(job: Job, run_dir: str | Path | None, resume: bool, storage: Storage | None) -> Path:
    """Return the directory of a run that begins, or of the newest run of the job's name to resume.

    Raises RunDirectoryError if there is none to resume, neither here nor in the storage.
    """
    if run_dir is not None:
        return Path(run_dir)
    if not resume:
        return new_run_path(runs_folder(), job.name)
    candidates = [info for info in list_runs(runs_folder()) if info.name == job.name]
    newest = max(candidates, key=lambda info: info.started or 0.0, default=None)
    stored = find_stored(storage, job.name) if storage is not None else None
    if stored is not None and (newest is None or stored.started > (newest.started or 0.0)):
        return runs_folder() / stored.name
    if newest is None:
        where = f"{runs_folder()}" + (f" or in {storage.url}" if storage is not None else "")
        raise RunDirectoryError(
            f"no run of '{job.name}' in {where} to resume: name one with --run-dir, or start without --resume"
        )
    return newest.path


def fit_to_run(job: Job, path: Path, overrides: Iterable[str]) -> tuple[Job, str]:
    """Return the job as it continues in the run directory `path`, and what is left out of it, in words.

    Settings of the strategy that the run had before are left out if it continues with another, unless `overrides` (of
    the form "a.b=c") give them. Raises JobError for changes that would make it another run, and RunDirectoryError if
    what the directory says is damaged.
    """
    if (path / STORE_FILE).exists():
        raise RunDirectoryError(
            f"{path} is a federation between sites: continue it with `cordee federation serve JOB.toml --listen "
            f"HOST:PORT --run-dir {path} --resume`"
        )
    before = _recorded(path)
    if before is None:
        return job, ""
    job, before = _keep_kernels(job, before)
    now = tomllib.loads(job.to_toml())
    if changes := changed_keys(before, now):
        raise JobError(
            f"the job has changed since the run in {path} began: {'; '.join(changes)}. "
            "Put it back to resume, or start a new run"
        )
    name, old = choose_strategy(job), before.get("strategy", {})
    if name == old.get("name"):
        return job, ""
    asked_for = {keys[-1] for keys in map(_keys, overrides) if keys[0] == "strategy"}
    stale = [
        key
        for key in foreign_settings(name, job.strategy.settings)
        if key not in asked_for and key in old and old[key] == now["strategy"].get(key)
    ]
    if not stale:
        return job, ""
    settings = {key: value for key, value in job.strategy.settings.items() if key not in stale}
    listed = ", ".join(f"strategy.{key} = {old[key]!r}" for key in stale)
    note = f"left out, since the run continues with '{name}' and not with '{old.get('name')}': {listed}"
    return msgspec.structs.replace(job, strategy=msgspec.structs.replace(job.strategy, settings=settings)), note


def _keep_kernels(job: Job, before: Mapping[str, Any]) -> tuple[Job, Mapping[str, Any]]:
    """Return the job with the kernels that the run began with where it says "auto", and what was recorded, with all.

    What was measured then stays: other kernels round in another way. Runs of earlier versions were plain.
    """
    recorded = {**PLAIN_KERNELS, **before.get("training", {})}
    kept = {key: recorded[key] for key in job.training.automatic}
    return (
        msgspec.structs.replace(job, training=msgspec.structs.replace(job.training, **kept)),
        {**before, "training": recorded},
    )


def _recorded(path: Path) -> Mapping[str, Any] | None:
    try:
        return tomllib.loads((path / "job.toml").read_text(encoding="utf-8"))
    except OSError:
        return None  # whoever opens the directory says what is wrong with it
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RunDirectoryError(f"{path / 'job.toml'} is damaged: {error}") from None


def _keys(override: str) -> list[str]:
    return override.partition("=")[0].strip().split(".")


def resume_command(path: Path) -> str:
    """Return what a user types to continue the run in `path`."""
    return f"cordee train {shlex.quote(str(path / 'job.toml'))} --resume --run-dir {shlex.quote(str(path))}"


@contextlib.contextmanager
def saying_how_to_resume(directory: RunDirectory, say: Callable[[str], None]) -> Iterator[None]:
    """After a second Ctrl-C or a failure: say what is kept and the command that continues from it."""
    try:
        yield
    except (KeyboardInterrupt, Exception) as error:
        is_interrupted = isinstance(error, KeyboardInterrupt)
        kept = _newest_whole(directory.checkpoints)
        start = f"continues from {kept}" if kept else "starts again: there is no checkpoint yet"
        if is_interrupted or (kept and not isinstance(error, CheckpointError)):
            what = "stopped at once" if is_interrupted else "the run failed"
            say(f"{what}; this {start}\n  {resume_command(directory.path)}")
        raise


def describe_data(job: Job, splits: Splits) -> str:
    """Return the fingerprint of what a run trains on. The user's own Datasets are not read for it, only counted."""
    if isinstance(job.data.use, str) and job.data.use in BUILTIN_DATA:
        with contextlib.suppress(Exception):  # a sample that cannot be read is an error where it is trained on
            return fingerprint(splits)
    return fingerprint(splits, reads_samples=False)


def compare_data(path: Path, now: str, *, is_stored: bool) -> str:
    """Return what to warn of where a run in the directory `path` continues with other data; "" where they are the same.

    Raises DataError where the run cannot continue with them. A run that has saved nothing begins again, with any data;
    `is_stored` says that there may be more than in the directory. Earlier versions have not recorded their data.
    """
    before = _read(path / DATA_FILE)
    if not is_stored and _newest_whole(path / CHECKPOINTS) is None:
        return ""
    return "" if before is None else compare_with_start(before, now)


@contextlib.contextmanager
def continuing_with(directory: RunDirectory, job: Job, data: str) -> Iterator[None]:
    """Record the job that a run continues with, and the fingerprint of its data.

    For a run that fails before it has saved anything both are as before.
    """
    before, saved = directory.job_file.read_text(encoding="utf-8"), _newest_whole(directory.checkpoints)
    before_data = _read(directory.path / DATA_FILE)
    directory.write_job(job.to_toml())
    directory.write_data(data)
    directory.summary_file.unlink(missing_ok=True)
    try:
        yield
    except Exception:
        if _newest_whole(directory.checkpoints) == saved:
            directory.write_job(before)
            directory.write_data(before_data or data)
        raise


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise RunDirectoryError(f"{path} cannot be read: {error}") from None


def _newest_whole(checkpoints: Path) -> str | None:
    """Return the name of the newest checkpoint that is whole by its manifest and sizes, if there is one."""
    try:
        found = checkpoint.list_checkpoints(checkpoints)
    except CheckpointError:
        return None
    return next((path.name for path in reversed(found) if checkpoint.looks_whole(path)), None)
