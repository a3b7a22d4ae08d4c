"""The algorithms of federated learning, by name."""

from cordee.strategies.federated.algorithms.algorithm import (
    Algorithm,
    Finished,
    LocalTraining,
    RoundSum,
    Vectors,
    summed_names,
)
from cordee.strategies.federated.algorithms.choice import ALGORITHMS, make_algorithm

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Finished",
    "LocalTraining",
    "RoundSum",
    "Vectors",
    "make_algorithm",
    "summed_names",
]
