"""Outcomes of a simulation drawn by matplotlib: an HTML page that needs nothing else, or a PNG picture."""

from __future__ import annotations

import html
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from cordee.core.errors import MissingExtraError
from cordee.monitoring.wording import plural
from cordee.planner.amounts import in_time
from cordee.planner.simulator.cluster import ClusterOutcome
from cordee.planner.simulator.scenario import Scenario

WIDTH, HEIGHT = 7.2, 3.6  # inches, of a chart
HEAD = 0.7  # inches above the charts of a picture
PIXELS_PER_INCH = 200

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 760px; margin: 2em auto; color: #222; }
table { border-collapse: collapse; } td, th { padding: 2px 12px 2px 0; text-align: right; }
th { border-bottom: 1px solid #999; font-weight: 600; } svg { max-width: 100%; height: auto; }
"""


class Chart(NamedTuple):
    """Lines over the number of workers."""

    title: str
    height_means: str
    lines: Mapping[str, Sequence[tuple[float, float]]]  # name -> workers and height
    is_share: bool  # heights are from 0 to 1; others are factors, on a logarithmic axis


def charts_of(scenario: Scenario, outcomes: Sequence[ClusterOutcome]) -> list[Chart]:
    """Return where the workers' time goes, and how fast they are, over the number of workers. Pure."""
    outcomes = sorted(outcomes, key=lambda outcome: outcome.workers)
    shares = {
        "computing": [(o.workers, o.efficiency) for o in outcomes],
        "exchanging": [(o.workers, o.exchange_share) for o in outcomes],
        "idle": [(o.workers, o.idle_share) for o in outcomes],
    }
    if scenario.mtbf_s:
        shares["training kept"] = [(o.workers, o.effective_share) for o in outcomes]
    charts = [Chart("Where the workers' time goes", "share of the time", shares, is_share=True)]
    moving = [outcome for outcome in outcomes if outcome.throughput > 0]  # failures may leave many workers nothing
    if len(moving) > 1:
        base = moving[0]
        speedup = {
            "simulated": [(o.workers, o.throughput / base.throughput) for o in moving],
            "without any loss": [(o.workers, o.workers / base.workers) for o in moving],
        }
        charts.append(Chart("Speed", f"times as fast as {plural(base.workers, 'worker')}", speedup, is_share=False))
    return charts


def draw_page(scenario: Scenario, outcomes: Sequence[ClusterOutcome]) -> str:
    """Return the HTML page. Raises MissingExtraError without matplotlib."""
    title = html.escape(scenario.name or scenario.strategy)
    charts = "".join(map(_svg, charts_of(scenario, outcomes)))
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1><p>{html.escape(scenario.describe())}</p>{charts}{_table(outcomes)}</html>\n"
    )


def draw_picture(scenario: Scenario, outcomes: Sequence[ClusterOutcome]) -> bytes:
    """Return the PNG file, with the charts below each other. Raises MissingExtraError without matplotlib."""
    charts = charts_of(scenario, outcomes)
    height = HEAD + HEIGHT * len(charts)
    with _figure(height, scenario.name) as figure:
        heads = ((scenario.name or scenario.strategy, 14, 0.22), (scenario.describe(), 8, 0.52))
        for text, size, below in heads:
            figure.text(0.02, 1 - below / height, text, fontsize=size, wrap=True, parse_math=False, va="center")
        figure.get_layout_engine().set(rect=(0, 0, 1, 1 - HEAD / height))
        for chart, axes in zip(charts, figure.subplots(len(charts), squeeze=False)[:, 0], strict=True):
            _draw(chart, axes)
        return _saved(figure, "png")


def _svg(chart: Chart) -> str:
    with _figure(HEIGHT, chart.title) as figure:
        _draw(chart, figure.subplots())
        text = _saved(figure, "svg").decode()
    return text[text.index("<svg") :]  # without the XML header, which a page must not have inside


@contextmanager
def _figure(height: float, salt: str) -> Iterator[Any]:
    """A figure that belongs to no window, and warnings that concern nobody (letters that the font lacks) kept quiet."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("a chart", "report") from None
    # Text stays text. Ids inside a drawing follow from `salt`: drawings of one page must not share any.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        yield Figure(figsize=(WIDTH, height), layout="constrained")


def _draw(chart: Chart, axes: Any) -> None:
    from matplotlib.ticker import LogLocator, NullLocator, PercentFormatter, StrMethodFormatter

    for name, points in chart.lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name)
    axes.set_title(chart.title, loc="left", fontweight="bold", fontsize=11)
    axes.set_xlabel("workers")
    axes.set_ylabel(chart.height_means)
    # A speed-up is a straight line where both axes are logarithmic.
    scaled = [axes.xaxis] if chart.is_share else [axes.xaxis, axes.yaxis]
    axes.set_xscale("log", base=2)
    if chart.is_share:
        axes.set_ylim(-0.03, 1.03)
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    else:
        axes.set_yscale("log", base=2)
    for axis in scaled:
        axis.set_major_locator(LogLocator(base=2, numticks=10 if axis is axes.yaxis else 8))
        axis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
        axis.set_minor_locator(NullLocator())
    axes.grid(axis="y", color="#dddddd")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _saved(figure: Any, file_format: str) -> bytes:
    file = io.BytesIO()
    # Nothing but the drawing, so that the same outcomes give the same file.
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type") if file_format == "svg" else ("Software",))
    figure.savefig(file, format=file_format, dpi=PIXELS_PER_INCH, metadata=metadata)
    return file.getvalue()


def _table(outcomes: Sequence[ClusterOutcome]) -> str:
    head = "<tr><th>workers<th>step<th>efficiency<th>idle<th>exchange<th>behind<th>kept<th>steps/s</tr>"
    rows = [
        f"<tr><td>{o.workers:,}<td>{in_time(o.step_s)}<td>{o.efficiency:.1%}<td>{o.idle_share:.1%}"
        f"<td>{o.exchange_share:.1%}<td>{o.behind_mean:.2f}<td>{o.effective_share:.1%}<td>{o.throughput:,.1f}</tr>"
        for o in sorted(outcomes, key=lambda outcome: outcome.workers)
    ]
    return f"<table>{head}{''.join(rows)}</table>"
