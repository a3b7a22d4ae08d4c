"""The log file of a worker, for as long as the run lasts."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from cordee.core.errors import RunDirectoryError
from cordee.monitoring.files import reason

_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


class WorkerLog(logging.FileHandler):
    """Appends log records to a file. When the disk is full it says so once on the screen and goes quiet."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self.setFormatter(logging.Formatter(_FORMAT))
        self._is_quiet = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self._is_quiet:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name logging calls
        error = sys.exception()
        if isinstance(error, OSError):
            self._give_up(error)
        else:
            super().handleError(record)

    def close(self) -> None:
        try:
            super().close()
        except OSError as error:  # what a full disk refused is tried again here
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        if not self._is_quiet:
            self._is_quiet = True
            with contextlib.suppress(OSError, ValueError):  # the screen may be a file on the same disk
                sys.stderr.write(f"warning: cannot write {self.baseFilename}: {reason(error)}; the log ends here\n")


@contextmanager
def setup_logging(path: Path, verbose: bool = False, *, is_required: bool = False) -> Iterator[WorkerLog]:
    """Record what the `cordee` logger says, and all Python warnings, in `path` until the block is left.

    Warnings still reach the screen as well. `verbose` also records debug messages. Where the file cannot be
    opened (a disk that has filled up since the run began) nothing is recorded, which is said on the screen; with
    `is_required`, `RunDirectoryError` is raised. Afterwards logging and warnings are as they were.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        log = WorkerLog(path)
    except OSError as error:
        if is_required:
            raise RunDirectoryError(f"cannot write the log {path}: {reason(error)}; choose another --run-dir") from None
        log = WorkerLog(Path(os.devnull))
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"warning: cannot write the log {path}: {reason(error)}; nothing is recorded there\n")
    logger = logging.getLogger("cordee")
    level_before = logger.level
    logger.addHandler(log)
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)
    show_before = warnings.showwarning

    def show_and_record(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> Any:
        if file is None:
            text = f"{filename}:{lineno}: {category.__name__}: {message}"
            log.handle(logging.LogRecord("warnings", logging.WARNING, filename, lineno, text, None, None))
        show_before(message, category, filename, lineno, file, line)

    warnings.showwarning = show_and_record
    try:
        yield log
    finally:
        if warnings.showwarning is show_and_record:
            warnings.showwarning = show_before
        logger.removeHandler(log)
        logger.setLevel(level_before)
        log.close()
