"""What a member did when, in as many columns as the screen has: phases, processor, memory, traffic and staleness.

Each member has a fixed number of bins, so that memory does not grow with the run: when the run gets longer than the
bins, two neighbours become one.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping
from typing import Any

from cordee.monitoring.diagnosis import in_words
from cordee.monitoring.merged_logs import printable
from cordee.monitoring.timeline import Line, Phase

_FIRST_BIN_S = 0.05
_NUM_BINS = 2048  # of each of the first members; 100 kB
_NUM_FEW_BINS = 256  # of each further member
_NUM_FIRST = 64
_MOST_LANES = 2000
_MOST_CELLS = 24_000  # of one answer
PHASES = tuple(phase.name.lower() for phase in Phase)


class Lane:
    """The bins of one member. Times are seconds of the run."""

    def __init__(self, num_bins: int = _NUM_BINS) -> None:
        self._num_bins = num_bins
        self._bin_s = _FIRST_BIN_S
        self._phases = [array("f", bytes(4 * num_bins)) for _ in Phase]  # seconds
        self._used = {name: array("f", bytes(4 * num_bins)) for name in ("cpu", "sent")}  # seconds, bytes
        self._known = array("f", bytes(4 * num_bins))  # seconds for which processor time and traffic are known
        self._memory = array("f", bytes(4 * num_bins))  # bytes, the most
        self._last: Line | None = None  # of the process that writes now
        self._ages: list[array[float]] = []  # of a worker's gradients: how many, and the sum of their ages
        self._highest_age = array("f")

    @property
    def bytes_sent(self) -> float:
        return sum(self._used["sent"])

    def take(self, line: Line, place: Callable[[float], float]) -> None:
        """Add a line; `place` returns the second of the run of a moment since 1970 by the coordinator's clock."""
        zero_s = (line.origin_us + line.offset_us) / 1e6
        shift_s = place(zero_s + line.at[0] / 1e6) - line.at[0] / 1e6 if line.num_rows else 0.0
        for row in range(line.num_rows):
            begin_s = max(line.at[row] / 1e6 + shift_s, 0.0)
            spent = [column[row] / 1e6 for column in line.phases]
            self._spread(self._phases, begin_s, sum(spent), spent)
        if line.until:
            self._take_use(line, place(zero_s + line.until / 1e6))

    def _take_use(self, line: Line, end_s: float) -> None:
        last, self._last = self._last, line
        if last is None or (last.pid, last.origin_us) != (line.pid, line.origin_us):
            spent_s = 0.0  # another process: what it used before its first line is not known by time
        else:
            spent_s = min((line.until - last.until) / 1e6, end_s)
        if spent_s > 0:
            assert last is not None
            amounts = [max(line.cpu_us - last.cpu_us, 0) / 1e6, float(max(line.sent_bytes - last.sent_bytes, 0))]
            self._spread([*self._used.values(), self._known], end_s - spent_s, spent_s, [*amounts, spent_s])
        place = self._bin_of(end_s)
        self._memory[place] = max(self._memory[place], line.memory_bytes)

    def take_ages(self, at_s: float, count: int, total: int, highest: int) -> None:
        """Add how many updates had overtaken the gradients that a server has taken of this member until `at_s`."""
        if not self._ages:
            self._ages = [array("f", bytes(4 * self._num_bins)) for _ in range(2)]
            self._highest_age = array("f", bytes(4 * self._num_bins))
        place = self._bin_of(at_s)
        for bins, amount in zip(self._ages, (count, total), strict=True):
            bins[place] += amount
        self._highest_age[place] = max(self._highest_age[place], highest)

    def _bin_of(self, at_s: float) -> int:
        while at_s >= self._bin_s * self._num_bins:
            self._halve()
        return max(int(at_s / self._bin_s), 0)

    def _halve(self) -> None:
        self._bin_s *= 2
        half = self._num_bins // 2
        for bins in (*self._phases, *self._used.values(), self._known, *self._ages):
            merged = [bins[2 * i] + bins[2 * i + 1] for i in range(half)]
            bins[:] = array("f", merged + [0.0] * (self._num_bins - half))
        for bins in (self._memory, self._highest_age) if self._ages else (self._memory,):
            merged = [max(bins[2 * i], bins[2 * i + 1]) for i in range(half)]
            bins[:] = array("f", merged + [0.0] * (self._num_bins - half))

    def _spread(self, targets: list[array[float]], begin_s: float, length_s: float, amounts: list[float]) -> None:
        """Add amounts to the bins from `begin_s` on, in proportion to the time that is in each."""
        last = self._bin_of(begin_s + length_s)
        first = self._bin_of(begin_s)
        for place in range(first, last + 1):
            share = 1.0
            if first < last:
                inside_s = min(begin_s + length_s, (place + 1) * self._bin_s) - max(begin_s, place * self._bin_s)
                share = max(inside_s, 0.0) / length_s
            for bins, amount in zip(targets, amounts, strict=True):
                bins[place] += share * amount

    def part(self, begin: float, end: float, columns: int) -> dict[str, list[Any]]:
        """Return for each column the percentages of the phases, and what of the processor, memory and network."""
        found: dict[str, list[Any]] = {name: [] for name in (*PHASES, "cpu", "memory", "sent")}
        if self._ages:
            found |= {"age": [], "highest_age": []}
        width = (end - begin) / columns
        for column in range(columns):
            left = begin + column * width
            first = min(int(left / self._bin_s), self._num_bins - 1)
            last = min(max(math.ceil((left + width) / self._bin_s - 1e-9), first + 1), self._num_bins)
            covered_s = (last - first) * self._bin_s
            for name, bins in zip(PHASES, self._phases, strict=True):
                found[name].append(min(round(100 * sum(bins[first:last]) / covered_s), 100))
            known_s = sum(self._known[first:last])
            for name, bins in self._used.items():
                found[name].append(round(sum(bins[first:last]) / known_s, 4) if known_s > 0 else None)
            found["memory"].append(max(self._memory[first:last]) or None)
            if self._ages:
                count, total = (sum(bins[first:last]) for bins in self._ages)
                found["age"].append(round(total / count, 3) if count else None)
                found["highest_age"].append(max(self._highest_age[first:last]) if count else None)
        return found


class Lanes:
    """The lanes of all members of a run."""

    def __init__(self) -> None:
        self._lanes: dict[str, Lane] = {}

    def take(self, member: str, lines: list[Line], place: Callable[[float], float]) -> None:
        for line in lines:
            self._lane(member).take(line, place)
            at_s = place((line.origin_us + line.offset_us + line.until) / 1e6)
            for worker, (count, total, highest) in line.ages.items():
                self._lane(in_words(printable(worker))).take_ages(at_s, count, total, highest)

    def bytes_sent(self) -> int:
        """Return what all members have given to sockets since their first lines."""
        return int(sum(lane.bytes_sent for lane in self._lanes.values()))

    def _lane(self, member: str) -> Lane:
        if member not in self._lanes:
            if len(self._lanes) >= _MOST_LANES:
                return Lane(1)  # of a damaged file, which names more workers than there are
            self._lanes[member] = Lane(_NUM_BINS if len(self._lanes) < _NUM_FIRST else _NUM_FEW_BINS)
        return self._lanes[member]

    def part(self, begin: float, end: float, columns: int) -> Mapping[str, Any]:
        """Return what every member did from `begin` to `end`: lists of one value for each of so many columns."""
        columns = max(1, min(columns, _MOST_CELLS // max(1, len(self._lanes))))
        if end <= begin:
            end = begin + 1e-3
        members = {name: lane.part(begin, end, columns) for name, lane in self._lanes.items()}
        return {"columns": columns, "members": members}
