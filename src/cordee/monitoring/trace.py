"""`cordee timeline`: the timelines of a run as one trace in Chrome's format, which Perfetto reads too.

Each member has a track. On it a row of the timeline is a slice, and the phases of the row are slices inside of it, in
the order of `_ORDER`: a row of several steps has each phase once, as long as in all of them. A row that would begin
before the last one ended begins there: slices of a track never overlap.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from cordee.core.errors import RunDirectoryError
from cordee.monitoring import events as kinds
from cordee.monitoring.files import write_atomically
from cordee.monitoring.jsonl import follow
from cordee.monitoring.merged_logs import printable
from cordee.monitoring.timeline import FOLDER, Line, Phase, follow_member, list_members

_ORDER = (Phase.DATA, Phase.COMPUTE, Phase.WAIT, Phase.EXCHANGE, Phase.EVALUATE, Phase.SAVE)
_PID = 1


def write_trace(run: Path, file: Path) -> tuple[int, int]:
    """Write the trace of a run; return how many rows of how many members it has.

    Raises RunDirectoryError if there is no timeline, StorageError if the file cannot be written.
    """
    timelines = {member: follow_member(run, member)[0] for member in list_members(run)}
    num_rows = sum(line.num_rows for lines in timelines.values() for line in lines)
    if not num_rows:
        raise RunDirectoryError(
            f"{run} has no {FOLDER}/ with steps in it: the run was made by an earlier version, or no step was taken"
        )
    found, _ = follow(run)
    losses = [event for event in found if isinstance(event, kinds.WorkerLost)]
    slices = list(make_trace(timelines, losses))
    content = gzip.compress(msgspec.json.encode({"traceEvents": slices, "displayTimeUnit": "ms"}), mtime=0)
    write_atomically(file, content)
    return num_rows, len(timelines)


def make_trace(timelines: dict[str, list[Line]], losses: list[kinds.WorkerLost]) -> Iterator[dict[str, Any]]:
    """Return the events of the trace. Times are the coordinator's. Pure."""
    begins = [line.origin_us + line.offset_us for lines in timelines.values() for line in lines]
    zero_us = min(begins, default=0)
    for number, (member, lines) in enumerate(timelines.items(), start=1):
        track = {"pid": _PID, "tid": number}
        yield {"ph": "M", "name": "thread_name", **track, "args": {"name": printable(member)}}
        yield {"ph": "M", "name": "thread_sort_index", **track, "args": {"sort_index": number}}
        yield from _rows(lines, track, zero_us)
        for loss in losses:
            if f"{loss.role}-{loss.worker}" == member:
                at_us = round(loss.time * 1e6) - zero_us
                text = printable(loss.reason)
                yield {"ph": "i", "s": "t", "name": "lost", "ts": at_us, **track, "args": {"reason": text}}


def _rows(lines: list[Line], track: dict[str, int], zero_us: int) -> Iterator[dict[str, Any]]:
    free_us = 0  # where the last row ended
    for line in lines:
        base_us = line.origin_us + line.offset_us - zero_us
        for at_us, state in line.states:
            facts = {"pid": line.pid, "host": printable(line.host), "clock_error_us": line.offset_error_us}
            yield {"ph": "i", "s": "t", "name": state, "ts": max(base_us + at_us, 0), **track, "args": facts}
        for i in range(line.num_rows):
            begin_us = max(base_us + line.at[i], free_us)
            spent = [(phase, line.phases[phase][i]) for phase in _ORDER if line.phases[phase][i]]
            free_us = begin_us + sum(length for _, length in spent)
            name = f"step {line.step[i]}" if line.steps[i] else "between steps"
            facts = {"steps": line.steps[i]}
            length = free_us - begin_us
            yield {"ph": "X", "name": name, "cat": "step", "ts": begin_us, "dur": length, **track, "args": facts}
            for phase, length in spent:
                yield {"ph": "X", "name": phase.name.lower(), "cat": "phase", "ts": begin_us, "dur": length, **track}
                begin_us += length
