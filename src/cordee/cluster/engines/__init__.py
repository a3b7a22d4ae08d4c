"""Where processes come from: the table of engines, and how one is opened."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from cordee.cluster.engine import GRACE_S, Engine, stop_processes
from cordee.core.errors import JobError, nearest

if TYPE_CHECKING:
    from cordee.core import Job


class EngineEntry(NamedTuple):
    """What the rest of the code knows of an engine."""

    summary: str  # one line
    source: str = ""  # module with `make_source`, which starts agents; empty starts processes on this host
    connects: bool = False  # to a cluster that runs: cluster.connect says where


ENGINES: dict[str, EngineEntry] = {
    "local": EngineEntry("processes on this host"),
    "agents": EngineEntry(
        "hosts on which somebody runs `cordee agent`: the run prints the commands", "cordee.cluster.engines.by_hand"
    ),
    "ray": EngineEntry("actors of a Ray cluster", "cordee.cluster.engines.ray", connects=True),
    "spark": EngineEntry("tasks of a Spark cluster", "cordee.cluster.engines.spark", connects=True),
}


def find_engine(name: str) -> EngineEntry:
    """Return the entry of an engine. Raises JobError for a name that is none."""
    if name not in ENGINES:
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


def is_of_this_host(name: str) -> bool:
    """Whether an engine starts processes on this host only, without agents."""
    return not find_engine(name).source


def work_as_agent(name: str, job: Job) -> int | None:
    """Be an agent until the run ends, if the engine has this process be one; return the exit code.

    Returns None in the launcher. Raises CordeeError.
    """
    entry = find_engine(name)
    module = importlib.import_module(entry.source) if entry.source else None
    work = getattr(module, "work_as_agent", None)  # of engines that run the same command on every host
    code: int | None = work(job) if work is not None else None
    return code


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
    from cordee.cluster.engines.agents import AgentEngine, EngineRequest

    request = EngineRequest(job=job, num_slots=job.strategy.workers)
    return AgentEngine(importlib.import_module(entry.source).make_source(request), preload, request)
