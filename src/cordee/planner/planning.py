"""From a job to a plan: profile what is not in the cache, search, choose."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from cordee.cluster.engines import open_engine
from cordee.compute import usable_cores
from cordee.core import Job
from cordee.core.errors import CordeeError, JobError
from cordee.core.importing import stop_import
from cordee.core.references import LIVE_PREFIX
from cordee.models.slicing import choose_slicing
from cordee.planner.cluster_file import load_cluster
from cordee.planner.cost_model import MODELS, with_runs
from cordee.planner.hardware import Hardware, ThisMachine
from cordee.planner.kernels import choose_kernels
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
from cordee.planner.plan import Plan, place, refuse_without_choice, refuse_without_room
from cordee.planner.prediction import Prediction, Work
from cordee.planner.probes import add_to_machine, add_to_profile, measure_group
from cordee.planner.profiling import BUDGET_S, assemble_alone, profile_key, take_profile
from cordee.planner.recording import forget_runs, read_runs
from cordee.planner.search import CLOSE, choose, degrees, is_candidate, search
from cordee.planner.trials import measure_alone, measure_trials
from cordee.runs import PROCESS_MODULES
from cordee.strategies.choice import make_strategy
from cordee.strategies.table import STRATEGIES, usual_strategy
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
    if fresh or fresh_profile:
        forget_runs(parts)
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
    is_reliable = hardware is None and not (profile.was_busy or machine.was_busy)
    work = Work(profile, job.training.batch_size, hardware or here, job.training.accumulate, is_reliable)
    if hardware is None:
        work = with_runs(work, read_runs(parts).ways, time.time())
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
