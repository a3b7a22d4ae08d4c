"""Horovod's API for Keras 3, on its three backends: `import cordee.horovod.keras as hvd`."""

from cordee.horovod import front_end
from cordee.horovod.front_end import *  # noqa: F403 - its __all__ says which
from cordee.horovod.keras import callbacks, elastic
from cordee.horovod.keras.optimizer import Compression, DistributedOptimizer, load_model
from cordee.horovod.keras.values import allgather, allreduce, broadcast, broadcast_variables, reducescatter

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_variables",
    "callbacks",
    "elastic",
    "load_model",
    "reducescatter",
]
__all__ += front_end.__all__
