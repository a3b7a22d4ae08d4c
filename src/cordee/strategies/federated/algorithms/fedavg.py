"""FedAvg (McMahan et al. 2017): the weighted mean of what clients have learnt."""

from __future__ import annotations

from cordee.core.errors import JobError
from cordee.strategies.federated.algorithms.algorithm import Algorithm


def fedavg(server_lr: float = 1.0) -> Algorithm:
    """Add the weighted mean of the differences; `server_lr` scales it."""
    if not server_lr > 0:
        raise JobError(f"strategy.algorithm.server_lr = {server_lr} must be above 0")
    return Algorithm(outer={} if server_lr == 1.0 else {"use": "sgd", "lr": server_lr})
