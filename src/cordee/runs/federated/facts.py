"""What the launcher of a federated run finds out from the job's components, and whether there can be such a run."""

from __future__ import annotations

import msgspec

from cordee.compute.schedules import PlateauSchedule
from cordee.core import Job
from cordee.core.errors import JobError
from cordee.data.source import fingerprint
from cordee.monitoring.events import RunStarted
from cordee.strategies.federated.algorithms import make_algorithm
from cordee.strategies.federated.partition import Partition, divide
from cordee.strategies.federated.privacy import Accountant
from cordee.strategies.federated.schedule import Schedule
from cordee.strategies.federated.strategy import settings_of
from cordee.training.callbacks import refuse_on_step
from cordee.training.components import Components


class FederatedFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher knows of the job's components, so that the coordinator need not build them."""

    sizes: list[int]  # samples of each client
    data: str  # its fingerprint
    has_test: bool
    lower_is_better: tuple[str, ...] = ()
    description: RunStarted  # without its place

    @classmethod
    def of(cls, components: Components) -> FederatedFacts:
        description = msgspec.structs.replace(components.describe(), threads=num_threads(components.job), epochs=None)
        return cls(
            sizes=partition_of(components).sizes.tolist(),
            data=fingerprint(components.splits),
            has_test=components.test is not None,
            lower_is_better=tuple(components.lower_is_better),
            description=description,
        )


def num_threads(job: Job) -> int:
    """Return the kernel threads of a worker: part of the arithmetic, and so the same for any number of workers."""
    return job.training.num_threads or 1


def partition_of(components: Components) -> Partition:
    """Return the samples of each client. Raises JobError for a client without."""
    job, splits = components.job, components.splits
    return divide(settings_of(job).parts.partition, splits.train, splits.num_classes, job.seed)


def check_federated(components: Components) -> None:
    """Raise JobError for a job that cannot be simulated, before anything is started."""
    job, name = components.job, components.job.strategy.name
    if components.splits.train.num_samples is None:
        raise JobError(f"strategy '{name}' divides samples among clients by their number, and a stream has none")
    settings = settings_of(job)
    parts = settings.parts
    if parts.secure is not None:
        raise JobError(
            "strategy.secure is for real sites (cordee federation): in a simulation there is nobody to hide an update "
            "from. Remove strategy.secure"
        )
    if isinstance(components.recipe.schedule, PlateauSchedule):
        raise JobError("schedule.use = 'plateau' follows evaluations, which clients do not have: use another schedule")
    refuse_on_step(components.callbacks, name)
    if components.callbacks:
        raise JobError(f"[callbacks] are not called by strategy '{name}' in this version: remove them")
    partition = partition_of(components)
    settings.num_asked(partition.num_clients)
    algorithm = make_algorithm(settings.use, job.python_path)
    Schedule(settings, algorithm, job.seed, partition.sizes.tolist(), job.training.batch_size).check()
    if settings.client_test and int(partition.sizes.min()) < 2:
        raise JobError("strategy.client_test sets samples aside, and a client has one only: set partition.min_samples")
    if parts.privacy is not None:
        accountant = Accountant(settings, parts.privacy, partition.num_clients)
        if not accountant.allows(1):
            raise JobError(
                f"one round spends epsilon = {accountant.epsilon(1):.4g} at delta = {parts.privacy.delta:g}, more than "
                f"strategy.privacy.max_epsilon = {parts.privacy.max_epsilon:g}: raise strategy.privacy.noise"
            )
