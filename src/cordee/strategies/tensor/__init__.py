"""`tensor`: the same batch on all workers, and a slice of each layer on each."""

from cordee.strategies.tensor.strategy import TensorParallel, TensorSettings

__all__ = ["TensorParallel", "TensorSettings"]
