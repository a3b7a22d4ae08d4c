"""What each member of a run did when: phases of its steps, and its states, in `timeline/<member>.jsonl`.

A row is one step, or several short ones: it lasts at least 10 ms and at least 1/100,000 of the run so far, so that a
file stays small however long the run is. Rows are kept in one plain array and written once a second, as columns of one
line. Times are those of the member's own clock; each line has the offset of that clock to the coordinator's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from array import array
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from time import perf_counter_ns
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from cordee.core.blocked_time import BLOCKED, WAITED
from cordee.core.errors import RunDirectoryError, StorageError
from cordee.core.passes import PASSES, is_sampled, sampled_around
from cordee.monitoring.files import open_regular, reason, to_json

log = logging.getLogger("cordee.timeline")

FOLDER = "timeline"  # of a run directory
WRITE_EVERY_NS = 1_000_000_000
_SHORTEST_ROW_NS = 10_000_000
_ROWS_OF_A_RUN = 100_000
_MOST_SAMPLED = 16  # steps of a line whose passes are kept
_MOST_ROWS = 4096  # of a line: a second has at most 100, but one that cannot be written waits
MOST_LINE_BYTES = 1 << 20


class Phase(IntEnum):
    """What the time of a step goes to; the order is that of the columns."""

    DATA = 0  # the loader has no batch ready
    COMPUTE = 1
    EXCHANGE = 2  # all are there, and bytes are on their way
    WAIT = 3  # for a peer that has not arrived
    EVALUATE = 4
    SAVE = 5


State = Literal["starting", "loading", "joining", "training", "ended"]
Micros = Annotated[int, Meta(ge=-(2**62), le=2**62)]
Column = Annotated[list[Annotated[int, Meta(ge=0, le=2**62)]], Meta(max_length=_MOST_ROWS)]


class StepPasses(msgspec.Struct, frozen=True, kw_only=True):
    """The passes of micro-batches through the stages of one process in one step, in the order of their ends."""

    step: Annotated[int, Meta(ge=0, le=2**62)]
    kind: Column  # of `PassKind`
    stage: Column
    microbatch: Column
    at: Column  # when the pass begins; counts from the line's `origin_us`
    spent: Column


Ages = Annotated[dict[str, tuple[int, int, int]], Meta(max_length=4096)]
"""Of gradients by worker: how many there were, the sum of their ages, and the highest."""


Links = Annotated[
    dict[Annotated[str, Meta(max_length=128)], Annotated[int, Meta(ge=0, le=2**62)]], Meta(max_length=4096)
]


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """What one process did in about a second."""

    member: Annotated[str, Meta(max_length=64)]
    pid: Annotated[int, Meta(ge=0, le=2**31)]
    host: Annotated[str, Meta(max_length=256)]
    origin_us: Micros  # by the member's clock, since 1970; `at` counts from here
    offset_us: Micros = 0  # to be added to the member's clock for the coordinator's
    offset_error_us: Micros = 0  # at most
    states: Annotated[list[tuple[Micros, State]], Meta(max_length=1024)] = []  # since when, in which state
    cores: Annotated[int, Meta(ge=0, le=2**31)] = 0  # that the process may run on; 0: not known
    cpu_us: Annotated[int, Meta(ge=0, le=2**62)] = 0  # processor time of the process since it was started
    queued_us: Annotated[int, Meta(ge=0, le=2**62)] = 0  # for which the thread that trains had work and no core
    memory_bytes: Annotated[int, Meta(ge=0, le=2**62)] = 0  # of the process, at the end of the line
    sent_bytes: Annotated[int, Meta(ge=0, le=2**62)] = 0  # given to sockets since the process was started
    until: Annotated[int, Meta(ge=0, le=2**62)] = 0  # when the four were read; counts from `origin_us`
    passes: Annotated[list[StepPasses], Meta(max_length=64)] = []  # of the steps that are sampled
    ages: Ages = {}  # of a parameter server: how many updates had overtaken the gradients since the line before
    links: Links = {}  # bytes given to sockets since the line before, by the other end
    step: Column = []  # the last of the row
    steps: Column = []  # how many the row has
    at: Column = []  # when the row begins
    data: Column = []
    compute: Column = []
    exchange: Column = []
    wait: Column = []
    evaluate: Column = []
    save: Column = []

    @property
    def num_rows(self) -> int:
        """How many rows are complete: a damaged line may have columns of several lengths."""
        return min(len(column) for column in (self.step, self.steps, self.at, *self.phases))

    @property
    def phases(self) -> tuple[list[int], ...]:
        """The columns of the phases, in microseconds, in the order of `Phase`."""
        return self.data, self.compute, self.exchange, self.wait, self.evaluate, self.save


_COLUMNS = ("step", "steps", "at", *(phase.name.lower() for phase in Phase))
# A member of an enumeration takes Python 3.11 0.06 µs to look up, which a step of 0.25 ms notices.
_COMPUTE, _FIRST_APART = Phase.COMPUTE, int(Phase.EVALUATE)


class Timeline:
    """Records the phases of one process. Used by the thread that trains. Without `write` nothing is recorded."""

    def __init__(
        self,
        member: str = "",
        write: Callable[[Line], None] | None = None,
        clock_offset: Callable[[], tuple[int, int]] = lambda: (0, 0),
        sent_bytes: Callable[[], int] = lambda: 0,
        take_ages: Callable[[], Ages] = dict,
        take_links: Callable[[], Links] = dict,
    ) -> None:
        """`clock_offset` returns the offset of this clock to the coordinator's and its error, in microseconds."""
        self._write, self._member, self._clock_offset, self._sent_bytes = write, member, clock_offset, sent_bytes
        self._take_ages, self._take_links = take_ages, take_links
        # Once: where the system's clock is set during a run, rows stay one after the other.
        self._origin_ns = perf_counter_ns()
        self._origin_us = time.time_ns() // 1000
        self._num_cores = len(os.sched_getaffinity(0))
        self._rows = array("q")
        self._states: list[tuple[int, State]] = []
        self._passes: list[StepPasses] = []
        self._next_write_ns = self._origin_ns + WRITE_EVERY_NS
        self._last_sampled = self._next_sampled = 0  # no step is between them
        self._phase: Phase | None = None
        self._begin_row(self._origin_ns)
        self._take_counts(self._origin_ns)
        if write is not None:
            BLOCKED.start()

    def _begin_row(self, now_ns: int) -> None:
        self._row = [0] * len(Phase)
        self._row_ns, self._num_steps, self._step = now_ns, 0, 0

    def _take_counts(self, now_ns: int) -> None:
        self._since_ns, self._blocked_ns, self._waited_ns = now_ns, BLOCKED.ns, WAITED.ns

    def switch(self, phase: Phase) -> Phase | None:
        """Begin a phase; return the one that ended. Communication inside phases other than EVALUATE and SAVE is apart.

        Two calls and one of `end_step`, as in a step, take 0.7 µs of processor time on a busy host of 2 cores.
        """
        if self._write is None:
            return None
        now_ns, before = perf_counter_ns(), self._phase
        if before is None:
            self._begin_row(now_ns)
        elif before >= _FIRST_APART:
            self._row[before] += now_ns - self._since_ns
            if phase != before:
                self._end_row(now_ns)
        else:
            if BLOCKED.ns == self._blocked_ns and WAITED.ns == self._waited_ns:  # nothing was communicated
                self._row[before] += now_ns - self._since_ns
                self._since_ns = now_ns
                if phase < _FIRST_APART:
                    self._phase = phase
                    return before
            else:
                self._divide(before, now_ns - self._since_ns)
            if phase >= _FIRST_APART and self._num_steps:
                self._end_row(now_ns)
        self._phase = phase
        self._take_counts(now_ns)
        return before

    def _divide(self, phase: Phase, spent_ns: int) -> None:
        """Add the time since the last switch to a phase, but for what was communicated in it."""
        blocked_ns = min(BLOCKED.ns - self._blocked_ns, spent_ns)
        waited_ns = min(WAITED.ns - self._waited_ns, blocked_ns)
        self._row[phase] += spent_ns - blocked_ns
        self._row[Phase.EXCHANGE] += blocked_ns - waited_ns
        self._row[Phase.WAIT] += waited_ns

    @contextlib.contextmanager
    def inside(self, phase: Phase) -> Iterator[None]:
        """Inside, time goes to a phase; afterwards to the phase that was before."""
        before = self.switch(phase)
        try:
            yield
        finally:
            if before is not None:
                self.switch(before)

    def end_step(self, step: int) -> None:
        """`step` steps are taken."""
        if self._write is None:
            return
        self.switch(_COMPUTE)
        now_ns = self._since_ns
        self._step = step
        self._num_steps += 1
        if PASSES.is_on:
            self._keep_passes(step)
        if not self._last_sampled <= step < self._next_sampled - 1:
            self._sample(step + 1)
        length_ns = now_ns - self._row_ns
        if length_ns >= _SHORTEST_ROW_NS and length_ns * _ROWS_OF_A_RUN >= now_ns - self._origin_ns:
            self._end_row(now_ns)

    def _sample(self, step: int) -> None:
        """Record the passes of a step that is sampled; remember which steps are not, so that they are not looked at."""
        if is_sampled(step):
            PASSES.begin()
        self._last_sampled, self._next_sampled = sampled_around(step)

    def _keep_passes(self, step: int) -> None:
        rows = PASSES.take()
        if rows and len(self._passes) < _MOST_SAMPLED:
            kind, stage, microbatch, at_ns, spent_ns = (rows[place::5] for place in range(5))
            self._passes.append(
                StepPasses(
                    step=step,
                    kind=kind.tolist(),
                    stage=stage.tolist(),
                    microbatch=microbatch.tolist(),
                    at=[max(each - self._origin_ns, 0) // 1000 for each in at_ns],
                    spent=[each // 1000 for each in spent_ns],
                )
            )

    def _end_row(self, now_ns: int) -> None:
        at_us = (self._row_ns - self._origin_ns) // 1000
        self._rows.extend((self._step, self._num_steps, at_us, *(spent // 1000 for spent in self._row)))
        self._begin_row(now_ns)
        if now_ns >= self._next_write_ns:
            self._flush(now_ns)

    def enter(self, state: State) -> None:
        """This process is in another state from now on; it is in no phase."""
        if self._write is None:
            return
        if self._phase is not None:
            self.switch(self._phase)
            if any(self._row):
                self._end_row(self._since_ns)
            self._phase = None
        now_ns = perf_counter_ns()
        self._states.append(((now_ns - self._origin_ns) // 1000, state))
        self._flush(now_ns)

    def note(self) -> None:
        """Write how much processor time, memory and traffic there was so far: for a process without steps."""
        if self._write is not None:
            self._flush(perf_counter_ns())

    def close(self) -> None:
        """Write what is left; nothing is recorded any more. May be called again."""
        if self._write is not None:
            self.enter("ended")
            self._write = None
            PASSES.take()
            BLOCKED.stop()

    def _flush(self, now_ns: int) -> None:
        self._next_write_ns = now_ns + WRITE_EVERY_NS
        rows, self._rows = self._rows, array("q")
        states, self._states = self._states, []
        passes, self._passes = self._passes, []
        offset_us, error_us = self._clock_offset()
        width = len(_COLUMNS)
        line = Line(
            member=self._member,
            pid=os.getpid(),
            host=socket.gethostname(),
            origin_us=self._origin_us,
            offset_us=offset_us,
            offset_error_us=error_us,
            states=states,
            cores=self._num_cores,
            cpu_us=time.process_time_ns() // 1000,
            queued_us=_queued_ns() // 1000,
            memory_bytes=_resident_bytes(),
            sent_bytes=self._sent_bytes(),
            until=(now_ns - self._origin_ns) // 1000,
            passes=passes,
            ages=self._take_ages(),
            links=self._take_links(),
            **{name: rows[place::width].tolist() for place, name in enumerate(_COLUMNS)},
        )
        assert self._write is not None
        try:
            self._write(line)
        except StorageError as error:  # training is worth more than a record of it
            log.warning("%s; the timeline of this member ends here", error)
            self._write = None


def _resident_bytes() -> int:
    """Return the memory of this process, as the operating system counts it; 0 where it does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _queued_ns() -> int:
    """Return for how long this thread was ready to run and had no core; 0 where the operating system does not say."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0


class TimelineFolder:
    """Writes the timelines of a run. Raises StorageError where it cannot."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER

    def write(self, member: str, line: Line) -> None:
        """Append a line to the file of a member, in one piece."""
        path = self._folder / f"{member}.jsonl"
        try:
            self._folder.mkdir(exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(path, flags, 0o644)
            try:
                os.write(descriptor, to_json(line) + b"\n")
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StorageError(f"cannot write {path}: {reason(error)}") from error


_decoder = msgspec.json.Decoder(Line)


def list_members(run: Path) -> list[str]:
    """Return the names of the members that have a timeline, in order of their numbers."""
    try:
        names = [path.stem for path in (run / FOLDER).iterdir() if path.suffix == ".jsonl"]
    except OSError:
        return []
    return sorted(names, key=lambda name: (name.rstrip("0123456789"), len(name), name))


def follow_member(run: Path, member: str, offset: int = 0, max_bytes: int = -1) -> tuple[list[Line], int]:
    """Return the lines of a member from `offset` on, and where to continue.

    A line that is being written is left for the next time. A line that cannot be read is passed over. Raises
    RunDirectoryError if the file cannot be read or is a link.
    """
    path = run / FOLDER / f"{member}.jsonl"
    if path.is_symlink() or path.parent.is_symlink():
        raise RunDirectoryError(f"{path} is a link")
    try:
        with open_regular(path) as file:
            file.seek(offset)
            content = file.read(max_bytes)
            if 0 < max_bytes == len(content) and b"\n" not in content:
                content += file.readline(MOST_LINE_BYTES)
    except OSError as error:
        raise RunDirectoryError(f"cannot read {path}: {reason(error)}") from error
    end = content.rfind(b"\n") + 1
    if not end and len(content) > MOST_LINE_BYTES:
        end = len(content)  # longer than any line that a member writes
    lines = []
    for text in content[:end].splitlines():
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            lines.append(_decoder.decode(text))
    return lines, offset + end
