"""`cordee watch`: one run on the whole terminal, as it goes. Reads the run directory and changes nothing."""

from __future__ import annotations

import math
import time
from collections import deque
from pathlib import Path
from typing import ClassVar

from rich.table import Table
from rich.text import Text

from cordee.core.errors import MissingExtraError, RunDirectoryError
from cordee.monitoring import RunInfo, events, follow, inspect_run
from cordee.monitoring.happened import describe
from cordee.monitoring.merged_logs import printable
from cordee.monitoring.overview import CHUNK_BYTES, OverviewBuilder, describe_overview
from cordee.monitoring.wording import TeamCount, clock, number, percent, plural, quantity

try:
    from textual.app import App, ComposeResult
    from textual.binding import Binding, BindingType
    from textual.containers import Horizontal, VerticalScroll
    from textual.widgets import Footer, ProgressBar, RichLog, Sparkline, Static
except ImportError:
    raise MissingExtraError("cordee watch", "watch") from None

_LOOK_EVERY_S = 0.5
_READING_S = 0.2  # for which one look reads on: the screen stays alive while a long run is read
_MOST_POINTS = 2000  # of a curve; more are thinned out
_NOT_SHOWN = ("run", "files", "state", "time")  # of the facts: they are elsewhere on the screen


class Curve:
    """The last values of a run in bounded memory: every second one is dropped when there are too many."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.last: float | None = None  # also where it is none of those that are kept
        self._every, self._count = 1, 0

    def append(self, value: float | None) -> None:
        if value is None:
            return
        self.last = value
        if self._count % self._every == 0:
            self.values.append(value)
            if len(self.values) > _MOST_POINTS:
                self.values, self._every = self.values[::2], 2 * self._every
        self._count += 1


def on_a_scale(values: list[float]) -> list[float]:
    """Return values as bars show them: by their powers where the highest is far above the lowest."""
    if values and min(values) > 0 and max(values) > 100 * min(values):
        return [math.log10(value) for value in values]
    return values


class Watched:
    """What the screen shows of one run, read from its events. No terminal is needed."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.facts = OverviewBuilder()
        self.loss, self.accuracy, self.rate = Curve(), Curve(), Curve()
        self.happened: deque[str] = deque(maxlen=500)  # not yet on the screen
        self.team = TeamCount(1)
        self.step, self.total_steps = 0, 0
        self.info = _inspect(run)
        self._offset = 0
        self._last: tuple[float, int] | None = None
        self.left_s: float | None = None
        self._has_ended = False

    def read(self, budget_s: float = _READING_S) -> bool:
        """Read what is new for about so long; return whether there is more. Raises RunDirectoryError."""
        deadline_s = time.monotonic() + budget_s
        while time.monotonic() < deadline_s:
            found, offset = follow(self.run, self._offset, CHUNK_BYTES)
            for event in found:
                self.facts.take(event)
                if not isinstance(event, events.UnreadableLine):
                    self._take(event)
            if offset == self._offset:
                self.info = _inspect(self.run)
                return False
            self._offset = offset
        return True

    def rows(self) -> list[tuple[str, str]]:
        return [
            (label, printable(value))
            for label, value in describe_overview(self.facts.build(self.info))
            if label not in _NOT_SHOWN
        ]

    def title(self) -> str:
        team = self.team.describe() if not self._has_ended else ""
        left = f"{clock(self.left_s)} left" if self.left_s is not None and self.info.state == "running" else ""
        return "  ".join(part for part in (self.info.state, f"workers {team}" if team else "", left) if part)

    def _take(self, event: events.AnyEvent) -> None:
        if isinstance(event, events.RunStarted):
            self.team = TeamCount(event.workers)
            self.total_steps, self.step = event.total_steps or 0, event.start_step
            self._last = None
        self.team.take(event)
        self._has_ended = isinstance(event, events.RunEnded)
        match event:
            case events.Step():
                self.loss.append(event.loss)
                self.rate.append(event.samples_per_second)
                self._measure(event.time, event.step)
            case events.Evaluation():
                self.accuracy.append(event.test_accuracy)
                result = percent(event.test_accuracy) or f"loss {number(event.test_loss)}"
                self._say(event, f"step {event.step}: test {result}")
            case events.Round():
                self.loss.append(event.loss)
                self._measure(event.time, event.round)
                self._say(event, f"round {event.round}: {event.num_took_part} of {plural(event.num_asked, 'client')}")
            case events.RunEnded():
                self.step = max(self.step, event.steps)  # the last steps have no event of their own
        if (happened := describe(event)) is not None:
            self._say(event, ("warning: " if happened.kind == "warning" else "") + happened.text)

    def _measure(self, time_s: float, step: int) -> None:
        """Take the time that is left from the last two events of steps, or of rounds."""
        self.step = step
        if self._last is not None and step > self._last[1] and time_s > self._last[0]:
            per_step_s = (time_s - self._last[0]) / (step - self._last[1])
            self.left_s = per_step_s * max(self.total_steps - step, 0) if self.total_steps else None
        self._last = (time_s, step)

    def _say(self, event: events.AnyEvent, text: str) -> None:
        self.happened.append(f"{time.strftime('%H:%M:%S', time.localtime(event.time))}  {printable(text)}")


def _inspect(run: Path) -> RunInfo:
    info = inspect_run(run) if run.is_dir() else None
    if info is None:
        raise RunDirectoryError(f"{run} is not a run directory: it has no job.toml")
    return info


class WatchApp(App[None]):
    """The screen: progress, facts and curves, and what happened."""

    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("d", "toggle_dark", "Light or dark"),
    ]
    CSS = """
    ProgressBar { padding: 0 1; }
    #name { padding: 0 1; text-style: bold; }
    #state { padding: 0 1; }
    #bar Bar { width: 1fr; }
    #bar { width: 1fr; }
    #upper { height: auto; max-height: 60%; }
    #facts { width: 1fr; height: auto; padding: 0 1; }
    #curves { width: 1fr; height: auto; padding: 0 1; }
    Sparkline { height: 2; margin-bottom: 1; }
    #happened { overflow-x: hidden; scrollbar-size-vertical: 1; height: 1fr; border-top: solid $primary; padding: 0 1; }
    """

    def __init__(self, run: Path) -> None:
        super().__init__()
        self._watched = Watched(run)

    def compose(self) -> ComposeResult:
        yield Static(id="name", markup=False)
        yield Static(id="state", markup=False)
        yield ProgressBar(id="bar", show_eta=False)
        with Horizontal(id="upper"):
            yield Static(id="facts", markup=False)
            with VerticalScroll(id="curves"):
                for name in ("loss", "accuracy", "rate"):
                    yield Static(id=f"{name}-text", markup=False)
                    yield Sparkline([], id=name)
        yield RichLog(id="happened", wrap=True, markup=False, highlight=False, max_lines=1000, min_width=20)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#name", Static).update(self._watched.run.resolve().name)
        self.look()
        self.set_interval(_LOOK_EVERY_S, self.look)

    def action_toggle_dark(self) -> None:
        self.theme = "textual-light" if self.theme != "textual-light" else "textual-dark"

    def look(self) -> None:
        """Read what is new and show it; a run that cannot be read any more is reported on the screen."""
        watched = self._watched
        if not self.query("#state"):  # the screen is being closed, and the timer has not heard of it
            return
        try:
            is_behind = watched.read()
        except RunDirectoryError as error:
            self.query_one("#state", Static).update(str(error))
            return
        state = "reading the events of this run" if is_behind else watched.title()
        self.query_one("#state", Static).update(state)
        self.query_one("#bar", ProgressBar).update(total=watched.total_steps or None, progress=watched.step)
        facts = Table.grid(padding=(0, 1))
        for label, value in watched.rows():
            facts.add_row(Text(label), Text(value))
        self.query_one("#facts", Static).update(facts)
        texts = {
            "loss": f"training loss {number(watched.loss.last)}" if watched.loss.values else "",
            "accuracy": f"test accuracy {percent(watched.accuracy.last)}" if watched.accuracy.values else "",
            "rate": f"{quantity(watched.rate.last)} samples/s" if watched.rate.last is not None else "",
        }
        for name, text in texts.items():
            self.query_one(f"#{name}-text", Static).update(text)
            self.query_one(f"#{name}-text", Static).display = bool(text)
            line = self.query_one(f"#{name}", Sparkline)
            values = getattr(watched, name).values
            line.data = on_a_scale(values) if name == "loss" else values
            line.display = bool(text)
        log = self.query_one("#happened", RichLog)
        while watched.happened:
            log.write(watched.happened.popleft())


def watch_run(run: Path) -> None:
    """Show a run until the person quits. Raises RunDirectoryError for what is no run."""
    WatchApp(run).run()
