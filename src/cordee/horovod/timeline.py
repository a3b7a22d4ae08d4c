"""A timeline of the operations in the Chrome trace format: when each was called, agreed on and carried out.

For chrome://tracing and Perfetto. Written event by event, so that the file of a process that is killed can be read.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from cordee.core import env
from cordee.core.errors import StorageError
from cordee.horovod.requests import Request

_writing = threading.Lock()
_file: TextIO | None = None
_rank = 0
_rows: dict[str, int] = {}
_marks_rounds = False


def now_us() -> float:
    return time.perf_counter_ns() / 1000


def start_timeline(file_path: str | Path, mark_cycles: bool = False) -> None:
    """Write what this rank does from now on to a file. Local. `mark_cycles` also marks each round of comparing."""
    global _file, _marks_rounds
    stop_timeline()
    try:
        _file = Path(file_path).open("w")  # noqa: SIM115 - closed by stop_timeline
    except OSError as error:
        raise StorageError(f"start_timeline: cannot write {file_path}: {error.strerror}") from error
    _marks_rounds = mark_cycles
    _rows.clear()
    _file.write("[\n")
    _write({"name": "process_name", "ph": "M", "pid": _rank, "tid": 0, "args": {"name": f"rank {_rank}"}})


def stop_timeline() -> None:
    """Complete the file. Calling it without a timeline changes nothing."""
    global _file
    with _writing:
        if _file is not None:
            _file.write("{}]\n")
            _file.close()
            _file = None


def start_if_wanted(rank: int) -> None:
    """Begin at `init` where the environment says so: on rank 0 alone, as Horovod does."""
    global _rank
    _rank = rank
    if rank == 0 and (path := env.horovod_timeline()):
        start_timeline(path)


def record_negotiation(ready: Sequence[Request], started_us: float) -> None:
    if _file is None:
        return
    ended_us = now_us()
    for request in ready:
        _span(request.name, f"NEGOTIATE_{request.kind.upper()}", started_us, ended_us, {})
    if _marks_rounds:
        _write({"name": "CYCLE_START", "ph": "i", "s": "p", "ts": started_us, "pid": _rank, "tid": 0})


def record(request: Request, called_us: float, started_us: float) -> None:
    """Record that an operation is done: queued since `called_us`, carried out since `started_us`."""
    if _file is None:
        return
    size = {"shapes": [list(part.shape) for part in request.parts], "dtypes": [part.dtype for part in request.parts]}
    _span(request.name, "QUEUE", called_us, started_us, {})
    _span(request.name, request.kind.upper(), started_us, now_us(), size)


def _span(row: str, name: str, started_us: float, ended_us: float, arguments: dict[str, Any]) -> None:
    if row not in _rows:
        _rows[row] = len(_rows) + 1
        _write({"name": "thread_name", "ph": "M", "pid": _rank, "tid": _rows[row], "args": {"name": row}})
    place = {"pid": _rank, "tid": _rows[row]}
    _write({"name": name, "ph": "X", "ts": started_us, "dur": ended_us - started_us, **place, "args": arguments})


def _write(event: dict[str, Any]) -> None:
    with _writing:
        if _file is not None:
            _file.write(json.dumps(event) + ",\n")
            _file.flush()
