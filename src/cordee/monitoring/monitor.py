"""What happens in a run, as a stream of events handed to sinks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, SupportsFloat, runtime_checkable

from cordee.core.errors import StorageError
from cordee.monitoring.events import AnyEvent, Warned, stamp
from cordee.monitoring.timeline import Timeline

# At most 5 redraws a second, and fewer when they are slow: a redraw takes 0.3 ms in a loop of its own, but
# 0.7 ms between training steps that empty the caches, and more on a busy host or a slow terminal.
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.2, 1.0
_WAIT_PER_REDRAW = 400  # times the last redraw: 0.25 % of the time

_log = logging.getLogger("cordee.monitoring")


class Sink(Protocol):
    """Takes events. `emit` raises `StorageError` when it cannot continue, and is not called again."""

    def emit(self, event: AnyEvent) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class ProgressDisplay(Sink, Protocol):
    """A sink that also shows where training is between two events."""

    def refresh(self, step: int, loss: SupportsFloat | None) -> None: ...


class Monitor:
    """Hands each event to all sinks, from any thread, in one order.

    A sink that cannot write any more is closed and left out from then on; the others get a `warning` event, and
    training continues. `member` names the process in the events that come from it; `timeline` records its phases.
    """

    def __init__(self, sinks: Sequence[Sink], member: str = "", timeline: Timeline | None = None) -> None:
        self.timeline = timeline or Timeline()
        self._sinks = list(sinks)
        self._member = member
        # Re-entrant: a signal handler may emit while the thread it interrupted is emitting.
        self._lock = threading.RLock()
        self._displays = [sink for sink in self._sinks if isinstance(sink, ProgressDisplay)]
        self._next_refresh_s = 0.0 if self._displays else float("inf")

    def add(self, sink: Sink) -> None:
        """Hand events to another sink as well, from now on."""
        self._sinks.append(sink)

    def emit(self, event: AnyEvent) -> None:
        """Hand an event to every sink, with its origin: this process and the time now, unless it brings its own."""
        event = stamp(event, self._member)
        with self._lock:
            for sink in tuple(self._sinks):
                if sink not in self._sinks:
                    continue  # dropped by a nested warning
                try:
                    sink.emit(event)
                except StorageError as error:
                    self._drop(sink, error)

    def progress(self, step: int, loss: SupportsFloat | None = None) -> None:
        """Show where training is; meant to be called after every step (about 1 µs when nothing is due).

        A tensor may be given as `loss`: it is read only when the screen is redrawn. Nothing is recorded.
        """
        now = time.monotonic()
        if now < self._next_refresh_s:
            return
        with self._lock:
            for display in tuple(self._displays):
                try:
                    display.refresh(step, loss)
                except StorageError as error:
                    self._drop(display, error)
            if self._displays:
                end = time.monotonic()
                wait_s = _WAIT_PER_REDRAW * (end - now)
                self._next_refresh_s = end + min(max(wait_s, _SHORTEST_WAIT_S), _LONGEST_WAIT_S)

    def close(self) -> None:
        """Close all sinks. May be called again."""
        self.timeline.close()
        with self._lock:
            sinks, self._sinks, self._displays = self._sinks, [], []
            self._next_refresh_s = float("inf")
            problems = []
            for sink in reversed(sinks):
                try:
                    sink.close()
                except StorageError as error:
                    problems.append(error)
        for problem in problems:
            _log.warning("%s", problem)

    def _drop(self, sink: Sink, error: StorageError) -> None:
        self._sinks.remove(sink)
        self._displays = [display for display in self._displays if display is not sink]
        if not self._displays:
            self._next_refresh_s = float("inf")
        _log.warning("%s", error)
        try:
            sink.close()
        except StorageError as second:
            _log.warning("%s", second)
        self.emit(Warned(message=str(error)))

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
