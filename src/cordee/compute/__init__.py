"""The compute layer: devices, precision, forward and backward passes, metrics, evaluation."""

from cordee.compute.computation import (
    NO_VOTES,
    Computation,
    Loss,
    Votes,
    clip_gradients,
    find_unsound,
    split_batch,
)
from cordee.compute.devices import choose_device, share_threads, usable_cores
from cordee.compute.evaluation import Metrics, evaluate
from cordee.compute.gradient_graph import reached_parameters
from cordee.compute.gradient_hooks import hooked_parameters, refuse_uneven_hooks
from cordee.compute.losses import LossFunction, make_loss
from cordee.compute.optimizers import (
    LR_SCALES,
    OptimizerRecipe,
    make_optimizer_recipe,
    number_groups,
)
from cordee.compute.schedules import Schedule, make_schedule

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
    "hooked_parameters",
    "make_loss",
    "make_optimizer_recipe",
    "make_schedule",
    "number_groups",
    "reached_parameters",
    "refuse_uneven_hooks",
    "share_threads",
    "split_batch",
    "usable_cores",
]
