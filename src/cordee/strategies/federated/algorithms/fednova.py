"""FedNova (Wang et al. 2020): differences are divided by the steps that were taken, so that no client counts for more
because it took more steps.
"""

from __future__ import annotations

from torch import Tensor

from cordee.core.errors import JobError
from cordee.strategies.federated.algorithms.algorithm import Algorithm, Finished, LocalTraining, RoundSum, Vectors


def fednova(server_lr: float = 1.0) -> Algorithm:
    """Take the mean of the differences per step, times the mean number of steps."""
    if not server_lr > 0:
        raise JobError(f"strategy.algorithm.server_lr = {server_lr} must be above 0")
    outer = {} if server_lr == 1.0 else {"use": "sgd", "lr": server_lr}
    return Algorithm(outer=outer, finish=_finish, combine=_combine, needs_sgd=True)


def _finish(local: LocalTraining) -> Finished:
    steps = local.unit_steps
    return Finished((local.here - local.start) / (steps or 1.0), {}, {}, scale=steps)


def _combine(total: RoundSum, own: Vectors) -> tuple[Tensor, Vectors]:
    return total.difference / total.weight * (total.weighted_scale / total.weight), own
