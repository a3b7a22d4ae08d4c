"""A served run, seen from the launcher: has a coordinator lead it, and returns what came out."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable

import msgspec

from cordee.assembly import Assembly
from cordee.cluster.local import LocalEngine
from cordee.cluster.supervisor import Supervisor
from cordee.communication.keys import make_keys
from cordee.core.errors import JobError
from cordee.monitoring import Monitor, RunDirectory, Summary
from cordee.served.coordinator import RunFacts


def check_served(parts: Assembly) -> None:
    """Raise JobError for a job that cannot be served, before anything is started."""
    if parts.splits.train.num_samples is None:
        raise JobError(
            "strategy 'parameter_server' hands out samples by their number, and a stream has none: "
            "use a Dataset with a length, or strategy 'data_parallel'"
        )


class ServedRun:
    """One run with local workers and servers. `lead` takes it from start to end."""

    def __init__(
        self,
        parts: Assembly,
        directory: RunDirectory,
        monitor: Monitor,
        should_stop: Callable[[], bool],
    ) -> None:
        self._parts = parts
        self._directory = directory
        self._monitor = monitor
        self._should_stop = should_stop

    def lead(self, engine: LocalEngine, *, resume: bool) -> Summary:
        """Train, and return the summary. Raises TrainingError that names the process that failed, and why."""
        parts = self._parts
        assert parts.splits.train.num_samples is not None and parts.total_steps is not None
        facts = RunFacts(
            num_samples=parts.splits.train.num_samples,
            total_steps=parts.total_steps,
            counts_classes=parts.splits.num_classes is not None,
            has_test=parts.test is not None,
            lr_factor=parts.recipe.lr_factor,
            description=parts.describe(),
        )
        run_id, path = secrets.token_hex(8), self._directory.path.absolute()
        server_keys, (client_keys, control_keys) = make_keys(2)
        timeout_s = parts.job.cluster.failure_timeout_s
        supervisor = Supervisor(engine, self._monitor, self._should_stop, failure_timeout_s=timeout_s)
        result = supervisor.run(
            "cordee.served.coordinator:main",
            path,
            run_id,
            {
                "run_dir": str(path),
                "run_id": run_id,
                "server_keys": server_keys.to_text(),
                "client_keys": client_keys.to_text(),
                "control_keys": control_keys.to_text(),
                "resume": resume,
                "launcher_pid": os.getpid(),
                "facts": msgspec.to_builtins(facts),
            },
        )
        return msgspec.convert(result, Summary)
