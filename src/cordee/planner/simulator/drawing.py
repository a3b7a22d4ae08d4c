"""Outcomes of a simulation as one HTML page: charts in SVG and a table, nothing loaded from elsewhere."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from cordee.monitoring.wording import plural
from cordee.planner.amounts import in_bytes, in_time
from cordee.planner.simulator.crowd import CrowdOutcome
from cordee.planner.simulator.scenario import Scenario

WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 80, 132, 40, 48
_COLOURS = ("#1f6fb2", "#c8553d", "#3a8f5c", "#7a5ba6")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 760px; margin: 2em auto; color: #222; }
table { border-collapse: collapse; } td, th { padding: 2px 12px 2px 0; text-align: right; }
th { border-bottom: 1px solid #999; font-weight: 600; } svg { max-width: 100%; height: auto; }
"""


def draw_page(scenario: Scenario, outcomes: Sequence[CrowdOutcome]) -> str:
    """Return the page."""
    outcomes = sorted(outcomes, key=lambda outcome: outcome.workers)
    shares = {
        "computing": [(o.workers, o.efficiency) for o in outcomes],
        "exchanging": [(o.workers, o.exchange_share) for o in outcomes],
        "idle": [(o.workers, o.idle_share) for o in outcomes],
    }
    if scenario.mtbf_s:
        shares["training kept"] = [(o.workers, o.effective_share) for o in outcomes]
    title = html.escape(scenario.name or scenario.strategy)
    charts = [draw_chart("Where the workers' time goes", "share of the time", shares, is_share=True)]
    moving = [outcome for outcome in outcomes if outcome.throughput > 0]  # failures may leave a large crowd nothing
    if len(moving) > 1:
        base = moving[0]
        speedup = {
            "simulated": [(o.workers, o.throughput / base.throughput) for o in moving],
            "without any loss": [(o.workers, o.workers / base.workers) for o in moving],
        }
        beside = f"times as fast as {plural(base.workers, 'worker')}"
        charts.append(draw_chart("Speed", beside, speedup, is_share=False))
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1><p>{html.escape(describe(scenario))}</p>{''.join(charts)}{_table(outcomes)}</html>\n"
    )


def describe(scenario: Scenario) -> str:
    """Return the scenario in a sentence."""
    how = scenario.strategy.replace("_", "-")
    if scenario.strategy == "parameter_server":
        how += f" with staleness {scenario.staleness}"
    text = (
        f"{how}: steps of {in_time(scenario.step_s)} that vary by {scenario.spread:.0%}, "
        f"{in_bytes(scenario.gradient_bytes)} of gradients, {in_bytes(scenario.bytes_per_s)}/s between hosts of "
        f"{plural(scenario.per_host, 'worker')}"
    )
    if scenario.mtbf_s:
        text += f"; each worker fails every {scenario.mtbf_s / 86400:.3g} days"
    return text


def draw_chart(
    title: str, height_means: str, series: Mapping[str, Sequence[tuple[float, float]]], *, is_share: bool
) -> str:
    """Return an SVG of lines over a logarithmic number of workers; shares have an axis from 0 to 100 %."""
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
    parts = [_text(LEFT, 20, title, "start", bold=True)]
    for tick in ticks:
        y = down(tick)
        parts.append(f"<line x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y:.1f}' y2='{y:.1f}' stroke='#ddd'/>")
        parts.append(_text(LEFT - 8, y + 4, f"{tick:.0%}" if is_share else f"{tick:g}×", "end"))
    for x in _thinned(xs):
        parts.append(_text(across(x), HEIGHT - BOTTOM + 20, f"{x:,.0f}", "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "workers", "middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f"<g transform='rotate(-90 16 {middle:.1f})'>{_text(16, middle, height_means, 'middle')}</g>")
    labels = _apart({name: down(points[-1][1]) for name, points in series.items()})
    for (name, points), colour in zip(series.items(), _COLOURS, strict=False):
        path = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in points)
        parts.append(f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='2'/>")
        parts += [f"<circle cx='{across(x):.1f}' cy='{down(y):.1f}' r='3' fill='{colour}'/>" for x, y in points]
        parts.append(_text(across(points[-1][0]) + 10, labels[name] + 4, name, "start", colour=colour))
    body = "".join(parts)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' height='{HEIGHT}' "
        f"font-family='system-ui, sans-serif' font-size='13'>{body}</svg>"
    )


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
    overflow = max(0.0, last - (HEIGHT - BOTTOM))
    return {name: height - overflow for name, height in placed.items()}


def _table(outcomes: Sequence[CrowdOutcome]) -> str:
    head = "<tr><th>workers<th>step<th>efficiency<th>idle<th>exchange<th>behind<th>kept<th>steps/s</tr>"
    rows = [
        f"<tr><td>{o.workers:,}<td>{in_time(o.step_s)}<td>{o.efficiency:.1%}<td>{o.idle_share:.1%}"
        f"<td>{o.exchange_share:.1%}<td>{o.behind_mean:.2f}<td>{o.effective_share:.1%}<td>{o.throughput:,.1f}</tr>"
        for o in outcomes
    ]
    return f"<table>{head}{''.join(rows)}</table>"


def _text(x: float, y: float, text: str, anchor: str, *, bold: bool = False, colour: str = "#333") -> str:
    weight = " font-weight='600'" if bold else ""
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' fill='{colour}'{weight}>{html.escape(text)}</text>"
