"""What an algorithm of federated learning is: pure functions over what the server has, clients have, and updates.

All vectors are flat: the parameters that clients share, one after the other. A *difference* is what these parameters
are after a client trained, minus what the client was sent. The server sums the differences of a round, weighted, and
takes an outer step with their mean (strategies/outer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

Vectors: TypeAlias = dict[str, Tensor]  # by name, each as long as the shared parameters


@dataclass
class LocalTraining:
    """A client in a round: what it was sent, what it has, and where it is."""

    start: Tensor  # the shared parameters as they were sent
    here: Tensor  # the shared parameters now
    gradient: Tensor  # of the shared parameters, at `here`; for `correct` only
    sent: Vectors  # what the server sent beside the parameters
    own: Vectors  # what the client keeps from one round to the next
    rate: float = 0.0  # of the client's optimizer
    num_steps: int = 0  # taken so far
    # What SGD with a rate of 1 would have moved by with gradients of 1: the number of steps, without momentum.
    unit_steps: float = 0.0
    client: str = ""  # whose training this is: the number of a simulated client, or the name of a site


class Finished(NamedTuple):
    """What a client has at the end of a round."""

    difference: Tensor
    summed: Vectors  # that the server sums besides, unweighted
    own: Vectors  # that the client keeps
    scale: float = 1.0  # a number that the server gets the weighted sum of


class RoundSum(NamedTuple):
    """What the server knows at the end of a round: sums over the clients that took part, in double precision."""

    difference: Tensor  # the sum of weight · difference
    summed: Vectors  # sums of what clients returned besides
    weight: float  # the sum of the weights
    weighted_scale: float  # the sum of weight · scale
    num_clients: int  # that took part
    num_all_clients: int


def _nothing_at_start(start: Tensor) -> Vectors:
    return {}


def _plain_finish(local: LocalTraining) -> Finished:
    return Finished(local.here - local.start, {}, {})


def summed_names(algorithm: Algorithm, start: Tensor) -> frozenset[str]:
    """Return the names of what a client returns besides, to be summed: those of a client that took one step."""
    own, sent = algorithm.begin_client(start), algorithm.begin_server(start) if algorithm.sends_own else {}
    local = LocalTraining(start.clone(), start.clone(), start * 0, sent, own, rate=1.0, num_steps=1, unit_steps=1.0)
    return frozenset(algorithm.finish(local).summed)


def mean_difference(total: RoundSum, own: Vectors) -> tuple[Tensor, Vectors]:
    """Return the weighted mean of the differences, and what the server keeps unchanged."""
    return total.difference / total.weight, own


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One way to learn together. Only `outer` has to be given: the rest is that of FedAvg."""

    # The optimizer of the server, as in strategy.outer of local_sgd; empty adds the mean difference.
    outer: Mapping[str, Any]
    # What the server keeps beside the parameters, and what a client keeps, before the first round.
    begin_server: Callable[[Tensor], Vectors] = _nothing_at_start
    begin_client: Callable[[Tensor], Vectors] = _nothing_at_start
    # Changes `local.gradient` in place, before each step of the client's optimizer. None: nothing to do.
    correct: Callable[[LocalTraining], None] | None = None
    # At the end of a client's round.
    finish: Callable[[LocalTraining], Finished] = _plain_finish
    # From the sums to the mean difference for the outer step, and what the server keeps next.
    combine: Callable[[RoundSum, Vectors], tuple[Tensor, Vectors]] = mean_difference
    # What a client's weight is multiplied by when so many updates of the server were made since it was sent its
    # parameters. None: rounds are synchronous. Else the server updates after every `clients_per_round` arrivals.
    discount: Callable[[int], float] | None = None
    sends_own: bool = False  # whether clients are sent what the server keeps beside the parameters
    is_stateful: bool = False  # whether clients keep something from one round to the next
    needs_sgd: bool = False  # whether `unit_steps` is used, which only SGD has
    concurrency: int = 0  # of an asynchronous one: clients that train at the same time; 0 is those of a round
