"""Curves of any length in little memory: any part of them in as many points as the screen has columns."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cordee.monitoring import events as kinds
from cordee.monitoring.files import open_regular
from cordee.monitoring.run_directory import EVENTS_FILE

_SPARKS = 40  # points of a sparkline
_WITH_LOSS = (b'{"type":"step"', b'{"type":"round"')
_SPARK_BYTES = 4096  # that are read for each
_MOST_SPARKLINES = 1000  # that are kept
_BLOCK = 64  # points whose extremes are kept beside them


class Points(NamedTuple):
    """A part of a curve; each is a list as long as the others."""

    x: list[float]
    low: list[float]
    high: list[float]


class Curve:
    """Values over seconds that only grow. Appending and asking for a part take time in proportion to what is shown."""

    def __init__(self) -> None:
        self._values = array("f")
        self._lows = array("f")  # of whole blocks
        self._highs = array("f")
        self._x = array("d")

    def __len__(self) -> int:
        return len(self._x)

    @property
    def first(self) -> float | None:
        """Where the curve begins."""
        return self._x[0] if self._x else None

    def append(self, x: float, value: float | None) -> None:
        """Add a point; what is no number is left out. A time that goes back counts as the time before."""
        if value is None or not math.isfinite(value):
            return
        self._x.append(max(x, self._x[-1]) if self._x else x)
        self._values.append(value)
        if len(self._values) % _BLOCK == 0:
            block = self._values[-_BLOCK:]
            self._lows.append(min(block))
            self._highs.append(max(block))

    def part(self, begin: float, end: float, columns: int) -> Points:
        """Return the points from `begin` to `end`, as the lowest and highest of each of so many equal parts."""
        first, last = bisect_left(self._x, begin), bisect_right(self._x, end)
        if last - first <= 2 * columns:
            values = self._values[first:last].tolist()
            return Points(self._x[first:last].tolist(), values, values)
        found = Points([], [], [])
        width = (end - begin) / columns
        place = first
        for column in range(columns):
            edge = bisect_right(self._x, begin + (column + 1) * width, place, last) if column < columns - 1 else last
            if edge > place:
                low, high = self._extremes(place, edge)
                found.x.append(begin + (column + 0.5) * width)
                found.low.append(low)
                found.high.append(high)
            place = edge
        return found

    def _extremes(self, first: int, last: int) -> tuple[float, float]:
        begin, end = -(-first // _BLOCK), last // _BLOCK
        if begin >= end:
            values = self._values[first:last]
            return min(values), max(values)
        edges: Sequence[float] = [*self._values[first : begin * _BLOCK], *self._values[end * _BLOCK : last]]
        return min([*edges, *self._lows[begin:end]]), max([*edges, *self._highs[begin:end]])


class Sparklines:
    """The losses of runs at a glance: a few lines of each file, as far from each other as the file is long."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[int, list[float]]] = {}

    def of(self, run: Path) -> list[float]:
        """Return some losses of a run, in their order; none where they cannot be read."""
        try:
            with open_regular(run / EVENTS_FILE) as file:
                size = file.seek(0, 2)
                known = self._known.get(run)
                if known is not None and known[0] == size:
                    return known[1]
                losses = []
                for place in range(_SPARKS + 1):
                    file.seek(max(size * place // _SPARKS - (_SPARK_BYTES if place == _SPARKS else 0), 0))
                    losses += _first_loss(file.read(_SPARK_BYTES), is_last=place == _SPARKS)
        except OSError:
            return []
        if len(self._known) >= _MOST_SPARKLINES:
            self._known.clear()
        self._known[run] = size, losses
        return losses


def _first_loss(content: bytes, *, is_last: bool) -> list[float]:
    """Return the loss of the first step or round, or of the last, of whole lines in a part of a file; at most one."""
    found = [kinds.decode_event(line) for line in content.split(b"\n")[:-1] if line.startswith(_WITH_LOSS)]
    losses = [event.loss for event in found if isinstance(event, kinds.Step | kinds.Round) and event.loss is not None]
    losses = [loss for loss in losses if math.isfinite(loss)]
    return losses[-1:] if is_last else losses[:1]
