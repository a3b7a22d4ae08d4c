"""From a job to a plan: profile what is not in the cache, search, choose."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import nn

from cordee.cluster.engines import open_engine
from cordee.compute import usable_cores
from cordee.core import Job
from cordee.core.errors import CordeeError, JobError
from cordee.core.importing import stop_import
from cordee.core.references import LIVE_PREFIX
from cordee.models.slicing import choose_slicing
from cordee.planner.amounts import in_bytes, in_time
from cordee.planner.cluster_file import load_cluster
from cordee.planner.cost_model import MODELS
from cordee.planner.hardware import Device, Hardware, ThisMachine
from cordee.planner.kernels import Trial, choose_kernels, describe
from cordee.planner.measurements import (
    Machine,
    ModelProfile,
    Overhead,
    describe_machine,
    free_memory_bytes,
    is_busy,
    keep,
    key_of,
    read_kept,
)
from cordee.planner.prediction import Prediction, Work
from cordee.planner.probes import add_to_machine, add_to_profile, measure_group
from cordee.planner.profiling import BUDGET_S, assemble_alone, profile_key, take_profile
from cordee.planner.search import CLOSE, choose, degrees, is_candidate, search
from cordee.planner.trials import measure_alone, measure_trials
from cordee.runs import PROCESS_MODULES
from cordee.strategies.choice import make_strategy
from cordee.strategies.table import STRATEGIES, strategies_where, usual_strategy
from cordee.training.components import Components

log = logging.getLogger("cordee.planning")

MOST_MEASURED = 8  # processes; more workers on one host are extrapolated


def plan(
    job: Job | Mapping[str, Any] | str | Path,
    *,
    overrides: Iterable[str] = (),
    workers: int | None = None,
    cluster: str | Path | None = None,
    fresh: bool = False,
    fresh_profile: bool = False,
    budget_s: float = BUDGET_S,
    tell: Callable[[str], None] = lambda doing: None,
) -> Plan:
    """Predict what `job` would take on every strategy, and choose one that this version has.

    Looks at up to `workers` workers; without it at as many as the job has, or this machine has cores for, or
    `cluster` (a cluster file) has devices. Profiles the model unless the cache has it; `fresh` measures again,
    `fresh_profile` only what belongs to the model, and `budget_s` is about how long each number of processes is
    measured. `tell` is called with what is being measured, since that takes a while.
    Raises a CordeeError for a job that cannot be run, and JobError if it fits into memory nowhere.
    """
    stop_import("cordee.plan")
    made, _ = plan_and_work(
        Job.coerce(job, overrides),
        workers,
        cluster,
        fresh=fresh,
        fresh_profile=fresh_profile,
        budget_s=budget_s,
        tell=tell,
    )
    return made


def plan_and_work(
    job: Job,
    workers: int | None = None,
    cluster: str | Path | None = None,
    *,
    fresh: bool = False,
    fresh_profile: bool = False,
    budget_s: float = BUDGET_S,
    tell: Callable[[str], None] = lambda doing: None,
) -> tuple[Plan, Work]:
    """Return the plan, and what it was made from."""
    if not (isinstance(budget_s, (int, float)) and 0 < budget_s < math.inf):
        raise JobError(f"budget_s = {budget_s!r} is no time to measure for: give seconds, more than 0")
    if workers is not None and (type(workers) is not int or workers < 1):
        raise JobError(f"workers = {workers!r} is not a number of workers to look at: give 1 or more")
    entry = STRATEGIES.get(job.strategy.name)
    if entry is not None and entry.cost_model not in MODELS:
        raise JobError(
            f"strategy '{job.strategy.name}' is not predicted, as a round takes as long as its clients: remove "
            "strategy.name and its settings to plan the same model and data for other strategies"
        )
    hardware: Hardware | None = None if cluster is None else load_cluster(Path(cluster))
    most = workers or (max(job.strategy.workers, usable_cores()) if hardware is None else len(hardware.devices))
    if hardware is not None and most > len(hardware.devices):
        raise JobError(f"{most} workers, and {cluster} has {len(hardware.devices)} devices: ask for fewer workers")
    parts = assemble_alone(job)
    kernels = choose_kernels(job.training, parts, may_always_measure=hardware is None, tell=tell)
    if kernels.training != parts.job.training:
        parts = assemble_alone(msgspec.structs.replace(job, training=kernels.training))
    job = msgspec.structs.replace(job, training=kernels.training)
    most = min(most, job.training.batch_size)
    started = time.perf_counter()
    profile, machine, is_cached = _measure(
        parts,
        most if hardware is None else 1,
        fresh=fresh,
        fresh_profile=fresh or fresh_profile,
        budget_s=budget_s,
        tell=tell,
    )
    profile_s = time.perf_counter() - started
    where = f"on {_cluster_name(hardware, cluster)}" if hardware is not None else f"here ({usable_cores()} cores)"
    here = ThisMachine(machine, most, free_memory_bytes())
    work = Work(profile, job.training.batch_size, hardware or here, job.training.accumulate)
    started = time.perf_counter()
    predictions = search(work, most, refused_slices(parts.model, most))
    search_s = time.perf_counter() - started
    refuse_without_room(predictions)
    accepted, refusals = _accepted(job, parts, predictions)
    refuse_without_choice(accepted, refusals)
    choice, runner_up = choose(accepted)
    assert choice is not None  # whatever is accepted may be chosen
    made = Plan(
        job=job.name,
        where=where,
        batch_size=job.training.batch_size,
        parameters=profile.num_parameters,
        predictions=predictions,
        available=sorted(STRATEGIES),
        choice=choice,
        runner_up=runner_up,
        refusals=refusals,
        profile_s=profile_s,
        search_s=search_s,
        is_cached=is_cached,
        is_chain=profile.is_chain,
        kernels=kernels.text,
        kernel_trials=kernels.trials,
        was_busy=profile.was_busy or machine.was_busy,
        placement=place(choice, hardware.devices) if hardware is not None else {},
    )
    return made, work


def job_as(asked: Job, prediction: Prediction) -> Job:
    """Return `asked` with the strategy, the workers and the numbers of a prediction; what the job sets itself stays."""
    strategy = msgspec.structs.replace(
        asked.strategy,
        name=prediction.strategy,
        workers=prediction.workers,
        settings={**prediction.settings, **asked.strategy.settings},
    )
    return msgspec.structs.replace(asked, strategy=strategy)


def refusal(asked: Job, parts: Components, prediction: Prediction) -> str | None:
    """Return why the strategy would not run this job with this model; None where it would."""
    try:
        strategy = make_strategy(job_as(asked, prediction), parts.computation)
        if STRATEGIES[prediction.strategy].run_kind == "team":
            strategy.check(parts.model, parts.recipe, parts.example)
    except CordeeError as error:
        return str(error)
    return None


def refused_slices(model: nn.Module, most_workers: int) -> frozenset[int]:
    """Return the numbers of workers that cannot share this model's layers out, on any mesh."""
    refused = set()
    for number in degrees(most_workers)[1:]:
        try:
            choose_slicing(model, number, {})
        except CordeeError:
            refused.add(number)
    return frozenset(refused)


def profile_of(job: Job) -> ModelProfile:
    """Return the profile of the job's model in one process, from the cache or measured."""
    profile, _, _ = _measure(assemble_alone(job), 1, budget_s=BUDGET_S)
    return profile


def machine_key() -> str:
    return key_of(describe_machine(), *sorted(STRATEGIES))


def kept_machine() -> Machine:
    """Return what is known of this machine, which may be nothing but its cores."""
    return read_kept("machines", machine_key(), Machine) or Machine(cores=usable_cores())


def group_sizes(most_workers: int) -> list[int]:
    """Return the numbers of processes to measure with, for a job of up to `most_workers`."""
    sizes = {size for size in (2, 4, 8) if size <= most_workers} | {most_workers}
    return sorted(size for size in sizes if 2 <= size <= MOST_MEASURED)


def _accepted(
    job: Job, parts: Components, predictions: Sequence[Prediction]
) -> tuple[list[Prediction], dict[str, str]]:
    """Return the predictions that a choice is made from or compared with, and why others would not run the job.

    Settings of the job do not count: the plan is to say which strategy to take.
    """
    asked = msgspec.structs.replace(job, strategy=msgspec.structs.replace(job.strategy, settings={}))
    able = [p for p in predictions if is_candidate(p)]
    most = max(prediction.workers for prediction in predictions)
    accepted: list[Prediction] = []
    refused: dict[str, dict[str, str]] = {}  # strategy -> its predictions -> why
    hopeless: set[str] = set()  # refused for the same reason whatever the number of workers

    def look_at(prediction: Prediction) -> None:
        reason = refusal(asked, parts, prediction)
        if reason is None:
            accepted.append(prediction)
            return
        known = refused.setdefault(prediction.strategy, {})
        if reason in known.values():
            hopeless.add(prediction.strategy)
        known[prediction.name] = reason

    passed_over = []
    for prediction in able:
        is_slow = len(accepted) >= 2 and accepted[0].step_s * (1 + CLOSE) < prediction.step_s
        if is_slow and prediction.workers != most:
            passed_over.append(prediction)  # neither chosen from nor spoken of
        elif prediction.strategy not in hopeless:
            look_at(prediction)
    for prediction in passed_over:
        if prediction.strategy in refused and prediction.strategy not in hopeless:
            look_at(prediction)
    return sorted(accepted, key=able.index), _reasons(accepted, refused)


def _reasons(accepted: Sequence[Prediction], refused: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return reasons by strategy, where it has one for all numbers of workers, else by strategy and number."""
    refusals: dict[str, str] = {}
    for strategy, reasons in refused.items():
        is_general = len(set(reasons.values())) == 1 and all(found.strategy != strategy for found in accepted)
        if is_general and STRATEGIES[strategy].axis:  # those on a mesh have others, which were not looked at
            refusals[strategy] = next(iter(reasons.values()))
        else:
            refusals |= reasons
    return refusals


def _measure(
    parts: Components,
    most_workers: int,
    *,
    fresh: bool = False,
    fresh_profile: bool = False,
    budget_s: float,
    tell: Callable[[str], None] = lambda doing: None,
) -> tuple[ModelProfile, Machine, bool]:
    """Return the profile and the machine, from the cache as far as it has them."""
    key, is_cached = profile_key(parts), True
    profile = None if fresh_profile else read_kept("profiles", key, ModelProfile)
    machine = Machine(cores=usable_cores()) if fresh else kept_machine()
    sizes = group_sizes(most_workers)
    is_complete = profile is not None and all(profile.has_timings(n) and machine.has_exchanges(n) for n in sizes)
    is_sure = profile is not None and not profile.was_busy and not machine.was_busy
    busy = not (is_complete and is_sure) and is_busy()
    if not busy:  # what was measured beside other work is measured again now that there is none
        profile = None if profile is None or profile.was_busy else profile
        machine = Machine(cores=usable_cores()) if machine.was_busy else machine
    if profile is None:
        is_cached = False
        tell("measuring the model layer by layer")
        profile = msgspec.structs.replace(take_profile(parts, budget_s=budget_s), was_busy=busy)
        keep("profiles", key, profile)
    is_live = LIVE_PREFIX in str(parts.job.to_dict())  # exists in this process only, where one worker trains
    missing = [size for size in sizes if not (profile.has_timings(size) and machine.has_exchanges(size))]
    if missing and not is_live:
        is_cached = False
        with open_engine(PROCESS_MODULES) as engine:
            alone = usual_strategy(1)
            is_new = not machine.knows_overhead(alone) and not all(map(machine.has_exchanges, missing))
            alone_bytes = measure_alone() if is_new else 0  # now, while the engine imports torch
            for size in missing:
                if not machine.has_exchanges(size):
                    tell(f"measuring this machine with {size} processes, once for all jobs")
                    reports = measure_group(engine, size, job=None, budget_s=budget_s)
                    machine = add_to_machine(machine, reports)
                    overheads = measure_trials(engine, size, reports[0].bare, machine)
                    if alone_bytes and not machine.knows_overhead(alone):
                        worker_bytes = machine.process_bytes + alone_bytes
                        overheads.append(Overhead(strategy=alone, num_processes=1, worker_bytes=worker_bytes))
                    machine = msgspec.structs.replace(machine, overheads=(*machine.overheads, *overheads))
                    machine = msgspec.structs.replace(machine, was_busy=machine.was_busy or busy)
                    keep("machines", machine_key(), machine)
                if not profile.has_timings(size):
                    tell(f"measuring the model in {size} processes at once")
                    reports = measure_group(engine, size, job=parts.job, budget_s=budget_s)
                    profile = add_to_profile(profile, reports)
                    profile = msgspec.structs.replace(profile, was_busy=profile.was_busy or busy)
                    keep("profiles", key, profile)
    return profile, machine, is_cached


def _cluster_name(hardware: Hardware, path: str | Path | None) -> str:
    hosts = len({device.host for device in hardware.devices})
    return f"{path}: {len(hardware.devices)} devices on {hosts} hosts"


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
    for name in ("", "strategy", "workers", "step", "exchange", "idle", "memory", "sent"):
        table.add_column(name, justify="left" if name in ("", "strategy") else "right", no_wrap=name != "strategy")
    for prediction in plan.predictions:
        style = {"→": "bold green", "✗": "bright_black"}.get(_mark(plan, prediction), "")
        table.add_row(*_cells(plan, prediction), style=style)
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
