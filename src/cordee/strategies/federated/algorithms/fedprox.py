"""FedProx (Li et al. 2020): a client's loss has a term that keeps it near to where it began."""

from __future__ import annotations

from cordee.core.errors import JobError
from cordee.strategies.federated.algorithms.algorithm import Algorithm, LocalTraining


def fedprox(mu: float = 0.01) -> Algorithm:
    """FedAvg with mu / 2 · |w − start|² added to the loss of clients."""
    if not mu >= 0:
        raise JobError(f"strategy.algorithm.mu = {mu} must be at least 0")

    def correct(local: LocalTraining) -> None:
        # Their difference first: where nothing has moved it is zero, and not the rounding of two products.
        local.gradient.add_(local.here - local.start, alpha=mu)

    return Algorithm(outer={}, correct=correct)
