"""`cordee simulate`: a scenario from a file, by name, or from a job and a cluster; its outcome as table, JSON, page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cordee.core import Job
from cordee.core.errors import JobError, StorageError, nearest
from cordee.planner.amounts import in_bytes, in_time
from cordee.planner.cluster_file import load_cluster
from cordee.planner.hardware import DescribedCluster
from cordee.planner.simulator import PUBLISHED, ClusterOutcome, Scenario, load_scenario, read_scenario
from cordee.planner.simulator.report import draw_page, draw_picture


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
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for outcome in outcomes:
        table.add_row(*(cell(outcome) for cell in columns.values()))
    return Group(Text(scenario.name, "bold"), Text(scenario.describe()), table)


def write_page(path: Path, scenario: Scenario, outcomes: Sequence[ClusterOutcome]) -> None:
    """Write the HTML page. Raises StorageError if it cannot be written, MissingExtraError without matplotlib."""
    _write(path, draw_page(scenario, outcomes).encode())


def write_picture(path: Path, scenario: Scenario, outcomes: Sequence[ClusterOutcome]) -> None:
    """Write the charts as PNG. Raises StorageError if it cannot be written, MissingExtraError without matplotlib."""
    _write(path, draw_picture(scenario, outcomes))


def _write(path: Path, content: bytes) -> None:
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
