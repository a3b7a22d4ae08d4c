"""The environment variables that Cordée reads, all of them here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def data_folders(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the folders named by `CORDEE_DATA`, which may list several with ':' between them."""
    return [Path(part).expanduser() for part in environ.get("CORDEE_DATA", "").split(os.pathsep) if part]


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where downloads and profiles are kept: `CORDEE_CACHE`, or `cordee` in the user's cache folder."""
    if environ.get("CORDEE_CACHE"):
        return Path(environ["CORDEE_CACHE"]).expanduser()
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "cordee"


def runs_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where new run directories are made: `CORDEE_RUNS`, or `runs` in the working folder."""
    return Path(environ.get("CORDEE_RUNS") or "runs").expanduser()


def wants_traceback(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether errors should come with their traceback (`CORDEE_TRACEBACK=1`), for reporting bugs."""
    return bool(environ.get("CORDEE_TRACEBACK"))


def wants_colour(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a terminal may be written to in colour; `NO_COLOR` is what many programs obey."""
    return not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
