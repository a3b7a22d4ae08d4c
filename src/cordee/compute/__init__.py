"""The compute layer: devices, precision, forward and backward passes, metrics, evaluation."""

from cordee.compute.computation import (
    NO_VOTES,
    Computation,
    Loss,
    Metrics,
    Votes,
    clip_gradients,
    evaluate,
    find_unsound,
    split_batch,
)
from cordee.compute.devices import choose_device, share_threads, usable_cores
from cordee.compute.gradient_graph import reached_parameters
from cordee.compute.losses import LossFunction, make_loss
from cordee.compute.optimizers import (
    LR_SCALES,
    OptimizerRecipe,
    Schedule,
    make_optimizer_recipe,
    make_schedule,
    number_groups,
)

__all__ = [
    "LR_SCALES",
    "NO_VOTES",
    "Computation",
    "Loss",
    "LossFunction",
    "Metrics",
    "OptimizerRecipe",
    "Schedule",
    "Votes",
    "choose_device",
    "clip_gradients",
    "evaluate",
    "find_unsound",
    "make_loss",
    "make_optimizer_recipe",
    "make_schedule",
    "number_groups",
    "reached_parameters",
    "share_threads",
    "split_batch",
    "usable_cores",
]
