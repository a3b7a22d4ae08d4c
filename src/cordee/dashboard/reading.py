"""What a page shows of a run, read from its directory as the run writes it.

A run directory is not trusted: it may come from anybody. Nothing of it is executed or followed, texts are cut and
stripped of control characters, and keys, journals and checkpoints are never read.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import stat
import threading
import time
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from cordee.core.errors import RunDirectoryError
from cordee.dashboard.lanes import Lanes
from cordee.dashboard.passes import SampledPasses
from cordee.dashboard.series import Curve, Sparklines
from cordee.dashboard.states import MemberStates
from cordee.monitoring import RunInfo, follow, inspect_run, list_runs
from cordee.monitoring import events as kinds
from cordee.monitoring.diagnosis import add_up, diagnose_phases, diagnose_queue, find_crowd, in_words
from cordee.monitoring.files import open_regular
from cordee.monitoring.happened import describe, frozen_s
from cordee.monitoring.merged_logs import Logs, printable
from cordee.monitoring.overview import CHUNK_BYTES, OverviewBuilder, describe_overview
from cordee.monitoring.run_directory import JOB_FILE
from cordee.monitoring.timeline import Line, Phase, follow_member, list_members

_READING_S = 0.25  # for which one overview reads on; a page shows what there is, and asks again
_NUM_KEPT = 4  # runs whose curves stay in memory
_MOST_MARKS = 2000  # the newest
_MOST_ROUNDS = 1000  # of clients; the newest
_MOST_MEMBERS = 1000  # whose timelines are read
_MOST_LINKS = 10_000  # that are counted
_MOST_SHOWN_LINKS = 100  # those over which most was sent
_MOST_LOG_LINES = 2000
_MOST_LOG_BYTES = 1 << 20  # of each member, the last
_MOST_JOB_BYTES = 1 << 18
_RECENT = 0.9  # of the steps so far: a worker that was slow before is not what holds others up now
_MEASURED = (  # of a summary, with what was predicted beside it
    "step_seconds",
    "predicted_step_seconds",
    "peak_memory_bytes",
    "predicted_memory_bytes",
    "prediction_is_sure",
)
_ROUND = ("round", "num_asked", "num_took_part", "late", "dropped", "refused", "epsilon", "seconds", "bytes_sent")
CURVES = {"loss": "Training loss", "rate": "Samples per second", "test_loss": "Test loss", "accuracy": "Test accuracy"}


class Mark(msgspec.Struct, frozen=True):
    """Something that happened, on the axis of time."""

    at: float  # seconds of the run
    kind: str
    text: str
    step: int | None = None


class RunReader:
    """The curves, marks and members of one run; `update` reads what is new."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.curves = {name: Curve() for name in CURVES}
        self.marks: list[Mark] = []
        self.members: dict[str, MemberStates] = {}
        self.total_steps: int | None = None
        self.step = 0
        self.end = 0.0  # the last time that anything happened, in seconds of the run
        self.facts = OverviewBuilder()
        self._origin: float | None = None
        self._parts: list[tuple[float, float]] = []  # of a run that was resumed: since when, and what is second 0
        self._has_ended = False
        self.is_behind = False
        self.phases: dict[str, list[int]] = {}  # microseconds of each phase, by member
        self.links: dict[tuple[str, str], int] = {}  # bytes over sockets, from which member to which
        self.places: dict[str, tuple[str, int]] = {}  # of the workers: the host, and how many cores it has
        self.recorded_begin: float | None = None  # of training, by what the workers recorded
        self.queued: dict[str, tuple[int, int]] = {}  # of the workers: microseconds without a core, of training
        self._last_lines: dict[str, Line] = {}  # of the workers
        self.lanes = Lanes()
        self.passes = SampledPasses()
        self.rounds: list[dict[str, Any]] = []  # of clients
        self.workers: tuple[int, int] | None = None  # now, and wanted
        self.pace: deque[tuple[float, int]] = deque(maxlen=64)  # the last steps: when, and which
        self._timeline_offsets: dict[str, int] = {}
        self.staleness: dict[str, int] = {}  # gradients by how many updates had overtaken them
        self.measured: dict[str, Any] = {}  # beside what the planner predicted, when the run has ended
        self.predicted: kinds.Predicted | None = None
        self.slow: kinds.Straggler | None = None  # the last worker that was much slower than the others

    def update(self, budget_s: float = math.inf) -> None:
        """Read what the run has written since, for about `budget_s`; `is_behind` says whether there is more.

        Raises RunDirectoryError if the file is another run's.
        """
        deadline_s = time.monotonic() + budget_s
        self.is_behind = True
        while time.monotonic() < deadline_s:
            found, offset = follow(self.path, self.offset, CHUNK_BYTES)
            for event in found:
                self.facts.take(event)
                if not isinstance(event, kinds.UnreadableLine):
                    self.take(event)
            if offset == self.offset:
                # After the events: they say which second of the run a moment is.
                self.is_behind = not self._read_timelines(deadline_s)
                return
            self.offset = offset

    def _read_timelines(self, deadline_s: float) -> bool:
        """Add what members have recorded since; return whether that is all. What cannot be read is passed over."""
        for member in list_members(self.path)[:_MOST_MEMBERS]:
            offset = self._timeline_offsets.get(member, 0)
            with contextlib.suppress(RunDirectoryError):
                while True:
                    if time.monotonic() >= deadline_s:
                        return False
                    lines, end = follow_member(self.path, member, offset, CHUNK_BYTES)
                    if end == offset:
                        break
                    name = in_words(printable(member))
                    totals = self.phases.setdefault(name, [0] * len(Phase))
                    self.phases[name] = [a + b for a, b in zip(totals, add_up(lines), strict=True)]
                    self.lanes.take(name, lines, self.second_of)
                    self.passes.take(name, lines, self.second_of)
                    for line in lines:
                        if name.startswith("worker "):
                            self._take_place(name, line)
                        self._states(name).take(line, self.second_of)
                        self._take_links(name, line)
                    offset = self._timeline_offsets[member] = end
        return True

    def _take_place(self, name: str, line: Line) -> None:
        self.places[name] = printable(line.host), line.cores
        last = self._last_lines.get(name)
        if last is not None and line.at and (last.pid, last.origin_us) == (line.pid, line.origin_us):
            without, spent = self.queued.get(name, (0, 0))
            without += max(line.queued_us - last.queued_us, 0)
            self.queued[name] = without, spent + max(line.until - last.until, 0)
        self._last_lines[name] = line
        if line.at:
            at = self.second_of((line.origin_us + line.offset_us + line.at[0]) / 1e6)
            self.recorded_begin = at if self.recorded_begin is None else min(at, self.recorded_begin)

    def _take_links(self, name: str, line: Line) -> None:
        for other, num_bytes in line.links.items():
            link = (name, in_words(printable(other)))
            if link in self.links or len(self.links) < _MOST_LINKS:
                self.links[link] = self.links.get(link, 0) + num_bytes

    @property
    def first_result(self) -> float | None:
        """When the first loss was reported, in seconds of the run; workers that train alone do that late."""
        return self.curves["loss"].first

    @property
    def begin(self) -> float:
        """When training began, in seconds of the run, as well as it is known; 0 where it did not."""
        return self.recorded_begin or self.first_result or 0.0

    def second_of(self, moment: float) -> float:
        """Return the second of the run of a moment since 1970; 0 before its first event."""
        place = bisect_right(self._parts, (moment, math.inf)) - 1
        if place < 0:
            return 0.0
        return max(moment - self._parts[place][1], 0.0)

    def take(self, event: kinds.AnyEvent) -> list[Mark]:
        """Add an event; return what is to be marked of it."""
        if self._origin is None:
            self._origin = event.time
        is_resumed = isinstance(event, kinds.RunStarted) and event.start_step
        if is_resumed or self._has_ended:  # the hours in which it did not run are not drawn
            self._origin += max(event.time - self._origin - self.end - 1.0, 0.0)
        if not self._parts or self._parts[-1][1] != self._origin:
            self._parts.append((event.time, self._origin))
        self._has_ended = isinstance(event, kinds.RunEnded)
        at = max(event.time - self._origin, 0.0)
        self.end = max(self.end, at)
        has_rejoined = False
        match event:
            case kinds.Step():
                self.step = event.step
                self.pace.append((at, event.step))
                self.curves["loss"].append(at, event.loss)
                self.curves["rate"].append(at, event.samples_per_second)
            case kinds.Evaluation():
                self.curves["test_loss"].append(at, event.test_loss)
                self.curves["accuracy"].append(at, event.test_accuracy)
            case kinds.Round():
                self.step = event.round
                self.pace.append((at, event.round))
                self.curves["loss"].append(at, event.loss)
                self.rounds.append({key: getattr(event, key) for key in _ROUND})
                del self.rounds[:-_MOST_ROUNDS]
            case kinds.RunStarted():
                self.total_steps = event.total_steps
                self.workers = (event.workers, event.workers)
            case kinds.Scale():
                self.workers = (self.workers[0] if self.workers else event.workers, event.workers)
            case kinds.Generation():
                self.workers = (len(event.members), self.workers[1] if self.workers else len(event.members))
            case kinds.WorkerStarted():
                has_rejoined = self._states(f"{event.role} {event.worker}").start(at)
            case kinds.WorkerLost():
                self._states(f"{event.role} {event.worker}").lose(at, frozen_s(event))
            case kinds.WorkerLeft():
                self._states(f"{event.role} {event.worker}").end(at)
            case kinds.Straggler():
                self.slow = event
            case kinds.Predicted():
                self.predicted = event
            case kinds.Staleness():
                self.staleness = {age: count for age, count in event.ages.items() if age.isdecimal()}
            case kinds.RunEnded():
                self.step = max(self.step, event.steps)
                self.measured = {key: getattr(event, key) for key in _MEASURED}
                for states in self.members.values():
                    states.end(at)
        happened = describe(event)
        marks = [Mark(at, happened.kind, printable(happened.text), happened.step)] if happened else []
        if has_rejoined and isinstance(event, kinds.WorkerStarted):
            text = f"{event.role} {event.worker} rejoined as process {event.pid} on {event.host}"
            marks.append(Mark(at, "rejoined", printable(text)))
        self.marks += marks
        del self.marks[:-_MOST_MARKS]
        return marks

    def _states(self, member: str) -> MemberStates:
        return self.members.setdefault(member, MemberStates())


class Runs:
    """The runs of one folder, by name."""

    def __init__(self, folder: Path, only: Path | None = None) -> None:
        self._folder = folder
        self._only = only  # a run elsewhere, which is shown as well
        self._readers: OrderedDict[str, RunReader] = OrderedDict()
        self._sparklines = Sparklines()
        self._lock = threading.RLock()  # a run is read once, however many requests ask for it at a time

    def list(self) -> list[dict[str, Any]]:
        """Return all runs, newest first."""
        infos = list_runs(self._folder)
        if self._only is not None and all(not _is_same(info.path, self._only) for info in infos):
            found = inspect_run(self._only)
            infos = [*([found] if found is not None else []), *infos]
        return [{**_listed(info), "losses": self._sparklines.of(info.path)} for info in infos]

    def find(self, name: str) -> Path:
        """Return the directory of a run by its name. Raises RunDirectoryError for what is none, or is a link."""
        candidates = [self._only] if self._only is not None and self._only.name == name else []
        if name not in ("", ".", "..") and "/" not in name and "\0" not in name:
            candidates.append(self._folder / name)
        for path in candidates:
            with contextlib.suppress(OSError):
                if stat.S_ISDIR(os.lstat(path).st_mode) and (path / JOB_FILE).is_file():
                    return path
        raise RunDirectoryError(f"there is no run {name!r}")

    def reader(self, name: str) -> RunReader:
        """Return the curves of a run as they are now. Raises RunDirectoryError."""
        path = self.find(name)
        reader = self._readers.pop(name, None) or RunReader(path)
        try:
            reader.update(_READING_S)
        except RunDirectoryError:  # another run has taken the place of the one that was read
            reader = RunReader(path)
            reader.update(_READING_S)
        self._readers[name] = reader
        while len(self._readers) > _NUM_KEPT:
            self._readers.popitem(last=False)
        return reader

    def _known(self, name: str) -> RunReader:
        """Return the curves of a run as the last overview showed them: reading on would delay what is drawn."""
        reader = self._readers.get(name)
        return reader if reader is not None and reader.path == self.find(name) else self.reader(name)

    def overview(self, name: str) -> dict[str, Any]:
        """Return what a page of a run begins with."""
        with self._lock:
            return self._overview(name)

    def _overview(self, name: str) -> dict[str, Any]:
        reader = self.reader(name)
        info = inspect_run(reader.path)
        if info is None:
            raise RunDirectoryError(f"the run {name!r} is gone")
        state = info.state
        return {
            "name": name,
            "state": state,
            "rows": [[label, printable(value)] for label, value in describe_overview(reader.facts.build(info))],
            "step": reader.step,
            "total_steps": reader.total_steps,
            "end": reader.end,
            "offset": reader.offset,
            "is_behind": reader.is_behind,
            "marks": [msgspec.to_builtins(mark) for mark in reader.marks],
            "members": {name: msgspec.to_builtins(states.spans) for name, states in reader.members.items()},
            "passes": reader.passes.newest(),
            "predicted": None if reader.predicted is None else msgspec.to_builtins(reader.predicted),
            "curves": {name: title for name, title in CURVES.items() if len(reader.curves[name])},
            "diagnosis": diagnose(reader, state),
            "phases": reader.phases,
            "staleness": reader.staleness,
            "links": [[*link, sent] for link, sent in sorted(reader.links.items(), key=_by_bytes)[:_MOST_SHOWN_LINKS]],
            "rounds": reader.rounds,
            "begin": reader.begin,
            "workers": reader.workers,
            "seconds_left": seconds_left(reader) if state == "running" else None,
            "facts": facts_of(reader),
        }

    def series(self, name: str, begin: float, end: float, columns: int) -> dict[str, Any]:
        """Return all curves of a run between two moments, in at most so many columns."""
        with self._lock:
            curves = self._known(name).curves
            return {
                "begin": begin,
                "end": end,
                "curves": {key: curve.part(begin, end, columns)._asdict() for key, curve in curves.items()},
            }

    def lanes(self, name: str, begin: float, end: float, columns: int) -> Mapping[str, Any]:
        """Return what each member of a run did between two moments."""
        with self._lock:
            return self._known(name).lanes.part(begin, end, columns)

    def logs(self, name: str, member: str = "") -> Sequence[tuple[str, str, float]]:
        """Return the last lines of the logs: of which member, the text, and the second of the run."""
        lines = Logs(self.find(name), member, most_bytes=_MOST_LOG_BYTES).new_lines()[-_MOST_LOG_LINES:]
        with self._lock:
            second_of = self._known(name).second_of
        return [(in_words(line.member), line.text, second_of(moment_of(line.time))) for line in lines]

    def job(self, name: str) -> str:
        """Return the job file of a run, as text."""
        try:
            with open_regular(self.find(name) / JOB_FILE) as file:
                return file.read(_MOST_JOB_BYTES).decode("utf-8", "replace")
        except OSError as error:
            raise RunDirectoryError(f"cannot read {JOB_FILE}: {error.strerror}") from error


def moment_of(text: str) -> float:
    """Return the seconds since 1970 of the time of a log line, "2026-11-18 10:54:05,123" on this host; 0 for none."""
    with contextlib.suppress(ValueError, OverflowError):
        return time.mktime(time.strptime(text[:19], "%Y-%m-%d %H:%M:%S")) + int(text[20:23]) / 1000
    return 0.0


def _listed(info: RunInfo) -> dict[str, Any]:
    known = msgspec.to_builtins(info, enc_hook=str)
    return {**known, "path": info.path.name, "problem": printable(info.problem or "")}


def seconds_left(reader: RunReader) -> float | None:
    """Return how long the run still takes at the pace of its last steps; None where that is not known."""
    if reader.total_steps is None or len(reader.pace) < 2:
        return None
    (first_s, first), (last_s, last) = reader.pace[0], reader.pace[-1]
    return max(reader.total_steps - last, 0) * (last_s - first_s) / (last - first) if last > first else None


def facts_of(reader: RunReader) -> dict[str, Any]:
    """Return what was measured, with the summary's prediction beside it; before the end, what is known so far."""
    known = dict(reader.measured)
    if not known and reader.predicted is not None and len(reader.pace) > 1:
        (first_s, first), (last_s, last) = reader.pace[0], reader.pace[-1]
        known["predicted_step_seconds"] = reader.predicted.step_seconds
        known["prediction_is_sure"] = reader.predicted.is_sure
        known["step_seconds"] = (last_s - first_s) / (last - first) if last > first else None
    return known


def diagnose(reader: RunReader, state: str) -> str:
    """Return one line of what a person should know first."""
    losses = [mark for mark in reader.marks if mark.kind == "lost"]
    if state == "unreadable":
        return "A file of this run cannot be read: what is shown is incomplete."
    if state == "died":
        name = shlex.quote(printable(reader.path.name))
        return f"The process of this run was killed. It continues from its newest checkpoint with: cordee resume {name}"
    if state == "failed":
        ends = [mark.text for mark in reader.marks if mark.kind == "end"]
        return f"The run failed: {ends[-1] if ends else 'see the logs'}"
    down = [member for member, states in reader.members.items() if states.is_down]
    if state == "running" and down:
        return f"{', '.join(down)} is down and being replaced; the others continue."
    slow = reader.slow
    if state == "running" and slow is not None and slow.step >= _RECENT * reader.step:
        took, usual = f"{slow.seconds:.2g} s for step {slow.step:,}", f"{slow.median_seconds:.2g} s"
        return f"A slow worker holds the others up: worker {slow.worker} took {took}, the others {usual}."
    lost = f"{len(losses)} {'loss' if len(losses) == 1 else 'losses'}; the last: {losses[-1].text}." if losses else ""
    crowd = find_crowd(reader.places)
    said = diagnose_queue(reader.queued, crowd)
    said = said or diagnose_phases(reader.phases, has_stages=reader.passes.has_any, crowd=crowd)
    if said:
        return f"{said[0].upper()}{said[1:]}. {lost}".rstrip()
    if lost:
        return lost
    if state == "running" and reader.end and not len(reader.curves["loss"]):
        return "Starting: no step has been taken yet."
    return "Nothing unusual."


def _by_bytes(item: tuple[tuple[str, str], int]) -> tuple[int, tuple[str, str]]:
    return -item[1], item[0]


def _is_same(one: Path, other: Path) -> bool:
    with contextlib.suppress(OSError):
        return one.samefile(other)
    return False
