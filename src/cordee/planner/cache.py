"""Measurements on disk, so that they are made once: one JSON file each in the user's cache folder."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import TypeVar

import msgspec

from cordee.core.env import cache_folder
from cordee.core.errors import StorageError
from cordee.monitoring.files import write_atomically

log = logging.getLogger("cordee.planner")
Kept = TypeVar("Kept", bound=msgspec.Struct)


def key_of(*parts: str) -> str:
    """Return a short name for what `parts` describe."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def read_kept(kind: str, key: str, into: type[Kept]) -> Kept | None:
    """Return what was kept under `key`; None if there is nothing, or nothing that this version understands."""
    try:
        return msgspec.json.decode(_path(kind, key).read_bytes(), type=into)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def keep(kind: str, key: str, value: msgspec.Struct) -> None:
    """Keep `value`. A cache that cannot be written costs time, not the run: it is logged."""
    path = _path(kind, key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, msgspec.json.format(msgspec.json.encode(value), indent=1))
    except (OSError, StorageError) as error:
        log.warning("the measurement is not kept: %s", error)


def _path(kind: str, key: str) -> Path:
    return cache_folder() / kind / f"{key}.json"
