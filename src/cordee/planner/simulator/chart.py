"""Outcomes of a simulation as charts: lines, dots and words, wherever they are drawn. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cordee.monitoring.wording import plural
from cordee.planner.simulator.crowd import ClusterOutcome
from cordee.planner.simulator.scenario import Scenario

WIDTH, HEIGHT = 720, 360  # of a chart
LEFT, RIGHT, TOP, BOTTOM = 80, 132, 40, 48
_COLOURS = ("#1f6fb2", "#c8553d", "#3a8f5c", "#7a5ba6")


class Line(NamedTuple):
    """A thin line across the chart."""

    x1: float
    x2: float
    y: float


class Curve(NamedTuple):
    """Points with a dot on each, and lines between them."""

    points: Sequence[tuple[float, float]]
    colour: str


class Word(NamedTuple):
    """A text on a base line."""

    x: float
    y: float
    text: str
    anchor: str  # start, middle or end: where in the text x is
    is_bold: bool = False
    colour: str = "#333"
    is_upright: bool = False  # read from below


Shape = Line | Curve | Word


def charts_of(scenario: Scenario, outcomes: Sequence[ClusterOutcome]) -> list[list[Shape]]:
    """Return where the workers' time goes, and how fast they are, over the number of workers."""
    outcomes = sorted(outcomes, key=lambda outcome: outcome.workers)
    shares = {
        "computing": [(o.workers, o.efficiency) for o in outcomes],
        "exchanging": [(o.workers, o.exchange_share) for o in outcomes],
        "idle": [(o.workers, o.idle_share) for o in outcomes],
    }
    if scenario.mtbf_s:
        shares["training kept"] = [(o.workers, o.effective_share) for o in outcomes]
    charts = [make_chart("Where the workers' time goes", "share of the time", shares, is_share=True)]
    moving = [outcome for outcome in outcomes if outcome.throughput > 0]  # failures may leave a large crowd nothing
    if len(moving) > 1:
        base = moving[0]
        speedup = {
            "simulated": [(o.workers, o.throughput / base.throughput) for o in moving],
            "without any loss": [(o.workers, o.workers / base.workers) for o in moving],
        }
        beside = f"times as fast as {plural(base.workers, 'worker')}"
        charts.append(make_chart("Speed", beside, speedup, is_share=False))
    return charts


def make_chart(
    title: str, height_means: str, series: Mapping[str, Sequence[tuple[float, float]]], *, is_share: bool
) -> list[Shape]:
    """Return lines over a logarithmic number of workers; shares have an axis from 0 to 100 %."""
    xs = sorted({x for points in series.values() for x, _ in points})
    top = 1.0 if is_share else max(y for points in series.values() for _, y in points)
    lowest = 0.0 if is_share else min(y for points in series.values() for _, y in points)

    def across(x: float) -> float:
        span = math.log2(xs[-1]) - math.log2(xs[0])
        return LEFT + (WIDTH - LEFT - RIGHT) * ((math.log2(x) - math.log2(xs[0])) / span if span else 0.5)

    def down(y: float) -> float:
        if is_share:
            part = y
        else:  # a speed-up is a straight line where both axes are logarithmic
            part = (math.log2(y) - math.log2(lowest)) / (math.log2(top) - math.log2(lowest) or 1.0)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * part

    ticks = [0.0, 0.25, 0.5, 0.75, 1.0] if is_share else _powers(lowest, top)
    shapes: list[Shape] = [Word(LEFT, 20, title, "start", is_bold=True)]
    for tick in ticks:
        y = down(tick)
        shapes.append(Line(LEFT, WIDTH - RIGHT, y))
        shapes.append(Word(LEFT - 8, y + 4, f"{tick:.0%}" if is_share else f"{tick:g}", "end"))
    for x in _thinned(xs):
        shapes.append(Word(across(x), HEIGHT - BOTTOM + 20, f"{x:,.0f}", "middle"))
    shapes.append(Word((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "workers", "middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    shapes.append(Word(16, middle, height_means, "middle", is_upright=True))
    labels = _apart({name: down(points[-1][1]) for name, points in series.items()})
    for (name, points), colour in zip(series.items(), _COLOURS, strict=False):
        shapes.append(Curve([(across(x), down(y)) for x, y in points], colour))
        shapes.append(Word(across(points[-1][0]) + 10, labels[name] + 4, name, "start", colour=colour))
    return shapes


def _powers(lowest: float, top: float) -> list[float]:
    first, last = math.ceil(math.log2(lowest) - 1e-9), math.floor(math.log2(top) + 1e-9)
    stride = max(1, math.ceil((last - first) / 5))
    return [2.0**exponent for exponent in range(first, last + 1, stride)]


def _thinned(xs: Sequence[float]) -> Sequence[float]:
    """Return numbers that have room beside each other: the last of each power of two."""
    kept: dict[int, float] = {}
    for x in xs:
        kept[round(math.log2(x))] = x
    chosen = list(kept.values())
    return chosen[:: max(1, math.ceil(len(chosen) / 10))]


def _apart(heights: Mapping[str, float]) -> dict[str, float]:
    """Return where labels go so that they do not cover each other: at least 16 units below the one above."""
    placed: dict[str, float] = {}
    last = -math.inf
    for name, height in sorted(heights.items(), key=lambda item: item[1]):
        last = max(height, last + 16)
        placed[name] = last
    lowest = float(HEIGHT - BOTTOM)
    for name in reversed(placed):  # those that would be below the chart push up the ones that are in their way
        placed[name] = min(placed[name], lowest)
        lowest = placed[name] - 16
    return placed
