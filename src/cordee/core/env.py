"""The environment variables that Cordée reads, all of them here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from cordee.core.errors import JobError


class Place(NamedTuple):
    """A process's place among those that a launcher started together."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


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


def place(environ: Mapping[str, str] = os.environ) -> Place | None:
    """Return the place that torchrun, Kubernetes or `cordee run` gave this process; None if it runs alone."""
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return None
    numbers = {}
    for name, default in (("RANK", None), ("WORLD_SIZE", None), ("LOCAL_RANK", "RANK"), ("LOCAL_WORLD_SIZE", "1")):
        text = environ.get(name, environ.get(default, default) if default else None)
        if text is None or not text.isdecimal():
            raise JobError(f"the environment says {name}={text!r}: RANK and WORLD_SIZE must both be whole numbers")
        numbers[name] = int(text)
    if numbers["RANK"] >= numbers["WORLD_SIZE"]:
        raise JobError(f"the environment says RANK={numbers['RANK']} of WORLD_SIZE={numbers['WORLD_SIZE']}")
    if numbers["WORLD_SIZE"] > 1 and not (environ.get("MASTER_ADDR") and environ.get("MASTER_PORT")):
        raise JobError("the environment has RANK and WORLD_SIZE but no MASTER_ADDR and MASTER_PORT: where to meet?")
    return Place(*numbers.values())


def script_environment(place: Place, master_port: int) -> dict[str, str]:
    """Return what `cordee run` gives each script, in the words of torchrun, so that torch finds the others.

    The launcher keeps the store, which torch takes for that of torchrun's agent.
    """
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
