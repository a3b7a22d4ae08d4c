"""`cordee simulate`: a scenario from a file, by name, or from a job and a cluster; its outcome as table, JSON, page."""

from __future__ import annotations

import html
import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cordee.core import Job
from cordee.core.errors import JobError, MissingExtraError, StorageError, nearest
from cordee.monitoring.wording import plural
from cordee.planner.amounts import in_bytes, in_time
from cordee.planner.cluster_file import load_cluster
from cordee.planner.hardware import DescribedCluster
from cordee.planner.simulator import PUBLISHED, ClusterOutcome, Scenario, load_scenario, read_scenario


def find_scenario(name: str, overrides: Sequence[str]) -> Scenario:
    """Return the scenario of a file, or a published one by its name."""
    if name in PUBLISHED:
        return read_scenario({"name": name, **PUBLISHED[name]}, overrides)
    path = Path(name)
    if path.suffix != ".toml" and not path.exists():
        raise JobError(
            f"no scenario '{name}'{nearest(name, PUBLISHED)} (a file SCENARIO.toml, or one of: {', '.join(PUBLISHED)})"
        )
    return load_scenario(path, overrides)


def scenario_of_job(job: str | Path, cluster: str | Path | None, overrides: Sequence[str]) -> Scenario:
    """Return the scenario of a job: its step and gradients as profiled here, its links from a cluster file.

    Each worker computes as many samples as the job's whole batch has; --set changes any key.
    """
    from cordee.planner.planning import profile_of  # which imports torch: other scenarios do without

    loaded = Job.load(job)
    profile = profile_of(loaded)
    hardware = None if cluster is None else load_cluster(Path(cluster))
    speed = 1.0 if hardware is None else min(device.speed for device in hardware.devices)
    most = 64 if hardware is None else len(hardware.devices)
    table: dict[str, Any] = {
        "name": loaded.name,
        "workers": sorted({1 << exponent for exponent in range(most.bit_length()) if 1 << exponent <= most} | {most}),
        "step": profile.step(loaded.training.batch_size).step_s / speed,
        "gradients": float(profile.parameter_bytes),
        "overlap": hardware is not None and hardware.overlaps,
    }
    if hardware is not None:
        table |= _links(hardware)
    return read_scenario(table, overrides)


class StrategyOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """A strategy on this machine, as the planner's formulas have it and as it is simulated."""

    strategy: str
    workers: int
    predicted_s: float
    simulated_s: float
    idle_share: float


def simulate_here(
    job: str | Path, overrides: Sequence[str], tell: Callable[[str], None] = lambda doing: None
) -> list[StrategyOutcome]:
    """Simulate every synchronous strategy on this machine, the fastest first."""
    from cordee.planner.planning import plan_and_work  # which imports torch
    from cordee.planner.search import is_synchronous
    from cordee.planner.simulator.team import simulate_team

    made, work = plan_and_work(Job.load(job, overrides), tell=tell)
    outcomes = []
    for found in made.predictions:
        if is_synchronous(found):
            outcome = simulate_team(found, work)
            outcomes.append(
                StrategyOutcome(
                    strategy=found.label,
                    workers=found.workers,
                    predicted_s=found.step_s,
                    simulated_s=outcome.step_s,
                    idle_share=outcome.idle_share,
                )
            )
    return sorted(outcomes, key=lambda outcome: outcome.simulated_s)


def render_strategies(outcomes: Sequence[StrategyOutcome]) -> RenderableType:
    """Return a table of strategies on this machine."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for name in ("strategy", "workers", "predicted", "simulated", "waiting"):
        table.add_column(name, justify="left" if name == "strategy" else "right")
    for outcome in outcomes:
        times = (in_time(outcome.predicted_s), in_time(outcome.simulated_s))
        table.add_row(outcome.strategy, str(outcome.workers), *times, f"{outcome.idle_share:.0%}")
    return table


def render_outcomes(scenario: Scenario, outcomes: Sequence[ClusterOutcome]) -> RenderableType:
    """Return a table of the outcomes."""
    columns = _columns(scenario)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for outcome in outcomes:
        table.add_row(*(cell(outcome) for cell in columns.values()))
    return Group(Text(scenario.name, "bold"), Text(scenario.describe()), table)


def _columns(scenario: Scenario) -> dict[str, Callable[[ClusterOutcome], str]]:
    columns: dict[str, Callable[[ClusterOutcome], str]] = {
        "workers": lambda o: f"{o.workers:,}",
        "step": lambda o: in_time(o.step_s),
        "efficiency": lambda o: f"{o.efficiency:.1%}",
        "idle": lambda o: f"{o.idle_share:.1%}",
        "exchange": lambda o: f"{o.exchange_share:.1%}",
        "sent": lambda o: in_bytes(o.sent_bytes),
        "kept": lambda o: f"{o.effective_share:.1%}",
        "steps/s": lambda o: f"{o.throughput:,.1f}",
    }
    if scenario.has_servers:
        columns |= {"behind": lambda o: f"{o.behind_mean:.2f}", "apart": lambda o: str(o.apart_most)}
    return columns


def write_drawing(path: Path, content: bytes) -> None:
    """Write a page or picture. Raises StorageError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error


def _links(hardware: DescribedCluster) -> dict[str, Any]:
    hosts = [device.host for device in hardware.devices]
    per_host = min(hosts.count(host) for host in set(hosts))
    links: dict[str, Any] = {"per_host": per_host}
    other = next((index for index, host in enumerate(hosts) if host != hosts[0]), None)
    if other is not None:
        link = hardware.link(0, other)
        links |= {"bandwidth": link.bytes_per_s, "latency": link.latency_s}
    if per_host > 1:
        links["inside_bandwidth"] = hardware.link(0, 1).bytes_per_s
    return links


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
        f"<h1>{title}</h1><p>{html.escape(scenario.describe())}</p>{charts}{_table(scenario, outcomes)}</html>\n"
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


def _table(scenario: Scenario, outcomes: Sequence[ClusterOutcome]) -> str:
    columns = _columns(scenario)
    rows = [
        "".join(f"<td>{html.escape(cell(outcome))}" for cell in columns.values())
        for outcome in sorted(outcomes, key=lambda outcome: outcome.workers)
    ]
    head = "".join(f"<th>{name}" for name in columns)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"
