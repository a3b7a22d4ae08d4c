"""How `federated` stands in the table of strategies. `cordee.runs.federated` leads its run, not the trainer."""

from __future__ import annotations

from torch import nn

from cordee.compute import Computation, OptimizerRecipe
from cordee.core import Batch, Job
from cordee.core.errors import JobError, ModelError
from cordee.core.job import read_section
from cordee.core.settings import Monitoring
from cordee.strategies.federated.algorithms import make_algorithm
from cordee.strategies.federated.client import check_sgd
from cordee.strategies.federated.settings import FederatedSettings
from cordee.strategies.outer import OuterStep
from cordee.strategies.strategy import Requirements


class Federated:
    """Clients train on private data of their own; a server averages their updates, round after round.

    Only checks a job: the coordinator and the workers are processes with loops of their own.
    """

    def __init__(self, job: Job, settings: FederatedSettings, computation: Computation) -> None:
        self.settings = settings
        self._job = job
        self._computation = computation
        self._algorithm = make_algorithm(settings.use, job.python_path)

    def requirements(self, job: Job) -> Requirements:
        """Return what the job needs; raises JobError for settings that have no meaning for clients."""
        training, parts, algorithm = job.training, self.settings.parts, self._algorithm
        if self._computation.device.type != "cpu":
            raise JobError("strategy 'federated' trains on CPUs: set training.device = 'cpu'")
        for key in ("epochs", "steps"):
            if getattr(training, key) is not None:
                raise JobError(
                    f"training.{key} = {getattr(training, key)}: a job of strategy 'federated' is as long as "
                    f"strategy.rounds = {self.settings.rounds}, and a client trains for strategy.local_epochs or "
                    f"local_steps. Remove training.{key} from the job file (cordee new --template federated writes one "
                    "without it)"
                )
        if job.monitoring.every_steps != Monitoring().every_steps:
            raise JobError(
                f"monitoring.every_steps = {job.monitoring.every_steps} thins out the records of steps, and strategy "
                "'federated' records every round: remove monitoring.every_steps"
            )
        if training.ema:
            raise JobError("training.ema is not for strategy 'federated': clients begin every round from new weights")
        if training.lr_scale != "none":
            raise JobError("training.lr_scale has no meaning for clients, which all have batches of their own")
        if (algorithm.is_stateful or algorithm.needs_sgd) and (parts.privacy or parts.robust or parts.secure):
            part = "privacy" if parts.privacy else "robust" if parts.robust else "secure"
            raise JobError(
                f"strategy.algorithm = '{self.settings.use.use}' sends more than a difference, which strategy.{part} "
                "does not cover: use another algorithm"
            )
        if parts.secure and self.settings.sampling == "poisson":
            raise JobError(
                "strategy.sampling = 'poisson' may draw one client or none, whose sum strategy.secure cannot hide: set "
                "sampling = 'fixed'"
            )
        if algorithm.discount is not None and (parts.privacy or parts.secure or self.settings.sampling != "fixed"):
            raise JobError(
                f"strategy.algorithm = '{self.settings.use.use}' has no rounds in which clients are drawn: leave "
                "strategy.privacy, secure and sampling out"
            )
        return Requirements(num_workers=job.strategy.workers, num_data_shards=1, num_steps=self.settings.rounds)

    def check(self, model: nn.Module, recipe: OptimizerRecipe, example: Batch) -> None:
        """Raise a CordeeError if the model, or the clients' optimizer, cannot be trained this way."""
        settings = self.settings
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        for pattern in settings.personal:
            if not any(FederatedSettings(personal=(pattern,)).is_personal(name) for name in names):
                raise JobError(f"strategy.personal = '{pattern}' matches no parameter (they are: {', '.join(names)})")
        if all(settings.is_personal(name) for name in names):
            raise JobError("strategy.personal leaves no parameter that clients share: let some patterns out")
        if len({p.dtype for p in model.parameters() if p.requires_grad}) > 1:
            raise ModelError("strategy 'federated' sums one vector: the parameters must have one type")
        if self._algorithm.needs_sgd and not check_sgd(recipe, model):
            raise JobError(
                f"strategy.algorithm = '{settings.use.use}' divides by the steps of SGD: set optimizer.use = 'sgd', "
                "without optimizer.groups"
            )
        parts = settings.parts
        why = (
            "strategy.privacy adds noise to parameters, and not to" if parts.privacy is not None else
            f"strategy.robust = '{parts.robust.use}' judges parameters, and not" if parts.robust is not None else ""
        )  # fmt: skip
        for name, module in model.named_modules():
            if why and isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
                raise ModelError(
                    f"{why} the running statistics of '{name}' ({type(module).__name__}), which clients send as well: "
                    "use GroupNorm instead"
                )
        if settings.client_test and not self._computation.counts_classes:
            raise JobError("strategy.client_test measures accuracy, and the targets of this data are no classes")
        parameter = next(p for p in model.parameters() if p.requires_grad)
        OuterStep({"shared": parameter}, self._algorithm.outer or None, python_path=self._job.python_path)


def settings_of(job: Job) -> FederatedSettings:
    """Return the settings of the job's strategy, checked."""
    settings: FederatedSettings = read_section("strategy", job.strategy.settings, FederatedSettings)
    return settings
