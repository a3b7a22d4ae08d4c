"""What the launcher of a federated run finds out from the job's components, and whether there can be such a run."""

from __future__ import annotations

import msgspec
import torch

from cordee.compute.schedules import PlateauSchedule
from cordee.core import Job
from cordee.core.errors import JobError
from cordee.data.source import fingerprint
from cordee.monitoring.events import RunStarted
from cordee.strategies.federated.algorithms import make_algorithm
from cordee.strategies.federated.client import num_set_aside
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
        sizes: list[int] = partition_of(components).sizes.tolist()
        own = {"threads": num_threads(components.job), "epochs": None, "clients": len(sizes)}
        description = msgspec.structs.replace(components.describe(), **own)
        return cls(
            sizes=sizes,
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
    _check_single_samples(components, partition)
    if parts.privacy is not None:
        accountant = Accountant(settings, parts.privacy, partition.num_clients)
        if not accountant.allows(1):
            raise JobError(
                f"one round spends epsilon = {accountant.epsilon(1):.4g} at delta = {parts.privacy.delta:g}, more than "
                f"strategy.privacy.max_epsilon = {parts.privacy.max_epsilon:g}: raise strategy.privacy.noise"
            )


def _check_single_samples(components: Components, partition: Partition) -> None:
    """Raise JobError where a client trains on one sample by itself, and the model cannot: batch norms need several."""
    job, model = components.job, components.model
    settings, size = settings_of(job), job.training.batch_size
    for client, num_samples in enumerate(partition.sizes.tolist()):
        num_trained = num_samples - num_set_aside(num_samples, settings.client_test)
        num_batches = -(-num_trained // size)
        reaches_last = settings.local_steps is None or settings.local_steps >= num_batches
        smallest = num_trained - (num_batches - 1) * size if reaches_last else size
        if smallest // job.training.accumulate > 1:
            continue
        kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                components.computation.outputs(model.train(), components.splits.train.gather(partition.of(client)[:1]))
        except ValueError as error:
            raise JobError(
                f"client {partition.name(client)} trains on {num_trained} samples, and with training.batch_size = "
                f"{size} (and accumulate = {job.training.accumulate}) on one of them by itself, which this model "
                f"cannot: {error}. Set another batch_size, or divide the data in another way"
            ) from error
        finally:
            for buffer, value in kept:
                buffer.copy_(value)
        return  # it can
