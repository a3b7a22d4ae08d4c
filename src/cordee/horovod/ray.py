"""`horovod.ray.RayExecutor`: functions as ranks in Ray actors, which stay from one function to the next.

Ray brings functions to the actors and results back, as it does with any function of an actor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from cordee.cluster.engines.ray import connect, import_ray
from cordee.core import env
from cordee.core.errors import JobError
from cordee.core.interrupts import keep_handlers
from cordee.horovod.cluster_ranks import LOOPBACK, Meeting, Outcome, host_of, leave, number_ranks, results_of
from cordee.horovod.running import refuse_given

ENDING_S = 20.0  # for ranks to notice that one of them has failed, before they are ended


class Settings(msgspec.Struct, kw_only=True):
    """How long a start may take."""

    timeout_s: float = 300.0  # for the actors to answer
    placement_group_timeout_s: float = 100.0  # for the CPUs and GPUs to be free


class RayExecutor:
    """Ranks in actors of the Ray that this process is connected to, or that runs on this host."""

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 30.0,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100.0,
        nics: Any = None,
    ) -> Settings:
        """Return settings for a `RayExecutor`. Nothing goes through SSH here."""
        refuse_given(
            "RayExecutor.create_settings", {"ssh_identity_file": ssh_identity_file, "ssh_str": ssh_str}, "no SSH"
        )
        refuse_given("RayExecutor.create_settings", {"nics": nics}, "ranks use the addresses of their Ray nodes")
        return Settings(timeout_s=timeout_s, placement_group_timeout_s=placement_group_timeout_s)

    def __init__(
        self,
        settings: Settings | None = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        override_discovery: bool | None = None,
    ) -> None:
        """`num_workers` ranks wherever there is room, or `num_workers_per_host` on each of `num_hosts` hosts.

        Inside of a placement group, of a Ray Tune trial say, its resources are used.
        """
        elastic = {"min_workers": min_workers, "max_workers": max_workers, "reset_limit": reset_limit}
        elastic["override_discovery"] = override_discovery
        refuse_given("RayExecutor", elastic, "train a job with `cordee train JOB --engine ray`, which is elastic")
        if gpus_per_worker and not use_gpu:
            raise ValueError("gpus_per_worker is set, but use_gpu is False")
        if (num_workers is None) == (num_hosts is None):
            raise ValueError("RayExecutor: give either num_workers, or num_hosts and num_workers_per_host")
        counts = {"num_workers": num_workers, "num_hosts": num_hosts, "num_workers_per_host": num_workers_per_host}
        if wrong := [f"{name}={value}" for name, value in counts.items() if value is not None and value < 1]:
            raise ValueError(f"RayExecutor: {', '.join(wrong)} must be at least 1")
        self._settings = settings or Settings()
        self._per_host = num_workers_per_host if num_hosts is not None else 1
        self._num_bundles = num_hosts if num_hosts is not None else num_workers
        self._is_spread = num_hosts is not None
        gpus = {"GPU": gpus_per_worker or 1} if use_gpu else {}
        self._resources: dict[str, int] = {"CPU": cpus_per_worker, **gpus}
        self._uses_current = use_current_placement_group
        self._ray: Any = None
        self._is_ours = False
        self._group: Any = None
        self._workers: list[Any] = []

    @property
    def num_workers(self) -> int:
        """Return the number of ranks."""
        assert self._num_bundles is not None
        return self._num_bundles * self._per_host

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Start the actors, and in each an object of `executable_cls`, if given, for `execute`.

        Raises JobError if there is no room for them within the times of the settings.
        """
        if self._workers:
            raise JobError("RayExecutor.start: it has been started already")
        self._ray = import_ray()
        address = env.ray_address()
        with keep_handlers():
            self._is_ours, _ = connect(self._ray, address)
        try:
            self._start_workers(extra_env_vars or {})
            made = (executable_cls, tuple(executable_args or ()), dict(executable_kwargs or {}))
            if executable_cls is not None:
                self._gather([worker.make.remote(*made) for worker in self._workers])
        except BaseException:
            self.shutdown()
            raise

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Any = None,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank; return what each returned, in their order.

        Raises TrainingError that names the rank where it failed; the executor is shut down then.
        """
        refuse_given("RayExecutor.run", {"callbacks": callbacks or None}, "read what `cordee train` records instead")
        return self._gather(self.run_remote(fn, args, kwargs))

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Start `fn(*args, **kwargs)` on every rank; return references to the results, for `ray.get`.

        Who uses `ray.get` sees the error of a rank as Ray shows it, and calls `shutdown` after one.
        """
        call = _Call(fn, tuple(args or ()), dict(kwargs or {}))
        return [worker.execute.remote(call) for worker in self._started()]

    def execute(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Call `fn(executable)` on every rank, with the object that `start` made; return the results."""
        return self._gather([worker.execute.remote(fn) for worker in self._started()])

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call `fn(executable)` on rank 0 alone; return the result."""
        return self._gather([self._started()[0].execute.remote(fn)])[0]

    def shutdown(self) -> None:
        """End the actors. Calling it again changes nothing."""
        for worker in self._workers:
            self._ray.kill(worker, no_restart=True)
        self._workers = []
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
            self._group = None
        if self._is_ours:
            self._is_ours = False
            self._ray.shutdown()

    def _started(self) -> list[Any]:
        if not self._workers:
            raise JobError("RayExecutor: call start() before")
        return self._workers

    def _start_workers(self, variables: Mapping[str, str]) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray = self._ray
        current = ray.util.get_current_placement_group() if self._uses_current else None
        group = current or self._reserve()
        # One thread runs functions, the other one answers meanwhile.
        options = {"num_cpus": self._resources["CPU"], "num_gpus": self._resources.get("GPU", 0), "max_concurrency": 2}
        for number in range(self.num_workers):
            place = PlacementGroupSchedulingStrategy(
                placement_group=group,
                placement_group_bundle_index=-1 if current else number // self._per_host,
            )
            actor = ray.remote(**options, max_restarts=0, scheduling_strategy=place)(_Rank)
            self._workers.append(actor.remote(number))
        hosts = self._await([worker.host.remote() for worker in self._workers])
        places = number_ranks(hosts)
        self._workers = [self._workers[places.index(place)] for place in sorted(places)]
        own_address = len(set(hosts)) > 1
        address, port = self._await([self._workers[0].meet.remote(own_address)])[0]
        told = [
            worker.adopt.remote({**variables, **env.script_environment(place, port, address)})
            for worker, place in zip(self._workers, sorted(places), strict=True)
        ]
        self._await(told)

    def _reserve(self) -> Any:
        ray = self._ray
        bundle = {kind: count * self._per_host for kind, count in self._resources.items()}
        strategy = "STRICT_SPREAD" if self._is_spread else "PACK"
        self._group = ray.util.placement_group([bundle] * (self._num_bundles or 0), strategy=strategy)
        limit_s = self._settings.placement_group_timeout_s
        if not self._group.wait(limit_s):
            raise JobError(
                f"RayExecutor: no room for {self._num_bundles} × {bundle} within {limit_s:g} s; the cluster has "
                f"{ray.cluster_resources()}, and free are {ray.available_resources()}: ask for fewer workers, or set "
                "placement_group_timeout_s"
            )
        return self._group

    def _await(self, references: list[Any]) -> list[Any]:
        try:
            return list(self._ray.get(references, timeout=self._settings.timeout_s))
        except self._ray.exceptions.GetTimeoutError:
            raise JobError(f"RayExecutor: the actors did not answer within {self._settings.timeout_s:g} s") from None

    def _gather(self, references: list[Any]) -> list[Any]:
        """Return the results of ranks. Where one fails, the others are ended."""
        waiting = list(references)
        outcomes: list[Outcome] = []
        try:
            while waiting:
                has_failed = any(outcome.error for outcome in outcomes)
                done, waiting = self._ray.wait(waiting, timeout=ENDING_S if has_failed else None)
                if not done:  # they do not notice
                    break
                for reference in done:
                    outcomes.append(self._outcome(references.index(reference), reference))
                    if outcomes[-1].error and not has_failed:
                        self._workers[0].end_meeting.remote()
            results = results_of(outcomes, "horovod.ray")
        except BaseException:
            self.shutdown()
            raise
        return results

    def _outcome(self, rank: int, reference: Any) -> Outcome:
        errors = self._ray.exceptions
        try:
            return Outcome(rank, self._ray.get(reference))
        except errors.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            return Outcome.of_error(rank, cause)._replace(error=str(error))  # with the traceback of that process
        except errors.RayError as error:
            return Outcome.of_error(rank, error)


class _Call:
    """A function with its arguments, as a function of the executable. Ray carries it to the actors."""

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._fn, self._args, self._kwargs = fn, args, kwargs

    def __call__(self, executable: Any) -> Any:
        return self._fn(*self._args, **self._kwargs)


class _Rank:
    """The actor."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._executable: Any = None
        self._meeting: Meeting | None = None

    def host(self) -> str:
        return host_of(self._number)

    def meet(self, is_between_hosts: bool) -> tuple[str, int]:
        """Keep the store, and return where it is."""
        import ray

        self._meeting = Meeting(ray.util.get_node_ip_address() if is_between_hosts else LOOPBACK)
        return self._meeting.address, self._meeting.port

    def end_meeting(self) -> None:
        """Let nobody wait any longer for a rank that has failed."""
        if self._meeting is not None:
            self._meeting.close()

    def adopt(self, variables: Mapping[str, str]) -> None:
        """Take a rank, for `hvd.init()` to find."""
        env.adopt(variables)

    def make(self, kind: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._executable = kind(*args, **kwargs)

    def execute(self, fn: Callable[[Any], Any]) -> Any:
        try:
            return fn(self._executable)
        except BaseException:
            leave()  # others that wait for this rank get an error that names it
            raise


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    *,
    cpus_per_worker: int = 1,
    use_gpu: bool = False,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on `num_proc` ranks in Ray actors, and end them; return what each rank returned.

    `env` are variables of the ranks. Otherwise as `RayExecutor`.
    """
    executor = RayExecutor(num_workers=num_proc, cpus_per_worker=cpus_per_worker, use_gpu=use_gpu)
    executor.start(extra_env_vars=env)
    try:
        return executor.run(fn, args, kwargs)
    finally:
        executor.shutdown()
