"""The three places progress is shown in: a terminal, a notebook, and a log without either."""

from __future__ import annotations

from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from cordee.monitoring import wording
from cordee.monitoring.tracker import View

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
