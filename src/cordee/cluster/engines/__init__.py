"""Where processes come from: the table of engines, and how one is opened."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cordee.cluster.engine import GRACE_S, Engine, stop_processes
from cordee.core.errors import JobError, nearest
from cordee.core.findings import Finding

if TYPE_CHECKING:
    from cordee.core import Job


class EngineEntry(NamedTuple):
    """What the rest of the code knows of an engine."""

    summary: str  # one line
    source: str = ""  # module with `make_source`, which starts agents; empty starts processes on this host
    connects: bool = False  # to a cluster that runs: cluster.connect says where
    may_ask: bool = False  # for more agents than the run begins with
    other_names: tuple[str, ...] = ()  # by which users may look for it


ENGINES: dict[str, EngineEntry] = {
    "local": EngineEntry("processes on this host"),
    "agents": EngineEntry(
        "hosts on which somebody runs `cordee agent`: the run prints the commands",
        "cordee.cluster.engines.by_hand",
        may_ask=True,
    ),
    "env": EngineEntry(
        "the processes that torchrun, srun, mpirun, Kubernetes or SkyPilot has started",
        "cordee.cluster.engines.environment",
        other_names=("torchrun", "slurm", "srun", "mpi", "mpirun", "openmpi", "kubernetes", "kubeflow", "skypilot"),
    ),
    "ray": EngineEntry("actors of a Ray cluster", "cordee.cluster.engines.ray", connects=True, may_ask=True),
    "spark": EngineEntry("tasks of a Spark cluster", "cordee.cluster.engines.spark", connects=True, may_ask=True),
}


def find_engine(name: str) -> EngineEntry:
    """Return the entry of an engine. Raises JobError for a name that is none."""
    if name not in ENGINES:
        for known, entry in ENGINES.items():
            if name.lower() in entry.other_names:
                raise JobError(f"there is no engine {name!r}: use the engine {known!r} for {entry.summary}")
        raise JobError(f"there is no engine {name!r}{nearest(name, ENGINES)}: it is one of {', '.join(ENGINES)}")
    return ENGINES[name]


def check_settings(job: Job) -> None:
    """Raise JobError for settings of [cluster] that the job's engine does not have."""
    if job.cluster.connect and not find_engine(job.cluster.engine).connects:
        able = " or ".join(repr(name) for name, entry in ENGINES.items() if entry.connects)
        raise JobError(
            f"cluster.connect = {job.cluster.connect!r} has a meaning only with cluster.engine = {able}, and the "
            f"engine is {job.cluster.engine!r}: set cluster.engine, or remove cluster.connect"
        )
    if job.cluster.spares and not find_engine(job.cluster.engine).may_ask:
        able = ", ".join(repr(name) for name, entry in ENGINES.items() if entry.may_ask)
        raise JobError(
            f"cluster.spares = {job.cluster.spares} has a meaning only with the engines {able}, and the engine is "
            f"{job.cluster.engine!r}: remove cluster.spares. Under 'env' processes beyond strategy.workers are reserves"
        )


def is_of_this_host(name: str) -> bool:
    """Whether an engine starts processes on this host only, without agents."""
    return not find_engine(name).source


def work_as_agent(name: str, job: Job) -> int | None:
    """Be an agent until the run ends, if the engine has this process be one; return the exit code.

    Returns None in the launcher. Raises CordeeError.
    """
    work = _function(name, "work_as_agent")  # of engines that run the same command on every host
    code: int | None = work(job) if work is not None else None
    return code


def place_run(job: Job, run_dir: Path | None, resume: bool) -> tuple[Path | None, bool]:
    """Return the run directory, and whether to resume: what the user says, or else what the engine knows of it.

    A scheduler may have started the job again. Raises JobError if the run to continue cannot be known.
    """
    place = _function(job.cluster.engine, "place_run")
    placed: tuple[Path | None, bool] = (run_dir, resume) if place is None else place(job, run_dir, resume)
    return placed


@contextlib.contextmanager
def lead_launch(name: str) -> Iterator[Callable[[int], None]]:
    """Inside, processes that are agents by `work_as_agent` are heard; leaving has them exit.

    They exit with the code of the error that ends the block, or with what the function is given that this yields.
    """
    lead = _function(name, "lead_launch")
    with contextlib.nullcontext(lambda code: None) if lead is None else lead() as set_code:
        yield set_code


def check_engine(name: str) -> list[Finding]:
    """Say what is wrong with a cluster, before a run."""
    check = _function(name, "check")
    if check is None:
        return [Finding(name, "note", "has no checks of its own: `cordee train` says what is wrong before it starts")]
    return list(check())


def _function(engine: str, name: str) -> Callable[..., Any] | None:
    """Return what an engine does that not every engine has to."""
    entry = find_engine(engine)
    function: Callable[..., Any] | None = None
    if entry.source:
        function = getattr(importlib.import_module(entry.source), name, None)
    return function


@contextlib.contextmanager
def open_engine(preload: Sequence[str] = (), job: Job | None = None) -> Iterator[Engine]:
    """Inside, an engine is there whose processes have imported the modules of `preload`. Leaving ends all of them.

    The engine is the one that the job says; without a job, that of this host. Raises JobError if it cannot be used.
    """
    engine = _make(preload, job)
    grace_s = 0.2  # after an error nobody waits for what processes still have to say
    try:
        yield engine
        grace_s = GRACE_S
    finally:
        try:
            stop_processes(engine, grace_s)
        finally:
            engine.close()


def _make(preload: Sequence[str], job: Job | None) -> Engine:
    from cordee.cluster.engines.local import LocalEngine  # here: fork servers run a module of this package

    entry = ENGINES["local"] if job is None else find_engine(job.cluster.engine)
    if job is None or not entry.source:
        return LocalEngine(preload)
    from cordee.cluster.engines.agent_engine import AgentEngine
    from cordee.cluster.engines.agents import EngineRequest

    request = EngineRequest(job=job, num_slots=job.strategy.workers, num_spares=job.cluster.spares)
    return AgentEngine(importlib.import_module(entry.source).make_source(request), preload, request)
