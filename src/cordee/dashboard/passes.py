"""The passes of micro-batches through the stages of a pipeline, in the newest step that all of its members recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cordee.core.passes import PassKind
from cordee.monitoring.timeline import Line, StepPasses

_MOST_STEPS = 32  # that are kept: members write the passes of a step a second apart
_MOST_MEMBERS = 16  # that are shown
_KINDS = {kind.value: kind.name.lower() for kind in PassKind}

Row = tuple[str, int, int, float, float]  # kind, stage, micro-batch, begin and length in seconds


class SampledPasses:
    """Takes the lines of all members."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[str, list[Row]]] = {}

    def take(self, member: str, lines: list[Line], place: Callable[[float], float]) -> None:
        """Add the passes of a member; `place` returns the second of the run of a moment since 1970."""
        for line in lines:
            for passes in line.passes:
                zero_us = line.origin_us + line.offset_us
                self._steps.setdefault(passes.step, {})[member] = _rows(passes, zero_us, place)
        for step in sorted(self._steps)[:-_MOST_STEPS]:
            del self._steps[step]

    @property
    def has_any(self) -> bool:
        return any(any(members.values()) for members in self._steps.values())

    def newest(self) -> dict[str, Any] | None:
        """Return the newest step of which most members recorded passes, with its bubble; None without any."""
        if not self._steps:
            return None
        most = max(len(members) for members in self._steps.values())
        step = max(step for step, members in self._steps.items() if len(members) == most)
        members = {name: rows for name, rows in sorted(self._steps[step].items(), key=_by_number) if rows}
        if not members:
            return None
        begin = min(row[3] for rows in members.values() for row in rows)
        end = max(row[3] + row[4] for rows in members.values() for row in rows)
        return {
            "step": step,
            "begin": begin,
            "seconds": end - begin,
            "bubble": bubble(members),
            "theory": bubble_in_theory(members),
            "num_members": len(members),
            "members": dict(list(members.items())[:_MOST_MEMBERS]),
        }


def _by_number(item: tuple[str, list[Row]]) -> tuple[str, int]:
    role, _, number = item[0].rpartition(" ")
    return role, int(number) if number.isdecimal() else 0


def _rows(passes: StepPasses, zero_us: int, place: Callable[[float], float]) -> list[Row]:
    columns = (passes.kind, passes.stage, passes.microbatch, passes.at, passes.spent)
    if not all(columns):
        return []
    shift_s = place((zero_us + passes.at[0]) / 1e6) - passes.at[0] / 1e6
    return [
        (_KINDS[kind], stage, microbatch, at / 1e6 + shift_s, spent / 1e6)
        for kind, stage, microbatch, at, spent in zip(*columns, strict=False)
        if kind in _KINDS
    ]


def bubble(members: dict[str, list[Row]]) -> float | None:
    """Return the share of the time, from the first pass to the last, in which members computed none. Pure."""
    begin = min(row[3] for rows in members.values() for row in rows)
    end = max(row[3] + row[4] for rows in members.values() for row in rows)
    if end <= begin:
        return None
    busy = sum(row[4] for rows in members.values() for row in rows)
    return max(0.0, 1.0 - busy / (len(members) * (end - begin)))


def bubble_in_theory(members: dict[str, list[Row]]) -> dict[str, Any] | None:
    """Return the bubble of passes that are all equally long, and what it follows from. Pure.

    None where it is not known: with a backward pass in two halves it depends on the order that was found for them.
    """
    rows = [row for each in members.values() for row in each]
    if any(row[0] == "weights" for row in rows):
        return None
    parts = {frozenset(row[1] for row in each) for each in members.values()}  # the stages of each worker of a pipeline
    num_stages = len(frozenset().union(*parts))
    first = next(iter(members.values()))
    forwards = [row for row in first if row[0] == "forward"]
    own = len({row[1] for row in forwards}) or 1
    microbatches, workers = len(forwards) // own, len(parts)
    if not microbatches or own * workers != num_stages:
        return None
    return {
        "workers": workers,
        "stages": num_stages,
        "microbatches": microbatches,
        "bubble": (workers - 1) / (own * microbatches + workers - 1),
    }
