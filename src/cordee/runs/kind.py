"""The kinds of run: how the processes of a run are led. A strategy's entry in the table names its kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from cordee.cluster.coordinator import CoordinatorSpec, Leader, run_coordinator
from cordee.cluster.engine import Engine, Place
from cordee.cluster.engines import is_of_this_host
from cordee.cluster.launcher_link import LauncherLink
from cordee.cluster.member_link import MemberSpec
from cordee.cluster.supervisor import Supervisor
from cordee.core import Job
from cordee.data.source import fingerprint
from cordee.monitoring import Monitor, RunDirectory, Summary
from cordee.runs.dispatched import worker as dispatched_worker
from cordee.runs.dispatched.coordinator import DispatchedLeader
from cordee.runs.dispatched.facts import RunFacts, check_dispatched
from cordee.runs.federated import worker as federated_worker
from cordee.runs.federated.coordinator import FederatedLeader
from cordee.runs.federated.facts import FederatedFacts, check_federated
from cordee.runs.script import worker as script_worker
from cordee.runs.script.coordinator import ScriptLeader
from cordee.runs.script.program import SCRIPT, is_script
from cordee.runs.team import worker as team_worker
from cordee.runs.team.coordinator import TeamLeader
from cordee.strategies.parameter_server.strategy import settings_of
from cordee.strategies.table import STRATEGIES
from cordee.training.components import Components


class Role(NamedTuple):
    """What processes of a run do, how many there are at its start, and where."""

    name: str
    num_processes: int
    place: Place = "slot"


class RunKind(Protocol):
    """How a run is led."""

    def encrypts(self, job: Job) -> bool:
        """Return whether what goes between hosts, gradients and weights, is encrypted."""

    def check(self, components: Components) -> None:
        """Raise JobError for a job that cannot be run this way, before a run begins."""

    def roles(self, job: Job) -> Sequence[Role]: ...

    def facts(self, components: Components) -> dict[str, Any]:
        """Return what the coordinator has to know of the components, so that it need not build them."""

    def coordinate(self, spec: CoordinatorSpec, launcher: LauncherLink) -> Leader:
        """Return what decides, in the process of the coordinator."""

    def work(self, spec: MemberSpec) -> Exception | None:
        """Be a worker of the run until its end; return why this one could not continue, if it could not."""


class _Team:
    """Workers that train in lockstep, generation by generation."""

    def encrypts(self, job: Job) -> bool:
        return job.cluster.encrypts

    def check(self, components: Components) -> None:
        pass

    def roles(self, job: Job) -> Sequence[Role]:
        return [Role("worker", job.strategy.workers)]

    def facts(self, components: Components) -> dict[str, Any]:
        return {"data": fingerprint(components.splits)}

    def coordinate(self, spec: CoordinatorSpec, launcher: LauncherLink) -> Leader:
        return TeamLeader(spec, launcher)

    def work(self, spec: MemberSpec) -> Exception | None:
        return team_worker.work(spec)


class _Dispatched:
    """Workers that get work on demand, servers of parameters, and an evaluator."""

    def encrypts(self, job: Job) -> bool:
        return True

    def check(self, components: Components) -> None:
        check_dispatched(components)

    def roles(self, job: Job) -> Sequence[Role]:
        settings = settings_of(job)
        num_servers = settings.servers * settings.replicas
        others = [Role("server", num_servers, settings.place), Role("evaluator", 1, settings.place)]
        return [Role("worker", job.strategy.workers), *others]

    def facts(self, components: Components) -> dict[str, Any]:
        facts: dict[str, Any] = msgspec.to_builtins(RunFacts.of(components))
        return facts

    def coordinate(self, spec: CoordinatorSpec, launcher: LauncherLink) -> Leader:
        return DispatchedLeader(spec, launcher)

    def work(self, spec: MemberSpec) -> Exception | None:
        return dispatched_worker.work(spec)


class _Federated:
    """Workers that train simulated clients, round after round. A run with one worker has a coordinator as well."""

    def encrypts(self, job: Job) -> bool:
        return True

    def check(self, components: Components) -> None:
        check_federated(components)

    def roles(self, job: Job) -> Sequence[Role]:
        return [Role("coordinator", 1, "launcher"), Role("worker", job.strategy.workers)]

    def facts(self, components: Components) -> dict[str, Any]:
        facts: dict[str, Any] = msgspec.to_builtins(FederatedFacts.of(components))
        return facts

    def coordinate(self, spec: CoordinatorSpec, launcher: LauncherLink) -> Leader:
        return FederatedLeader(spec, launcher)

    def work(self, spec: MemberSpec) -> Exception | None:
        return federated_worker.work(spec)


class _Script(_Team):
    """Workers that execute one's own script, whose loop is taken from one generation to the next."""

    def coordinate(self, spec: CoordinatorSpec, launcher: LauncherLink) -> Leader:
        return ScriptLeader(spec, launcher)

    def work(self, spec: MemberSpec) -> Exception | None:
        return script_worker.work(spec)


KINDS: dict[str, RunKind] = {"team": _Team(), "dispatched": _Dispatched(), "rounds": _Federated(), SCRIPT: _Script()}


def kind_of(job: Job) -> str:
    """Return the kind of run that the job's strategy has, or that of a script."""
    if is_script(job):
        return SCRIPT
    return STRATEGIES[job.strategy.name].run_kind


def needs_engine(job: Job) -> bool:
    """Whether the run has several processes, or is to be elsewhere; a run of one is the launcher itself."""
    has_others = sum(role.num_processes for role in KINDS[kind_of(job)].roles(job)) > 1
    return has_others or not is_of_this_host(job.cluster.engine)


def describe_without_slot(job: Job) -> str:
    """Return which processes of the run need no slot, and where they are; empty if it has none but its coordinator."""
    roles = KINDS[kind_of(job)].roles(job)
    found = []
    for place, where in (("launcher", "on this host"), ("beside", "beside workers")):
        others = [role for role in roles if role.place == place and role.name != "coordinator"]
        names = " and ".join(f"{role.num_processes} {role.name}{'s' * (role.num_processes > 1)}" for role in others)
        if names:
            found.append(f"{names} {where}, without a slot")
    return "; ".join(found)


def lead_run(
    components: Components,
    directory: RunDirectory,
    monitor: Monitor,
    should_stop: Callable[[], bool],
    engine: Engine,
    *,
    resume: bool,
    marker: str = "",
) -> Summary:
    """Train on the engine's processes and return the summary. `marker` is what members look for in the storage.

    Raises TrainingError that names the process that failed first, its step and its error. Ending the processes that are
    left is the engine's part.
    """
    facts = KINDS[kind_of(components.job)].facts(components)
    return lead_job(components.job, directory, monitor, should_stop, engine, facts=facts, resume=resume, marker=marker)


def lead_job(
    job: Job,
    directory: RunDirectory,
    monitor: Monitor,
    should_stop: Callable[[], bool],
    engine: Engine,
    *,
    facts: dict[str, Any],
    resume: bool,
    marker: str = "",
) -> Summary:
    """Like `lead_run`, for a job whose components only its workers have. `facts` are for its coordinator."""
    supervisor = Supervisor(engine, monitor, should_stop, failure_timeout_s=job.cluster.failure_timeout_s)
    return supervisor.run(
        "cordee.runs.kind:main", directory.path, kind=kind_of(job), facts=facts, resume=resume, marker=marker
    )


def main(argument: dict[str, Any]) -> int:
    """Be the coordinator of a run until its end; return the exit code. Called in a fresh process of the engine."""
    spec = msgspec.convert(argument, CoordinatorSpec)
    return run_coordinator(spec, KINDS[spec.kind].coordinate)
