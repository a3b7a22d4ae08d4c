"""What a plan says: its predictions, the choice and the reasons, in words and as a table. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cordee.core.errors import JobError
from cordee.monitoring.wording import plural
from cordee.planner.amounts import in_bytes, in_time
from cordee.planner.hardware import Device
from cordee.planner.kernels import Trial, describe
from cordee.planner.prediction import Prediction
from cordee.planner.search import CLOSE
from cordee.strategies.table import STRATEGIES, strategies_where


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What `cordee plan` found."""

    job: str
    where: str  # this machine, or the cluster file
    batch_size: int
    parameters: int
    predictions: list[Prediction]  # the best of each strategy and number of workers, the fastest first
    available: list[str]  # strategies of this version
    choice: Prediction
    runner_up: Prediction | None
    refusals: dict[str, str]  # strategies, or those on some number of workers, that would not run this job, and why
    profile_s: float  # spent on measuring; next to nothing where it was cached
    search_s: float
    is_cached: bool
    is_chain: bool = True  # its blocks are known, and so what a pipeline of them would take
    was_busy: bool = False  # the machine had other work while it was measured
    kernels: str = ""  # how the model is computed, and what that gains
    kernel_trials: tuple[Trial, ...] = ()  # what each way of computing would bring
    placement: dict[str, list[str]] = {}  # host -> what runs there, for a cluster file

    def find(self, strategy: str, workers: int) -> Prediction | None:
        """Return the prediction for a strategy on a number of workers."""
        found = (p for p in self.predictions if (p.strategy, p.workers) == (strategy, workers))
        return next(found, None)

    def is_refused(self, prediction: Prediction) -> bool:
        """Return whether the strategy is known to refuse the job."""
        return prediction.strategy in self.refusals or prediction.name in self.refusals

    def explain(self) -> list[str]:
        """Return why, in plain sentences. The first one names the choice."""
        choice, lines = self.choice, []
        reason = f": {choice.note}" if choice.note else ""
        lines.append(f"choice: {choice.name}, {in_time(choice.step_s)} a step{reason}")
        if choice.num_runs:
            lines.append(f"made from {plural(choice.num_runs, 'earlier run')} of the choice as well")
        if self.runner_up is not None:
            lines.append(_against(choice, self.runner_up, is_sure=not self.was_busy))
        alone = next((prediction for prediction in self.predictions if prediction.workers == 1), None)
        if alone is not None and choice.workers > 1 and alone is not self.runner_up:
            gain = f": {choice.workers_text} are {alone.step_s / choice.step_s:.2f}× as fast"
            lines.append(f"one worker would take {in_time(alone.step_s)}{'' if self.was_busy else gain}")
        for prediction in self._others():
            took = in_time(prediction.step_s)
            lines.append(f"{prediction.name} would take {took}" + (f": {prediction.note}" if prediction.note else ""))
        lines += [f"{name} would refuse the job: {reason}" for name, reason in self.refusals.items()]
        for prediction in self.predictions:
            if not prediction.fits:
                lines.append(f"{prediction.name} does not fit: it lacks {_lack(prediction)}")
        if not self.is_chain and any(prediction.workers > 1 for prediction in self.predictions):
            lines += [
                f"{name} is not predicted: the model is no nn.Sequential, so that its stages are known only when it "
                f"is traced; strategy.name = '{name}' does so"
                for name in strategies_where(lambda entry: entry.cost_model == "stages")
            ]
        if self.was_busy:
            busy = "these predictions are not reliable: other programs were using this machine while it was measured"
            lines.insert(1, f"{busy}; plan again when it is quiet")
        if self.kernels:
            lines.append(f"kernels: {self.kernels}")
            brought = "; ".join(describe(trial) for trial in self.kernel_trials if trial.gain != 1.0)
            lines += [f"measured against plain kernels: {brought}"] if brought else []
        return lines

    def _others(self) -> list[Prediction]:
        """Return what else this version could run with as many workers, where that is not said already."""
        return [
            p
            for p in self.predictions
            if not self.is_refused(p)
            and p.fits
            and p.workers == max(other.workers for other in self.predictions)
            and p not in (self.choice, self.runner_up)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, the reasons included."""
        table: dict[str, Any] = msgspec.to_builtins(self)
        for given, prediction in zip(table["predictions"], self.predictions, strict=True):
            given["fits"], given["missing_bytes"] = prediction.fits, prediction.missing_bytes
        return {**table, "reasons": self.explain()}


def refuse_without_choice(accepted: list[Prediction], refusals: dict[str, str]) -> None:
    """Raise JobError, with the reasons, if whatever fits into memory would refuse the job."""
    if not accepted:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
        raise JobError(f"no strategy that fits into memory would run this job. {reasons}")


def refuse_without_room(predictions: list[Prediction]) -> None:
    """Raise JobError, saying how much memory is lacking, if nothing fits anywhere."""
    if any(p.fits for p in predictions):
        return
    nearest = min(predictions, key=lambda p: p.missing_bytes)
    raise JobError(
        f"no strategy fits into memory: {nearest.name} comes nearest, and lacks {_lack(nearest)}. "
        "Lower training.batch_size, raise training.accumulate, or take machines with more memory"
    )


def _lack(prediction: Prediction) -> str:
    return (
        f"{in_bytes(prediction.missing_bytes)} (needs {in_bytes(prediction.memory_bytes)} a worker, "
        f"has {in_bytes(prediction.memory_limit_bytes)})"
    )


def _against(choice: Prediction, other: Prediction, *, is_sure: bool) -> str:
    slower = other.step_s / choice.step_s - 1
    how = "as fast, as far as can be predicted" if abs(slower) <= CLOSE else f"{slower:.0%} slower"
    why = f": {other.note}" if other.note else ""
    return f"runner-up: {other.name}, {in_time(other.step_s)} a step{f', {how}' if is_sure else ''}{why}"


def place(choice: Prediction, devices: Sequence[Device]) -> dict[str, list[str]]:
    """Return what runs on each host that is used.

    Workers fill one host after the other, the fastest devices first: neighbours in a ring, a pipeline or a sliced
    layer talk most, and so are on one host. Servers go to as many different hosts as there are: one that is lost
    takes few of them along, and each has a network of its own.
    """
    processes: dict[str, list[str]] = {}
    for index, device in enumerate(devices[: choice.workers]):
        processes.setdefault(device.host, []).append(f"worker {index}")
    hosts = list(dict.fromkeys(device.host for device in devices))
    if STRATEGIES[choice.strategy].cost_model == "servers":
        idle_first = sorted(hosts, key=lambda host: len(processes.get(host, [])))
        for server in range(int(choice.settings.get("servers", 1))):
            processes.setdefault(idle_first[server % len(hosts)], []).append(f"server {server}")
    return processes


def render_plan(plan: Plan) -> RenderableType:
    """Return the table of predictions, and below it the choice and why."""
    title = f"{plan.job}: {plan.parameters:,} parameters, batches of {plan.batch_size:,}, {plan.where}"
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    has_runs = any(prediction.num_runs for prediction in plan.predictions)
    runs = ("runs",) if has_runs else ()
    for name in ("", "strategy", "workers", "step", "between", *runs, "exchange", "idle", "memory", "sent"):
        table.add_column(name, justify="left" if name in ("", "strategy") else "right", no_wrap=name != "strategy")
    for prediction in plan.predictions:
        style = {"→": "bold green", "✗": "bright_black"}.get(_mark(plan, prediction), "")
        table.add_row(*_cells(plan, prediction, has_runs=has_runs), style=style)
    lines = [Text(line) for line in plan.explain()]
    if any(_mark(plan, prediction) == "✗" for prediction in plan.predictions):
        lines.append(Text("✗ does not fit into memory, or would refuse the job", "bright_black"))
    for host, processes in plan.placement.items():
        lines.append(Text(f"{host}: {', '.join(processes)}", "bright_black"))
    spent = "profile from the cache" if plan.is_cached else f"profiled in {in_time(plan.profile_s)}"
    lines.append(Text(f"{spent}, searched in {in_time(plan.search_s)}", "bright_black"))
    return Group(Text(title, "bold"), table, Text(""), *lines)


def _mark(plan: Plan, prediction: Prediction) -> str:
    if prediction is plan.choice:
        return "→"
    return "✗" if not prediction.fits or plan.is_refused(prediction) else ""


def _between(prediction: Prediction) -> str:
    if prediction.interval is None:
        return "?"
    low, high = map(in_time, prediction.interval)
    number, unit = low.split(" ")
    return f"{number if high.endswith(f' {unit}') else low}–{high}"


def _cells(plan: Plan, prediction: Prediction, *, has_runs: bool) -> list[str]:
    return [
        _mark(plan, prediction),
        prediction.label,
        str(prediction.workers),
        in_time(prediction.step_s),
        _between(prediction),
        *([str(prediction.num_runs) if prediction.num_runs else "–"] if has_runs else []),
        in_time(prediction.communication_s) if prediction.communication_s else "–",
        f"{prediction.idle_share:.0%}",
        in_bytes(prediction.memory_bytes),
        in_bytes(prediction.traffic_bytes) if prediction.traffic_bytes else "–",
    ]
