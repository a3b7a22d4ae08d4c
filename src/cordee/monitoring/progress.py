"""Progress for the person who waits: a header, a bar that moves, a line per evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import SupportsFloat

from rich.console import Console

from cordee.core.errors import StorageError
from cordee.monitoring import wording
from cordee.monitoring.events import Event
from cordee.monitoring.files import reason
from cordee.monitoring.screens import choose_screen
from cordee.monitoring.tracker import Tracker


class ProgressSink:
    """Shows a run on a console: a live bar on a terminal and in a notebook, plain lines elsewhere.

    Everything it needs comes with the events; `Monitor.progress` moves the bar in between. The bar is gone
    after `run_ended` or `close`. Raises `StorageError` when the console is gone (a closed terminal or pipe),
    so that the monitor leaves it out and training goes on.
    """

    def __init__(self, console: Console, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._screen = choose_screen(console)
        self._tracker: Tracker | None = None

    def emit(self, event: Event) -> None:
        self._guarded(lambda: self._render(event))

    def refresh(self, step: int, loss: SupportsFloat | None) -> None:
        """Show that `step` optimizer steps are done."""
        tracker = self._tracker
        if tracker is None:
            return
        now_s = self._clock_s()
        tracker.advance(step, loss, now_s)
        self._guarded(lambda: self._screen.show(tracker.view(now_s)))

    def close(self) -> None:
        """Take the bar away. May be called again."""
        self._tracker = None
        self._guarded(self._screen.close)

    def _render(self, event: Event) -> None:
        fields, now_s, tracker = event.fields, self._clock_s(), self._tracker
        if event.type == "run_started":
            self._tracker = Tracker(fields, now_s)
            first, *others = wording.header_lines(fields)
            self._screen.line(first, "bold")
            for line in others:
                self._screen.line(line)
        elif event.type == "warning":
            self._screen.line(f"warning: {fields.get('message', '')}", "yellow")
        elif event.type == "plan":
            self._screen.line(wording.plan_line(fields))
        elif event.type == "run_ended":
            self.close()
        elif tracker is None:
            return
        elif event.type == "step":
            tracker.note_epoch(fields.get("epoch"))
            tracker.loss = fields.get("loss", tracker.loss)
        elif event.type == "checkpoint":
            tracker.pause(fields.get("stall_s") or 0.0, now_s)
        elif event.type == "evaluation":
            tracker.pause(fields.get("seconds") or 0.0, now_s)
            tracker.test_accuracy = fields.get("test_accuracy")
            elapsed_s = tracker.elapsed_s(now_s)
            self._screen.line(wording.evaluation_line(fields, tracker.loss, elapsed_s, self._screen.width))

    def _guarded(self, draw: Callable[[], None]) -> None:
        try:
            draw()
        except (OSError, SystemExit) as error:  # rich turns a broken pipe into SystemExit
            self._tracker = None
            detail = reason(error) if isinstance(error, OSError) else "broken pipe"
            raise StorageError(f"cannot write to the console: {detail}; progress is not shown any more") from error
