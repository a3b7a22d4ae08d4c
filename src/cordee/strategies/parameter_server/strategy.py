"""How `parameter_server` stands in the table of strategies. `cordee.runs.dispatched` leads its run, not the trainer."""

from __future__ import annotations

import msgspec
from torch import nn

from cordee.compute import Computation, OptimizerRecipe
from cordee.core import Batch, Job
from cordee.core.errors import JobError
from cordee.core.job import read_section
from cordee.core.settings import Data
from cordee.parameters.placement import ELEMENTWISE, make_layout
from cordee.strategies.parameter_server.settings import ParameterServerSettings
from cordee.strategies.parameter_server.shard import FixedSum
from cordee.strategies.strategy import Requirements, require_samples


class ParameterServer:
    """Workers push gradients to servers, which hold the parameters; synchronous, at most some steps apart, or freely.

    Checks a job; workers, servers and the evaluator are processes with loops of their own.
    """

    def __init__(self, job: Job, settings: ParameterServerSettings, computation: Computation) -> None:
        self.settings = settings
        self._computation = computation
        self._can_split = can_split(job)

    def requirements(self, job: Job) -> Requirements:
        workers = job.strategy.workers
        require_samples(job, workers)
        if job.training.clip_norm and self.settings.clip_norm:
            raise JobError("training.clip_norm and strategy.clip_norm are both set: keep one of them")
        if self._computation.device.type != "cpu":
            raise JobError("strategy 'parameter_server' trains on CPUs: set training.device = 'cpu'")
        if self.settings.push_every == 1 and job.data.prefetch not in (0, Data(use=job.data.use).prefetch):
            raise JobError(
                f"data.prefetch = {job.data.prefetch} makes batches ready ahead, and a worker of 'parameter_server' "
                "hears of a batch when it is handed out: with strategy.push_every = 1 there is no next one to make "
                "ready. Leave data.prefetch out; data.processes read the samples of a batch side by side"
            )
        if job.training.reproducible and not self.settings.is_synchronous:
            raise JobError(
                f"training.reproducible = true needs synchronous workers, and strategy.staleness = "
                f"{self.settings.staleness!r}: set staleness = 0, or reproducible = false"
            )
        if job.training.reproducible and self.settings.aggregate != "weighted":
            raise JobError("training.reproducible = true needs strategy.aggregate = 'weighted'")
        if job.training.reproducible and self.settings.compression != "none":
            raise JobError(
                f"strategy.compression = '{self.settings.compression}' depends on the number of workers, which "
                "training.reproducible = true rules out: leave strategy.compression out"
            )
        return Requirements(num_workers=workers, num_data_shards=workers)

    def check(self, model: nn.Module, recipe: OptimizerRecipe, example: Batch) -> None:
        """Raise JobError if the model cannot be cut among the servers, or a server would have no optimizer."""
        layout = make_layout(model, self.settings.servers, can_split=self._can_split)
        parameters = dict(model.named_parameters())
        of_parts = recipe.for_parts_of(model)
        for piece in layout.pieces:
            of_parts.make((name, parameters[name]) for name in dict.fromkeys(one.name for one in piece.slices))


def can_split(job: Job) -> bool:
    """Whether the job's optimizer treats every number by itself, so that a parameter may be cut."""
    if job.training.reproducible and settings_of(job).clip_norm:
        return False  # the norm of a parameter has the bits of `single` only where it is computed in one go
    use = job.optimizer.use
    return isinstance(use, str) and use.lower() in {name.lower() for name in ELEMENTWISE}


def settings_of(job: Job) -> ParameterServerSettings:
    """Return the settings of the job's strategy, checked. Clipping may be asked for in [training] as well."""
    settings: ParameterServerSettings = read_section("strategy", job.strategy.settings, ParameterServerSettings)
    return msgspec.structs.replace(settings, clip_norm=settings.clip_norm or job.training.clip_norm)


def fixed_of(job: Job) -> FixedSum | None:
    """Return how gradients are added up in reproducible mode, or None where it is off."""
    num_shards = job.training.num_shards
    return None if num_shards is None else FixedSum(num_shards, job.training.batch_size)
