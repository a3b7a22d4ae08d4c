"""What the planner predicts beside what runs then take: every model, strategy and number of workers.

In each round this machine and each model are measured again, and right after that the model is trained in
each of the ways that were predicted, with the settings the planner thought best. A step's time is the median over
windows of the run, the first left out. Before and after each run a fixed piece of computing is timed: where it takes
another time than it took beside the profile, the machine had other work, and the run is made again; the calmest counts,
as it was. Runs of several workers share a process that their own are forked from, so that each of them need not import
torch. Of the rounds of a way the median error counts. Without `--cases` it also takes the time of planning itself.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from cordee.bench.harness import Report, describe_machine, find_unknown, is_wanted
from cordee.bench.planner_figures import PlanTimes, Trial, make_rows
from cordee.cluster.engine import Engine
from cordee.cluster.engines import open_engine
from cordee.compute.devices import MemoryWatch
from cordee.core import Job
from cordee.core.errors import CordeeError, JobError
from cordee.launch import train
from cordee.planner.hardware import DescribedCluster, Device, Link
from cordee.planner.measuring import median_s
from cordee.planner.plan import Plan
from cordee.planner.planning import kept_machine, plan_and_work, profile_of
from cordee.planner.prediction import Prediction, Work
from cordee.planner.search import is_synchronous, search
from cordee.planner.simulator.team import simulate_team
from cordee.planner.trials import run_trial, step_of
from cordee.runs import PROCESS_MODULES

ROUNDS = 3
STRATEGIES = ("single", "data_parallel", "parameter_server", "sharded", "pipeline", "tensor")
WORKERS = (1, 2, 4)
WINDOWS = 8  # that a run is cut into
RUN_S = 3.0  # that a run should train for
LEAST_STEPS, MOST_STEPS = 16, 600
REFERENCE_S = 0.5
MOST_ATTEMPTS = 3
PLANNED = "resnet20"  # of which planning is timed
NUM_DEVICES = 64  # that are searched for it
DISTURBED = 0.15  # the machine is slower or faster by this than beside the profile


class Case(NamedTuple):
    """A job to predict and to run."""

    name: str
    model: dict[str, Any]
    data: dict[str, Any]
    batch_size: int


_IMAGES = {"use": "synthetic", "shape": [3, 32, 32], "num_classes": 10, "size": 4096, "test_size": 0}
_TOKENS = {"use": "synthetic", "kind": "tokens", "shape": [64], "num_classes": 256, "size": 2048, "test_size": 0}
_GREY = {"use": "synthetic", "shape": [1, 28, 28], "num_classes": 10, "size": 8192, "test_size": 0}
CASES = (
    Case("mlp", {"use": "mlp", "hidden": [1024, 1024]}, _GREY, 128),
    Case("lenet", {"use": "lenet"}, _GREY, 128),
    Case("resnet20", {"use": "resnet", "depth": 20}, _IMAGES, 64),
    Case("wide_resnet", {"use": "wide_resnet", "depth": 10, "widen_factor": 2}, _IMAGES, 32),
    Case("gpt", {"use": "gpt", "num_layers": 4, "embedding_width": 128}, _TOKENS, 32),
)


def measure(
    *,
    rounds: int,
    say: Callable[[str], None],
    cases: Sequence[str] = (),
    journal: Path | None = None,
    workers: Sequence[int] = WORKERS,
    run_s: float = RUN_S,
    budget_s: float = 4.0,
) -> Report:
    """Predict and run what `cases` names, or everything; for `cordee bench planner`. `rounds` plans and runs of each.

    `cases` are patterns of "model/strategy/workers", of which the last parts may be left out. What is done is kept in
    `journal`, if there is one, and not done again when the benchmark is called again. A strategy that fails is reported
    and left out.
    """
    wanted = [pattern.strip() for pattern in cases]
    _refuse_unknown(wanted, workers)
    found = _read_journal(journal, say)
    for number in range(rounds):
        for case in CASES:
            names = [f"{case.name}/{strategy}/{count}" for strategy in STRATEGIES for count in workers]
            if not any(is_wanted(name, wanted) for name in names):
                continue
            say(f"{case.name}, round {number + 1} of {rounds}: profiling")
            earlier = [trial for trial in found if trial.round == number]
            for trial in _try(case, number, earlier, workers, wanted, run_s=run_s, budget_s=budget_s, say=say):
                found.append(trial)
                _write_journal(journal, trial)
                say(trial.describe())
    times = None
    if not wanted:
        say(f"{PLANNED}: the time of a plan")
        times = _time_plan()
    settings = {
        "rounds": rounds,
        "workers": list(workers),
        "run_seconds": run_s,
        "cases": [msgspec.to_builtins(case._asdict()) for case in CASES],
    }
    raw: dict[str, list[float]] = {}
    for trial in found:
        name = "/".join(map(str, trial.way))
        for what, value in (
            ("predicted", 1e3 * trial.prediction.step_s),
            ("measured", 1e3 * trial.step_s),
            ("ratio of the reference", trial.load),
        ):
            raw.setdefault(f"{name}, {what}", []).append(value)
    return Report("planner", describe_machine(), settings, raw, "ms", make_rows(found, times))


def _try(
    case: Case,
    number: int,
    earlier: Sequence[Trial],
    workers: Sequence[int],
    wanted: Sequence[str],
    *,
    run_s: float,
    budget_s: float,
    say: Callable[[str], None],
) -> Iterator[Trial]:
    """Yield what is found in one round for one model. `earlier` was found in this round already."""
    done = {trial.way for trial in earlier}
    before_s = reference_s()
    is_new = not any(model == case.name for model, _, _ in done)
    # The machine is measured again with the first model, and each model where nothing was run yet.
    made, work = plan_and_work(
        job_of(case), max(workers), fresh=not earlier, fresh_profile=is_new or not earlier, budget_s=budget_s
    )
    profile_s = (before_s + reference_s()) / 2
    with open_engine(PROCESS_MODULES) as engine:
        for prediction in _to_run(made, workers):
            way = (case.name, prediction.strategy, prediction.workers)
            name = "/".join(map(str, way))
            if way in done or not is_wanted(name, wanted):
                continue
            try:
                run = _run_calmly(engine, case, prediction, run_s, profile_s)
            except CordeeError as error:
                say(f"{name}: left out: {error}")
                continue
            yield Trial(
                round=number,
                model=case.name,
                prediction=prediction,
                simulated_s=simulate_team(prediction, work).step_s,
                step_s=run.step_s,
                load=run.load,
                peak_bytes=run.peak_bytes,
                base_bytes=kept_machine().process_bytes,
            )


def _time_plan() -> PlanTimes:
    """Return how long planning takes: the command with nothing measured before, with all of it, and the search."""
    case = next(case for case in CASES if case.name == PLANNED)
    with tempfile.TemporaryDirectory(prefix="cordee-bench-") as folder:
        path = Path(folder) / "job.toml"
        path.write_text(job_of(case).to_toml(), encoding="utf-8")
        started = time.perf_counter()
        _plan_by_command(path, "--fresh")
        fresh_s = time.perf_counter() - started
        cached = _plan_by_command(path)
    profile = profile_of(job_of(case))
    devices = [Device(f"node-{index // 8}", "gpu", 40.0, 80e9) for index in range(NUM_DEVICES)]
    networks = {device.host: Link(20e-6, 3e9) for device in devices}
    hardware = DescribedCluster(devices, Link(5e-6, 2e11), networks, overlaps=True)
    started = time.perf_counter()
    search(Work(profile, 64 * NUM_DEVICES, hardware), NUM_DEVICES)
    return PlanTimes(fresh_s=fresh_s, cached_s=cached["profile_s"], search_s=time.perf_counter() - started)


def _plan_by_command(path: Path, *options: str) -> dict[str, Any]:
    # -P: a file in the working folder that is called like a module of Python's is not that module.
    command = [sys.executable, "-P", "-m", "cordee", "plan", str(path), "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CordeeError(f"`cordee plan` failed: {done.stderr.strip()}")
    plan: dict[str, Any] = json.loads(done.stdout)
    return plan


def job_of(case: Case) -> Job:
    return Job.from_dict(
        {
            "name": case.name,
            "model": case.model,
            "data": case.data,
            "optimizer": {"use": "sgd", "lr": 0.001, "momentum": 0.9},
            "training": {"batch_size": case.batch_size, "steps": MOST_STEPS},
            "evaluation": {"every_epochs": 0},
            "checkpoint": {"every_steps": 0},
        }
    )


def reference_s() -> float:
    """Return how long a fixed piece of computing takes now, on one core."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(12544, 16))
    inputs = torch.ones(16, 3, 32, 32)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return median_s(lambda: model(inputs).sum().backward(), budget_s=REFERENCE_S)
    finally:
        torch.set_num_threads(num_threads)


def _to_run(made: Plan, workers: Sequence[int]) -> list[Prediction]:
    """Return the predictions of ways to run, the fewest workers first."""
    able = [p for p in made.predictions if p.strategy in STRATEGIES and p.workers in workers and is_synchronous(p)]
    return sorted(able, key=lambda p: (p.workers, p.strategy))


class Run(NamedTuple):
    """What a run took."""

    step_s: float
    peak_bytes: int  # beyond what the process had before
    load: float  # the reference beside it over the one beside the profile


def _run_calmly(engine: Engine, case: Case, prediction: Prediction, run_s: float, profile_s: float) -> Run:
    """Run, again where the machine was busier or less busy than beside the profile; return the calmest run."""
    attempts: list[Run] = []
    before_s = reference_s()
    while len(attempts) < MOST_ATTEMPTS:
        step_s, peak_bytes = run_once(engine, job_of(case), prediction, run_s)
        after_s = reference_s()
        attempts.append(Run(step_s, peak_bytes, (before_s + after_s) / 2 / profile_s))
        before_s = after_s
        if abs(attempts[-1].load - 1) <= DISTURBED:
            break
    return min(attempts, key=lambda run: abs(run.load - 1))


def run_once(engine: Engine, job: Job, prediction: Prediction, run_s: float) -> tuple[float, int]:
    """Return the seconds of a step in a run of its own, and its peak of memory in bytes (0 where it is not known)."""
    steps = max(LEAST_STEPS, min(MOST_STEPS, round(run_s / prediction.step_s)))
    changes = {
        "training": msgspec.structs.replace(job.training, steps=steps),
        "monitoring": msgspec.structs.replace(job.monitoring, every_steps=max(1, steps // WINDOWS)),
        "strategy": msgspec.structs.replace(
            job.strategy, name=prediction.strategy, workers=prediction.workers, settings=prediction.settings
        ),
    }
    job = msgspec.structs.replace(job, **changes)
    if prediction.workers > 1:
        found = run_trial(engine, job)
        return found.step_s, found.peak_bytes - kept_machine().process_bytes if found.peak_bytes else 0
    # In a process of its own: this one has grown already.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as pool, tempfile.TemporaryDirectory(prefix="cordee-bench-") as folder:
        try:
            return pool.submit(_train_alone, job.to_toml(), folder).result()
        except BrokenProcessPool:
            raise CordeeError("the process that trains alone ended without a result") from None


def _train_alone(toml: str, folder: str) -> tuple[float, int]:
    path = Path(folder) / "job.toml"
    path.write_text(toml, encoding="utf-8")
    memory = MemoryWatch()
    done = train(path, run_dir=Path(folder) / "run", quiet=True)
    rates = [event["samples_per_second"] for event in done.events() if event["type"] == "step"]
    peak_bytes = done.summary.peak_memory_bytes or 0
    return step_of(rates, Job.load(path).training.batch_size), peak_bytes and peak_bytes - memory.start_bytes


def _refuse_unknown(patterns: Sequence[str], workers: Sequence[int]) -> None:
    names = [f"{case.name}/{strategy}/{number}" for case in CASES for strategy in STRATEGIES for number in workers]
    if (unknown := find_unknown(patterns, names)) is not None:
        raise JobError(
            f"--cases {unknown!r} names no case: write model/strategy/workers, as in 'lenet', 'gpt/tensor' or "
            f"'*/pipeline/4' (models: {', '.join(case.name for case in CASES)}; "
            f"strategies: {', '.join(STRATEGIES)}; workers: {', '.join(map(str, workers))})"
        )


def _read_journal(journal: Path | None, say: Callable[[str], None]) -> list[Trial]:
    if journal is None or not journal.exists():
        return []
    try:
        found = [msgspec.json.decode(line, type=Trial) for line in journal.read_bytes().splitlines() if line]
    except (OSError, msgspec.DecodeError) as error:
        raise JobError(f"cannot continue from {journal}: {error}; remove it to begin again") from None
    say(f"{len(found)} cases are in {journal} already")
    return found


def _write_journal(journal: Path | None, trial: Trial) -> None:
    if journal is not None:
        journal.parent.mkdir(parents=True, exist_ok=True)
        with journal.open("ab") as file:
            file.write(msgspec.json.encode(trial) + b"\n")
