"""FedAvgM (Hsu et al. 2019): SGD with momentum on the server."""

from __future__ import annotations

from cordee.strategies.federated.algorithms.algorithm import Algorithm


def fedavgm(server_lr: float = 1.0, momentum: float = 0.9, nesterov: bool = False) -> Algorithm:
    """Take the mean difference as the gradient of SGD with momentum."""
    return Algorithm(outer={"use": "sgd", "lr": server_lr, "momentum": momentum, "nesterov": nesterov})
