"""The states of the members of a run on the axis of time, from its events and from what members record themselves."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from cordee.monitoring.timeline import Line

_PREPARING = ("starting", "loading", "joining")
_MOST_SPANS = 2000  # of a member; the newest


class Span(msgspec.Struct):
    """A member in one state; `end` is None as long as it lasts."""

    state: str  # "up", "starting", "loading", "joining", "frozen", "lost"
    begin: float
    end: float | None = None


class MemberStates:
    """The states of one member. Times are seconds of the run."""

    def __init__(self) -> None:
        self._known: list[Span] = []  # by the events
        self._own: list[Span] = []  # by its timeline
        self.num_losses = 0

    @property
    def spans(self) -> list[Span]:
        """The states in the order of their beginnings. What a member says itself lies above that it is up."""
        return sorted([*self._known, *self._own], key=lambda span: span.begin)

    @property
    def is_down(self) -> bool:
        return bool(self._known) and self._known[-1].end is None and self._known[-1].state == "lost"

    def start(self, at: float) -> bool:
        """The member has a process from now on; return whether it is one in place of another that was lost."""
        has_returned = self.is_down
        self._change("up", at)
        return has_returned

    def lose(self, at: float, frozen_s: float = 0.0) -> None:
        """The member is lost from now on, and was frozen for `frozen_s` before."""
        self.num_losses += 1
        if frozen_s:
            self._change("frozen", max(at - frozen_s, self._known[-1].begin if self._known else 0.0))
        self._change("lost", at)

    def end(self, at: float) -> None:
        """The member has left in order, or the run has ended."""
        self._change("", at)
        self._enter("ended", at)

    def _change(self, state: str, at: float) -> None:
        if self._known and self._known[-1].end is None:
            self._known[-1].end = at
        if state:
            self._known.append(Span(state, at))
            del self._known[:-_MOST_SPANS]

    def take(self, line: Line, second_of: Callable[[float], float]) -> None:
        """Add the states that the member has recorded."""
        for at_us, state in line.states:
            self._enter(state, second_of((line.origin_us + line.offset_us + at_us) / 1e6))

    def _enter(self, state: str, at: float) -> None:
        if self._own and self._own[-1].end is None:
            self._own[-1].end = max(at, self._own[-1].begin)
        if state in _PREPARING:
            self._own.append(Span(state, at))
            del self._own[:-_MOST_SPANS]
