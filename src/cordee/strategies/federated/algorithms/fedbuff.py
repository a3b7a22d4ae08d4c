"""FedBuff (Nguyen et al. 2022): asynchronous; the server updates when a buffer of differences is full.

Clients train all the time, each from the parameters that the server had when it was asked. What arrives late counts
less: its weight is divided by the root of 1 + the updates that were made meanwhile.
"""

from __future__ import annotations

from cordee.core.errors import JobError
from cordee.strategies.federated.algorithms.algorithm import Algorithm


def fedbuff(concurrency: int = 0, exponent: float = 0.5, server_lr: float = 1.0) -> Algorithm:
    """Update after `strategy.clients_per_round` arrivals; `concurrency` clients train at the same time.

    Without it twice as many as an update takes.
    """
    if not server_lr > 0:
        raise JobError(f"strategy.algorithm.server_lr = {server_lr} must be above 0")
    if concurrency < 0 or not exponent >= 0:
        raise JobError(f"strategy.algorithm.concurrency = {concurrency} and exponent = {exponent} must be at least 0")

    def discount(staleness: int) -> float:
        return float((1 + staleness) ** -exponent)

    outer = {} if server_lr == 1.0 else {"use": "sgd", "lr": server_lr}
    return Algorithm(outer=outer, discount=discount, concurrency=concurrency)
