"""SCAFFOLD (Karimireddy et al. 2020): control variates take out of a client's steps what is its own drift.

The server keeps c, and each client c_i. A client's step goes against gradient − c_i + c. At its end the client keeps
c_i − c + (start − end) / (steps · rate), which is the mean gradient that it saw (option II of the paper), and the
server adds the sum of the changes, divided by the number of all clients: c stays the mean of all c_i.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cordee.core.errors import JobError
from cordee.strategies.federated.algorithms.algorithm import Algorithm, Finished, LocalTraining, RoundSum, Vectors

CONTROL = "control"


def scaffold(server_lr: float = 1.0) -> Algorithm:
    """Correct the clients' steps by control variates."""
    if not server_lr > 0:
        raise JobError(f"strategy.algorithm.server_lr = {server_lr} must be above 0")
    return Algorithm(
        outer={} if server_lr == 1.0 else {"use": "sgd", "lr": server_lr},
        begin_server=_zeros,
        begin_client=_zeros,
        correct=_correct,
        finish=_finish,
        combine=_combine,
        sends_own=True,
        is_stateful=True,
        needs_sgd=True,
    )


def _zeros(start: Tensor) -> Vectors:
    return {CONTROL: torch.zeros_like(start)}


def _correct(local: LocalTraining) -> None:
    local.gradient.add_(local.sent[CONTROL]).sub_(local.own[CONTROL])


def _finish(local: LocalTraining) -> Finished:
    difference = local.here - local.start
    change = -local.sent[CONTROL]
    if local.unit_steps and local.rate:
        change.sub_(difference, alpha=1 / (local.unit_steps * local.rate))
    return Finished(difference, {CONTROL: change}, {CONTROL: local.own[CONTROL] + change})


def _combine(total: RoundSum, own: Vectors) -> tuple[Tensor, Vectors]:
    control = own[CONTROL] + (total.summed[CONTROL] / total.num_all_clients).to(own[CONTROL].dtype)
    return total.difference / total.weight, {CONTROL: control}
