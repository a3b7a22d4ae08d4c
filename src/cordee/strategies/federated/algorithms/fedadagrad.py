"""FedAdagrad (Reddi et al. 2021): Adagrad on the server."""

from __future__ import annotations

from cordee.strategies.federated.algorithms.adaptive import ServerAdagrad, adaptive
from cordee.strategies.federated.algorithms.algorithm import Algorithm


def fedadagrad(server_lr: float = 0.1, beta1: float = 0.0, tau: float = 1e-3) -> Algorithm:
    """Take the mean difference as the gradient of the paper's Adagrad."""
    return adaptive(ServerAdagrad, server_lr, beta1, 0.0, tau)
