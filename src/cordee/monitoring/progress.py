"""Progress for the person who waits: a header, a bar that moves, a line per evaluation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Protocol, SupportsFloat

from rich.console import Console
from rich.live import Live
from rich.text import Text

from cordee.core.errors import StorageError
from cordee.monitoring import wording
from cordee.monitoring.events import (
    AnyEvent,
    Balance,
    Checkpoint,
    EngineOpened,
    Evaluation,
    Fetched,
    Generation,
    Kernels,
    Logged,
    Picture,
    Plan,
    RunEnded,
    RunStarted,
    Step,
    Uploading,
    Warned,
    WorkerStarted,
)
from cordee.monitoring.files import reason
from cordee.monitoring.wording import View


class ProgressSink:
    """Shows a run on a console: a live bar on a terminal and in a notebook, plain lines elsewhere.

    Everything it needs comes with the events; `Monitor.progress` moves the bar in between. The bar is gone
    after `run_ended` or `close`. Raises `StorageError` when the console is gone (a closed terminal or pipe),
    so that the monitor leaves it out and training continues.
    """

    def __init__(self, console: Console, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._screen = choose_screen(console)
        self._tracker: Tracker | None = None
        self._next_logged_s = 0.0
        self._before: list[AnyEvent] = []  # of the team, until the run begins

    def emit(self, event: AnyEvent) -> None:
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

    def _render(self, event: AnyEvent) -> None:
        now_s, tracker = self._clock_s(), self._tracker
        if tracker is not None:
            tracker.team.take(event)
        elif isinstance(event, WorkerStarted | Generation):
            self._before.append(event)
        if isinstance(event, RunStarted):
            self._tracker = tracker = Tracker(event, now_s)
            for early in self._before:  # workers may be there before training begins
                tracker.team.take(early)
            self._before.clear()
            first, *others = wording.header_lines(event)
            self._screen.line(first, "bold")
            for line in others:
                self._screen.line(line)
        elif isinstance(event, Warned):
            self._screen.line(f"warning: {event.message}", "yellow")
        elif isinstance(event, Balance):
            self._screen.line(f"shares of the batch by speed: {', '.join(map(str, event.shares))} samples")
        elif isinstance(event, EngineOpened):
            self._screen.line(f"engine: {event.description}")
        elif isinstance(event, Kernels):
            self._screen.line(f"kernels: {event.reason}")
        elif isinstance(event, Plan):
            self._screen.line(wording.plan_line(event))
        elif isinstance(event, Fetched):
            self._screen.line(f"step-{event.step} was brought from {event.path}")
        elif isinstance(event, Logged):
            if now_s >= self._next_logged_s:  # at most one line a second: a callback may log at every step
                self._next_logged_s = now_s + 1.0
                self._screen.line(wording.logged_line(event))
        elif isinstance(event, Picture):
            self._screen.line(f"step {event.step}  picture {event.name}")
        elif isinstance(event, Uploading):
            self._screen.line(wording.uploading_line(event))
        elif isinstance(event, RunEnded):
            self.close()
        elif tracker is None:
            return
        elif isinstance(event, Step):
            tracker.record_epoch(event.epoch)
            tracker.loss = event.loss
        elif isinstance(event, Checkpoint):
            tracker.pause(event.stall_s, now_s)
        elif isinstance(event, Evaluation):
            tracker.pause(event.seconds or 0.0, now_s)
            tracker.test_accuracy = event.test_accuracy
            elapsed_s = tracker.elapsed_s(now_s)
            line = wording.evaluation_line(
                event, tracker.loss, elapsed_s, self._screen.width, has_rounds=tracker.has_rounds
            )
            self._screen.line(line)

    def _guarded(self, draw: Callable[[], None]) -> None:
        try:
            draw()
        except (OSError, SystemExit) as error:  # rich turns a broken pipe into SystemExit
            self._tracker = None
            detail = reason(error) if isinstance(error, OSError) else "broken pipe"
            raise StorageError(f"cannot write to the console: {detail}; progress is not shown any more") from error


# Where training is and how long it will take: numbers only, the clock is given.

# The speed shown is a mean over about this long, so that it neither jitters nor lags.
_SMOOTHING_S = 5.0


class Tracker:
    """Follows one run from its start on."""

    def __init__(self, run: RunStarted, now_s: float) -> None:
        self.total_steps = run.total_steps
        self._stop_steps = run.stop_steps  # where a rule ends the run, if that is sooner
        self.epochs = run.epochs
        self.test_accuracy: float | None = None
        self.loss: float | None = None
        self.step = run.start_step
        self._start_step, self._started_s = self.step, now_s
        self.has_rounds = run.clients is not None
        self._batch_size = None if self.has_rounds else run.batch_size  # of a round the samples are not known here
        self._epoch: int | None = None
        self._steps_per_second: float | None = None
        self._anchor_step, self._anchor_s = self.step, now_s
        self._paused_s = 0.0
        self.team = wording.TeamCount(run.workers)

    def advance(self, step: int, loss: SupportsFloat | None, now_s: float) -> None:
        """Record that `step` optimizer steps are done."""
        self.step = step
        if loss is not None:
            self.loss = float(loss)
        passed_s = now_s - self._anchor_s
        if step > self._anchor_step and passed_s > 0:
            speed = (step - self._anchor_step) / passed_s
            weight = 1.0 - math.exp(-passed_s / _SMOOTHING_S)
            before = self._steps_per_second
            self._steps_per_second = speed if before is None else before + weight * (speed - before)
            self._anchor_step, self._anchor_s = step, now_s

    def pause(self, seconds: float, now_s: float) -> None:
        """Leave `seconds` just spent on something else (an evaluation, a checkpoint) out of the speed."""
        self._paused_s += seconds
        self._anchor_s = min(self._anchor_s + seconds, now_s)

    def record_epoch(self, epoch: int | None) -> None:
        self._epoch = epoch if epoch is not None else self._epoch

    def elapsed_s(self, now_s: float) -> float:
        return now_s - self._started_s

    def view(self, now_s: float) -> View:
        speed = self._steps_per_second
        has_speed = speed is not None and self._batch_size is not None
        return View(
            step=self.step,
            total_steps=self.total_steps,
            epoch=self._current_epoch(),
            epochs=self.epochs,
            loss=self.loss,
            test_accuracy=self.test_accuracy,
            samples_per_second=speed * self._batch_size if has_speed else None,  # type: ignore[operator]
            left_s=self._left_s(),
            elapsed_s=self.elapsed_s(now_s),
            team=self.team.describe(),
            has_rounds=self.has_rounds,
        )

    def _left_s(self) -> float | None:
        ends = [end for end in (self.total_steps, self._stop_steps) if end is not None]
        if not ends or not self._steps_per_second:
            return None
        steps_left = max(min(ends) - self.step, 0)
        paused_s_per_step = self._paused_s / max(self.step - self._start_step, 1)
        return steps_left * (1.0 / self._steps_per_second + paused_s_per_step)

    def _current_epoch(self) -> int | None:
        if not self.total_steps or not self.epochs:
            return self._epoch
        # The steps of an epoch follow from the totals; the last event may be from the epoch before.
        return min(self.epochs, max(self.step - 1, 0) * self.epochs // self.total_steps + 1)


# The three places progress is shown in: a terminal, a notebook, and a log without either.

# Lines of a log: every 10 s at first, every minute in long runs, and at each tenth of a shorter run.
_LOG_EVERY_S, _LOG_EVERY_S_LATER, _LATER_S = 10.0, 60.0, 1800.0
_LOG_TENTH_AFTER_S = 1.0


class Screen(Protocol):
    """Lines that stay, and one place that changes."""

    @property
    def width(self) -> int | None: ...  # columns a line should fit into, if any

    def line(self, text: str, style: str = "") -> None: ...

    def show(self, view: View) -> None: ...

    def close(self) -> None: ...


def choose_screen(console: Console) -> Screen:
    """Return the kind of screen that `console` writes to."""
    if console.is_jupyter:
        return NotebookScreen()
    if console.is_terminal and console.is_interactive:
        return TerminalScreen(console)
    return LogScreen(console)


class TerminalScreen:
    """A bar at the bottom, redrawn by the caller; lines, and what the program prints, go above it.

    No thread of its own: it would take the interpreter from the training loop at any moment.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._is_ascii = not _is_unicode(console)
        self._live: Live | None = None

    @property
    def width(self) -> int:
        return self._console.width - 1

    def line(self, text: str, style: str = "") -> None:
        self._console.print(Text(_encodable(text, self._console), style), soft_wrap=True)

    def show(self, view: View) -> None:
        # Three columns stay free for the '^C' a terminal echoes: a wrapped bar would leave its upper half behind.
        bar = wording.bar(view, max(self._console.width - 3, 10), is_ascii=self._is_ascii)
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
            # The cursor stays visible, so that no way to die can leave a terminal without one.
            self._console.show_cursor(True)
        self._live.update(bar, refresh=True)

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()


class NotebookScreen:
    """One output of a notebook cell, replaced as a whole. Needs nothing but IPython."""

    width: int | None = None

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._bar = ""
        self._display: Any = None

    def line(self, text: str, style: str = "") -> None:
        self._lines.append(text)
        self._draw()

    def show(self, view: View) -> None:
        self._bar = wording.bar(view, 100).plain
        self._draw()

    def close(self) -> None:
        if self._bar:
            self._bar = ""
            self._draw()

    def _draw(self) -> None:
        from IPython.display import display  # in a notebook it is there

        content = {"text/plain": "\n".join([*self._lines, *([self._bar] if self._bar else [])])}
        if self._display is None:
            self._display = display(content, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._display.update(content, raw=True)


class LogScreen:
    """Lines only, and few of them."""

    width: int | None = None

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last_s = 0.0
        self._last_step: int | None = None  # None: count from the next one shown

    def line(self, text: str, style: str = "") -> None:
        self._last_step = None  # no step line right after a line of another kind
        self._console.print(Text(_encodable(text, self._console)), soft_wrap=True)

    def show(self, view: View) -> None:
        if self._last_step is None:
            self._last_s, self._last_step = view.elapsed_s, view.step
        passed_s = view.elapsed_s - self._last_s
        every_s = _LOG_EVERY_S if view.elapsed_s < _LATER_S else _LOG_EVERY_S_LATER
        is_tenth = bool(view.total_steps) and view.step - self._last_step >= (view.total_steps or 0) / 10
        if passed_s >= every_s or (is_tenth and passed_s >= _LOG_TENTH_AFTER_S):
            self.line(wording.step_line(view))
            self._last_s, self._last_step = view.elapsed_s, view.step

    def close(self) -> None:
        pass


def _is_unicode(console: Console) -> bool:
    return console.encoding.lower().replace("-", "").startswith("utf")


def _encodable(text: str, console: Console) -> str:
    return text.encode(console.encoding, "replace").decode(console.encoding)
