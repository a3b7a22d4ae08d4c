"""The numbers of a run as one table: `metrics.csv`, a row for each number."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

from cordee.core.errors import StorageError
from cordee.monitoring.events import AnyEvent, RunStarted
from cordee.monitoring.files import reason
from cordee.monitoring.scalars import scalars_of

HEADER = ("time", "step", "name", "value")


class CsvSink:
    """Appends `time,step,name,value` to a file, on disk as soon as it happened.

    A resumed run drops the rows behind the step that it continues from. Raises `StorageError` where it cannot write.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1

    def emit(self, event: AnyEvent) -> None:
        try:
            if isinstance(event, RunStarted) and self._descriptor < 0:
                self._open(event.start_step)
            rows = [(f"{event.time:.3f}", event.step, name, value) for name, value in scalars_of(event).items()]  # type: ignore[union-attr]
            if rows:
                if self._descriptor < 0:
                    self._open(0)
                os.write(self._descriptor, _text(rows))
        except OSError as error:
            self.close()
            raise StorageError(
                f"cannot write {self._path}: {reason(error)}; it ends here, training continues"
            ) from error

    def close(self) -> None:
        """Close the file. May be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self, start_step: int) -> None:
        kept = _rows_until(self._path, start_step) if start_step else []
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(self._path, flags, 0o644)
        os.write(self._descriptor, _text([HEADER, *kept]))


def _rows_until(path: Path, step: int) -> list[tuple[object, ...]]:
    """Return the rows of a file up to a step; a last row that was cut off is left out."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        rows = [tuple(row) for row in csv.reader(file)][1:]
    return [row for row in rows if len(row) == len(HEADER) and str(row[1]).isdecimal() and int(str(row[1])) <= step]


def _text(rows: Sequence[tuple[object, ...]]) -> bytes:
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
