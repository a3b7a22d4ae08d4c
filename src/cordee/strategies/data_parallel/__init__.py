"""`data_parallel`: a share of the data and a full copy of the parameters each; gradients summed every step."""

from cordee.strategies.data_parallel.strategy import DataParallel, DataParallelSettings

__all__ = ["DataParallel", "DataParallelSettings"]
