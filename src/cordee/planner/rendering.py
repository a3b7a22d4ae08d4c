"""A plan as a table and sentences, for a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cordee.planner.amounts import in_bytes, in_time
from cordee.planner.plan import Plan
from cordee.planner.prediction import Prediction

_MARKS = {"✗": "does not fit into memory, or would refuse the job"}


def render_plan(plan: Plan) -> RenderableType:
    """Return the table of predictions, and below it the choice and why."""
    title = f"{plan.job}: {plan.parameters:,} parameters, batches of {plan.batch_size:,}, {plan.where}"
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for name in ("", "strategy", "workers", "step", "exchange", "idle", "memory", "sent"):
        table.add_column(name, justify="left" if name in ("", "strategy") else "right", no_wrap=name != "strategy")
    for prediction in plan.predictions:
        style = "bold green" if prediction is plan.choice else "" if _can_run(plan, prediction) else "bright_black"
        table.add_row(*_cells(plan, prediction), style=style)
    lines = [Text(line) for line in plan.explain()]
    marks = {_mark(plan, prediction) for prediction in plan.predictions}
    lines += [Text(f"{mark} {meaning}", "bright_black") for mark, meaning in _MARKS.items() if mark in marks]
    for host, tenants in plan.placement.items():
        lines.append(Text(f"{host}: {', '.join(tenants)}", "bright_black"))
    spent = "profile from the cache" if plan.is_cached else f"profiled in {in_time(plan.profile_s)}"
    lines.append(Text(f"{spent}, searched in {in_time(plan.search_s)}", "bright_black"))
    return Group(Text(title, "bold"), table, Text(""), *lines)


def _can_run(plan: Plan, prediction: Prediction) -> bool:
    return _mark(plan, prediction) not in _MARKS


def _mark(plan: Plan, prediction: Prediction) -> str:
    if prediction is plan.choice:
        return "→"
    return "✗" if not prediction.fits or plan.is_refused(prediction) else ""


def _cells(plan: Plan, prediction: Prediction) -> list[str]:
    return [
        _mark(plan, prediction),
        prediction.label,
        str(prediction.workers),
        in_time(prediction.step_s),
        in_time(prediction.communication_s) if prediction.communication_s else "–",
        f"{prediction.idle_share:.0%}",
        in_bytes(prediction.memory_bytes),
        in_bytes(prediction.traffic_bytes) if prediction.traffic_bytes else "–",
    ]
