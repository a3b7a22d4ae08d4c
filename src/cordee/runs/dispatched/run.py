"""A served run, seen from the launcher: has a coordinator lead it, and returns what came out."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from cordee.cluster.engine import Engine
from cordee.cluster.supervisor import Supervisor
from cordee.core.errors import JobError
from cordee.data.source import fingerprint
from cordee.monitoring import Monitor, RunDirectory, Summary
from cordee.runs.dispatched.spec import RunFacts
from cordee.training.components import Components


def check_dispatched(parts: Components) -> None:
    """Raise JobError for a job that cannot be served, before anything is started."""
    if parts.splits.train.num_samples is None:
        raise JobError(
            "strategy 'parameter_server' hands out samples by their number, and a stream has none: "
            "use a Dataset with a length, or strategy 'data_parallel'"
        )


class DispatchedRun:
    """One run with local workers and servers. `lead` takes it from start to end."""

    def __init__(
        self,
        parts: Components,
        directory: RunDirectory,
        monitor: Monitor,
        should_stop: Callable[[], bool],
    ) -> None:
        self._parts = parts
        self._directory = directory
        self._monitor = monitor
        self._should_stop = should_stop

    def lead(self, engine: Engine, *, resume: bool) -> Summary:
        """Train, and return the summary. Raises TrainingError that names the process that failed, and why."""
        parts = self._parts
        assert parts.splits.train.num_samples is not None and parts.total_steps is not None
        trained = [parameter for parameter in parts.model.parameters() if parameter.requires_grad]
        optimizer = parts.recipe.make(parts.model.named_parameters())
        facts = RunFacts(
            num_samples=parts.splits.train.num_samples,
            total_steps=parts.total_steps,
            counts_classes=parts.splits.num_classes is not None,
            has_test=parts.test is not None,
            lr=float(optimizer.param_groups[0]["initial_lr"]),
            lr_factor=parts.recipe.lr_factor,
            dtype=str(trained[0].dtype).removeprefix("torch."),
            data=fingerprint(parts.splits) if parts.job.cluster.address else "",
            description=parts.describe(),
        )
        timeout_s = parts.job.cluster.failure_timeout_s
        supervisor = Supervisor(engine, self._monitor, self._should_stop, failure_timeout_s=timeout_s)
        target, path = "cordee.runs.dispatched.coordinator:main", self._directory.path
        return supervisor.run(target, path, resume=resume, facts=msgspec.to_builtins(facts))
