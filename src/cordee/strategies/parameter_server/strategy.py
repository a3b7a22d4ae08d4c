"""How `parameter_server` stands in the table of strategies. Its run is led by `cordee.served`, not by the trainer."""

from __future__ import annotations

import msgspec
from torch import nn

from cordee.compute import Computation, OptimizerRecipe
from cordee.core import Batch, Job
from cordee.core.errors import JobError
from cordee.core.job import read_section
from cordee.strategies.parameter_server.settings import ParameterServerSettings
from cordee.strategies.strategy import Requirements


class ParameterServer:
    """Checks a job; workers, servers and the evaluator are processes with loops of their own."""

    def __init__(self, job: Job, settings: ParameterServerSettings, computation: Computation) -> None:
        self.settings = settings
        self._computation = computation

    def requirements(self, job: Job) -> Requirements:
        workers, batch_size = job.strategy.workers, job.training.batch_size
        if batch_size < workers:
            raise JobError(
                f"training.batch_size = {batch_size} has no sample for each of {workers} workers: "
                f"set batch_size to at least {workers}, or use fewer workers"
            )
        if job.training.clip_norm and self.settings.clip_norm:
            raise JobError("training.clip_norm and strategy.clip_norm are both set: keep one of them")
        if self._computation.device.type != "cpu":
            raise JobError("strategy 'parameter_server' trains on CPUs: set training.device = 'cpu'")
        return Requirements(num_workers=workers, num_data_shards=workers)

    def check(self, model: nn.Module, recipe: OptimizerRecipe, example: Batch) -> None:
        pass  # a worker has all parameters: what can be trained at all can be trained this way


def can_split(job: Job) -> bool:
    """Whether the job's optimizer treats every number by itself, so that a parameter may be cut."""
    from cordee.strategies.parameter_server.layout import ELEMENTWISE

    use = job.optimizer.use
    return isinstance(use, str) and use.lower() in {name.lower() for name in ELEMENTWISE}


def settings_of(job: Job) -> ParameterServerSettings:
    """Return the settings of the job's strategy, checked. Clipping may be asked for in [training] as well."""
    settings: ParameterServerSettings = read_section("strategy", job.strategy.settings, ParameterServerSettings)
    return msgspec.structs.replace(settings, clip_norm=settings.clip_norm or job.training.clip_norm)
