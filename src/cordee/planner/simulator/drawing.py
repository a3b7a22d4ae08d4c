"""Outcomes of a simulation as one HTML page: charts in SVG and a table, nothing loaded from elsewhere."""

from __future__ import annotations

import html
from collections.abc import Sequence

from cordee.core.durations import format_duration
from cordee.monitoring.wording import plural
from cordee.planner.amounts import in_bytes, in_time
from cordee.planner.simulator.chart import HEIGHT, WIDTH, Curve, Line, Shape, Word, charts_of
from cordee.planner.simulator.crowd import ClusterOutcome
from cordee.planner.simulator.scenario import Scenario

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 760px; margin: 2em auto; color: #222; }
table { border-collapse: collapse; } td, th { padding: 2px 12px 2px 0; text-align: right; }
th { border-bottom: 1px solid #999; font-weight: 600; } svg { max-width: 100%; height: auto; }
"""


def draw_page(scenario: Scenario, outcomes: Sequence[ClusterOutcome]) -> str:
    """Return the page."""
    outcomes = sorted(outcomes, key=lambda outcome: outcome.workers)
    title = html.escape(scenario.name or scenario.strategy)
    charts = "".join(map(_svg, charts_of(scenario, outcomes)))
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1><p>{html.escape(describe(scenario))}</p>{charts}{_table(outcomes)}</html>\n"
    )


def describe(scenario: Scenario) -> str:
    """Return the scenario in a sentence."""
    how = scenario.strategy.replace("_", "-")
    if scenario.has_servers:
        how += f" with staleness {scenario.staleness}"
    text = (
        f"{how}: steps of {in_time(scenario.step_s)} that vary by {scenario.spread:.0%}, "
        f"{in_bytes(scenario.gradient_bytes)} of gradients, {in_bytes(scenario.bytes_per_s)}/s between hosts of "
        f"{plural(scenario.per_host, 'worker')}"
    )
    if scenario.mtbf_s:
        days = scenario.mtbf_s / 86400
        text += f"; each worker fails every {f'{days:.3g} days' if days > 2 else format_duration(scenario.mtbf_s)}"
    return text


def _svg(shapes: Sequence[Shape]) -> str:
    body = "".join(map(_element, shapes))
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' height='{HEIGHT}' "
        f"font-family='system-ui, sans-serif' font-size='13'>{body}</svg>"
    )


def _element(shape: Shape) -> str:
    match shape:
        case Line(x1, x2, y):
            return f"<line x1='{x1}' x2='{x2}' y1='{y:.1f}' y2='{y:.1f}' stroke='#ddd'/>"
        case Curve(points, colour):
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            dots = "".join(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3' fill='{colour}'/>" for x, y in points)
            return f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='2'/>{dots}"
        case Word(x, y, text, anchor, is_bold, colour, is_upright):
            weight = " font-weight='600'" if is_bold else ""
            turned = f" transform='rotate(-90 {x:.1f} {y:.1f})'" if is_upright else ""
            place = f"x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' fill='{colour}'"
            return f"<text {place}{weight}{turned}>{html.escape(text)}</text>"


def _table(outcomes: Sequence[ClusterOutcome]) -> str:
    head = "<tr><th>workers<th>step<th>efficiency<th>idle<th>exchange<th>behind<th>kept<th>steps/s</tr>"
    rows = [
        f"<tr><td>{o.workers:,}<td>{in_time(o.step_s)}<td>{o.efficiency:.1%}<td>{o.idle_share:.1%}"
        f"<td>{o.exchange_share:.1%}<td>{o.behind_mean:.2f}<td>{o.effective_share:.1%}<td>{o.throughput:,.1f}</tr>"
        for o in outcomes
    ]
    return f"<table>{head}{''.join(rows)}</table>"
