"""Which algorithm a job gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cordee.core.errors import JobError
from cordee.core.references import Use, bind, construct, name_of, resolve
from cordee.strategies.federated.algorithms.algorithm import Algorithm
from cordee.strategies.federated.algorithms.fedadagrad import fedadagrad
from cordee.strategies.federated.algorithms.fedadam import fedadam
from cordee.strategies.federated.algorithms.fedavg import fedavg
from cordee.strategies.federated.algorithms.fedavgm import fedavgm
from cordee.strategies.federated.algorithms.fedbuff import fedbuff
from cordee.strategies.federated.algorithms.fednova import fednova
from cordee.strategies.federated.algorithms.fedprox import fedprox
from cordee.strategies.federated.algorithms.fedyogi import fedyogi
from cordee.strategies.federated.algorithms.scaffold import scaffold

SECTION = "strategy.algorithm"
ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "fedavg": fedavg,
    "fedprox": fedprox,
    "fedavgm": fedavgm,
    "fedadam": fedadam,
    "fedyogi": fedyogi,
    "fedadagrad": fedadagrad,
    "scaffold": scaffold,
    "fednova": fednova,
    "fedbuff": fedbuff,
}


def make_algorithm(use: Use, python_path: Sequence[str] = ()) -> Algorithm:
    """Return the algorithm that a job names: a built-in one, or what one's own "module:callable" returns.

    Raises JobError for a name that is not known, and for settings that the algorithm does not have.
    """
    target = resolve(SECTION, use.use, ALGORITHMS, python_path=python_path)
    made = construct(SECTION, use.use, bind(SECTION, target, use.args))
    if not isinstance(made, Algorithm):
        raise JobError(
            f"{SECTION}.use = {name_of(use.use)!r} returned a {type(made).__name__}: it must return an Algorithm "
            "(cordee.strategies.federated.algorithms)"
        )
    return made
