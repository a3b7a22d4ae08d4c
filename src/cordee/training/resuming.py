"""Going on with a run under a job that may have changed since it began: what is refused, and what is left out."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from cordee.core import Job
from cordee.core.errors import JobError, RunDirectoryError
from cordee.core.job import changed_keys
from cordee.strategies.choice import choose_strategy, foreign_settings


def fit_to_run(job: Job, path: Path, overrides: Iterable[str]) -> tuple[Job, str]:
    """Return the job as it goes on in the run directory `path`, and what is left out of it, in words.

    Settings of the strategy that the run had before are left out if it goes on with another, unless `overrides` (of the
    form "a.b=c") give them. Raises JobError for changes that would make it another run, and RunDirectoryError if what
    the directory says is damaged.
    """
    before = _recorded(path)
    if before is None:
        return job, ""
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
    note = f"left out, since the run goes on with '{name}' and not with '{old.get('name')}': {listed}"
    return msgspec.structs.replace(job, strategy=msgspec.structs.replace(job.strategy, settings=settings)), note


def _recorded(path: Path) -> Mapping[str, Any] | None:
    try:
        return tomllib.loads((path / "job.toml").read_text(encoding="utf-8"))
    except OSError:
        return None  # whoever opens the directory says what is wrong with it
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RunDirectoryError(f"{path / 'job.toml'} is damaged: {error}") from None


def _keys(override: str) -> list[str]:
    return override.partition("=")[0].strip().split(".")
