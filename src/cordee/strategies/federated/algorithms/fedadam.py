"""FedAdam (Reddi et al. 2021): Adam on the server."""

from __future__ import annotations

from cordee.strategies.federated.algorithms.adaptive import ServerAdam, adaptive
from cordee.strategies.federated.algorithms.algorithm import Algorithm


def fedadam(server_lr: float = 0.1, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> Algorithm:
    """Take the mean difference as the gradient of the paper's Adam."""
    return adaptive(ServerAdam, server_lr, beta1, beta2, tau)
