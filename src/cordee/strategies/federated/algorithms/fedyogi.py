"""FedYogi (Reddi et al. 2021): Yogi on the server, whose second moment grows more slowly than Adam's."""

from __future__ import annotations

from cordee.strategies.federated.algorithms.adaptive import ServerYogi, adaptive
from cordee.strategies.federated.algorithms.algorithm import Algorithm


def fedyogi(server_lr: float = 0.1, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> Algorithm:
    """Take the mean difference as the gradient of Yogi."""
    return adaptive(ServerYogi, server_lr, beta1, beta2, tau)
