"""`cordee timeline`: the timelines of a run as one trace in Chrome's format, which Perfetto reads too.

Each member has a track. On it a row of the timeline is a slice, and the phases of the row are slices inside of it, in
the order of `_ORDER`: a row of several steps has each phase once, as long as in all of them. A row that would begin
before the last one ended begins there: slices of a track never overlap.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from cordee.core.errors import RunDirectoryError
from cordee.core.passes import PassKind
from cordee.monitoring import events as kinds
from cordee.monitoring.files import write_atomically
from cordee.monitoring.happened import frozen_s
from cordee.monitoring.jsonl import follow
from cordee.monitoring.merged_logs import printable
from cordee.monitoring.timeline import FOLDER, Line, Phase, follow_member, list_members

_ORDER = (Phase.DATA, Phase.COMPUTE, Phase.WAIT, Phase.EXCHANGE, Phase.EVALUATE, Phase.SAVE)
_PID = 1
_PASS_KINDS = frozenset(PassKind)


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
    slices = list(make_trace(timelines, [event for event in found if not isinstance(event, kinds.UnreadableLine)]))
    content = gzip.compress(msgspec.json.encode({"traceEvents": slices, "displayTimeUnit": "ms"}), mtime=0)
    write_atomically(file, content)
    return num_rows, len(timelines)


def make_trace(timelines: dict[str, list[Line]], found: Sequence[kinds.AnyEvent]) -> Iterator[dict[str, Any]]:
    """Return the events of the trace. Times are the coordinator's. Pure."""
    happened = _happened(found)
    begins = [line.origin_us + line.offset_us for lines in timelines.values() for line in lines]
    zero_us = min(begins, default=0)
    for number, (member, lines) in enumerate(timelines.items(), start=1):
        track = {"pid": _PID, "tid": number}
        yield {"ph": "M", "name": "thread_name", **track, "args": {"name": printable(member)}}
        yield {"ph": "M", "name": "thread_sort_index", **track, "args": {"sort_index": number}}
        yield from _rows(lines, track, zero_us)
        for name, at_s, facts in happened.get(member, ()):
            at_us = max(round(at_s * 1e6) - zero_us, 0)
            yield {"ph": "i", "s": "t", "name": name, "ts": at_us, **track, "args": facts}
        if any(line.passes for line in lines):
            track = {"pid": _PID, "tid": len(timelines) + number}
            yield {"ph": "M", "name": "thread_name", **track, "args": {"name": f"{printable(member)} passes"}}
            yield {"ph": "M", "name": "thread_sort_index", **track, "args": {"sort_index": len(timelines) + number}}
            yield from _passes(lines, track, zero_us)


def _happened(found: Sequence[kinds.AnyEvent]) -> dict[str, list[tuple[str, float, dict[str, str]]]]:
    """Return for each member what happened to it: losses, that it came back, and faults that were injected."""
    by_member: dict[str, list[tuple[str, float, dict[str, str]]]] = {}
    lost = set()
    for event in found:
        match event:
            case kinds.WorkerLost():
                member = f"{event.role}-{event.worker}"
                lost.add(member)
                if silent_s := frozen_s(event):
                    by_member.setdefault(member, []).append(("frozen", event.time - silent_s, {}))
                by_member.setdefault(member, []).append(("lost", event.time, {"reason": printable(event.reason)}))
            case kinds.WorkerStarted() if (member := f"{event.role}-{event.worker}") in lost:
                lost.remove(member)
                by_member[member].append(("rejoined", event.time, {"pid": str(event.pid)}))
            case kinds.Fault():
                member, name = event.target.replace(" ", "-"), f"fault: {printable(event.fault)}"
                by_member.setdefault(member, []).append((name, event.time, {"target": printable(event.target)}))
    return by_member


def _passes(lines: list[Line], track: dict[str, int], zero_us: int) -> Iterator[dict[str, Any]]:
    """Return the passes of the sampled steps, which are one after the other, on a track of their own."""
    free_us = 0
    for line in lines:
        base_us = line.origin_us + line.offset_us - zero_us
        for step in line.passes:
            columns = (step.kind, step.stage, step.microbatch, step.at, step.spent)
            for kind, stage, microbatch, at_us, spent_us in zip(*columns, strict=False):
                begin_us = max(base_us + at_us, free_us)
                free_us = max(base_us + at_us + spent_us, begin_us)
                name = PassKind(kind).name.lower() if kind in _PASS_KINDS else "pass"
                facts = {"step": step.step, "stage": stage, "microbatch": microbatch}
                length_us = free_us - begin_us
                yield {"ph": "X", "name": name, "cat": "pass", "ts": begin_us, "dur": length_us, **track, "args": facts}


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
