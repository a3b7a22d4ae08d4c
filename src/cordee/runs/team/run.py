"""The launcher's side of a run with several workers: has a coordinator lead it, and returns what came out."""

from __future__ import annotations

from collections.abc import Callable

from cordee.cluster.engine import Engine
from cordee.cluster.supervisor import Supervisor
from cordee.core.temporary import temporary_folder
from cordee.monitoring import Monitor, RunDirectory, Summary
from cordee.training.components import Components


class TeamRun:
    """One run with local workers, seen from the launcher."""

    def __init__(
        self, parts: Components, directory: RunDirectory, monitor: Monitor, should_stop: Callable[[], bool]
    ) -> None:
        self._job = parts.job
        self._directory = directory
        self._monitor = monitor
        self._should_stop = should_stop

    def lead(self, engine: Engine, *, resume: bool) -> Summary:
        """Train on the engine's workers and return the summary of the one that spoke for the last team.

        Raises TrainingError that names the worker that failed first, its step and its error. Ending the processes
        that are left is the engine's part.
        """
        timeout_s = self._job.cluster.failure_timeout_s
        supervisor = Supervisor(engine, self._monitor, self._should_stop, failure_timeout_s=timeout_s)
        target, path = "cordee.runs.team.coordinator:main", self._directory.path
        with temporary_folder() as store:
            return supervisor.run(target, path, resume=resume, store=store)
