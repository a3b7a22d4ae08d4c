"""Horovod's API for TensorFlow 2, over Cordée's collectives: `import cordee.horovod.tensorflow as hvd`."""

from cordee.horovod import front_end
from cordee.horovod.front_end import *  # noqa: F403 - its __all__ says which
from cordee.horovod.tensorflow import elastic
from cordee.horovod.tensorflow.compression import Compression
from cordee.horovod.tensorflow.functions import (
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from cordee.horovod.tensorflow.gradients import DistributedGradientTape, DistributedOptimizer
from cordee.horovod.tensorflow.mpi_ops import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    local_rank_op,
    local_size_op,
    rank_op,
    reducescatter,
    size_op,
)

__all__ = [
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "elastic",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "local_rank_op",
    "local_size_op",
    "rank_op",
    "reducescatter",
    "size_op",
]
__all__ += front_end.__all__
