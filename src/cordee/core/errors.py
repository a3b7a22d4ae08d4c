"""Every error a user can meet, in one tree.

    CordeeError                 exit code 1
    ├── JobError             2  the job: a key, a value, a name, a command-line override
    ├── DataError            2  data that is missing, damaged, or not what the job says
    ├── ModelError           2  a model that cannot be built or does not fit the data
    ├── RunDirectoryError    2  a run directory that cannot be used, or is used by another run
    ├── MissingExtraError    2  an optional package that is not installed
    ├── StorageError         1  a file that could not be written: disk full, quota, input/output error
    ├── CheckpointError      1  no checkpoint that is whole
    ├── TrainingError        1  training that cannot continue: a loss that is not a number, a lost worker
    ├── CommunicationError   1  a peer that died, froze, or sent what it must not
    └── StoreError           1  what a store refuses: an unknown key, an array that does not fit, too few workers

Messages say what is wrong, with which values, and what to change. The command prints them without a
traceback and exits with `exit_code`: 2 for what the user can fix in the job, 1 for failures.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CordeeError(Exception):
    """The root of all errors that Cordée raises on purpose."""

    exit_code = 1


class JobError(CordeeError):
    exit_code = 2


class DataError(CordeeError):
    exit_code = 2


class ModelError(CordeeError):
    exit_code = 2


class RunDirectoryError(CordeeError):
    exit_code = 2


class MissingExtraError(CordeeError):
    exit_code = 2

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs optional packages: pip install 'cordee[{extra}]'")


class StorageError(CordeeError):
    pass


class CheckpointError(CordeeError):
    pass


class TrainingError(CordeeError):
    pass


class CommunicationError(CordeeError):
    pass


class StoreError(CordeeError):
    pass


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the known name closest to `name`, or nothing if none is close."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if not close:
        folded = {candidate.lower().replace("_", "-"): candidate for candidate in names}
        close = [folded[match] for match in difflib.get_close_matches(name.lower().replace("_", "-"), folded, n=1)]
    return f"; did you mean '{close[0]}'?" if close else ""
