"""Models that have next to nothing to compute, and how long a step of them takes without any strategy."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import msgspec

from cordee.cluster import Team
from cordee.core import Job
from cordee.planner.measuring import typical_s
from cordee.strategies.table import usual_strategy
from cordee.training.components import assemble

NUM_LAYERS = 8
SMALL = (16,) * NUM_LAYERS
DEEP = (16,) * 32
LARGE = (1024,) * 3  # 8 MB of parameters
KINDS = (SMALL, DEEP, LARGE)
NUM_STEPS = 48
NUM_WINDOWS = 8
MOST_S = 4.0  # of training in a trial; a busy machine takes fewer steps
WARM_UP_STEPS = 8


def trial_job(strategy: str, num_workers: int, settings: dict[str, Any], hidden: tuple[int, ...] = SMALL) -> Job:
    return Job.from_dict(
        {
            "model": {"use": "mlp", "hidden": list(hidden)},
            "data": {"use": "synthetic", "shape": [16], "num_classes": 4, "size": 2048, "test_size": 0},
            "optimizer": {"use": "sgd", "lr": 0.001},
            "training": {"batch_size": 8 * num_workers, "steps": NUM_STEPS, "device": "cpu"},
            "strategy": {"name": strategy, "workers": num_workers, **settings},
            "monitoring": {"every_steps": NUM_STEPS // NUM_WINDOWS},
            "evaluation": {"every_epochs": 0},
            "checkpoint": {"every_steps": 0},
            "stop": {"time": MOST_S},
        }
    )


class Bare(msgspec.Struct, frozen=True):
    """Seconds of a step without any exchange."""

    step_s: float
    pass_s: float  # of which forward and backward


def measure_bare(index: int, num_workers: int, hidden: tuple[int, ...]) -> Bare:
    """Return what a step of a model takes while all members take one, exchanging nothing."""
    team = Team(index, num_workers, num_local_workers=num_workers, local_rank=index)
    return _step_s(trial_job(usual_strategy(num_workers), num_workers, {}, hidden), team)


def _step_s(job: Job, team: Team) -> Bare:
    parts = assemble(job, team)
    optimizer = parts.recipe.make(parts.model.named_parameters())
    times, passes = [], []
    with contextlib.closing(parts.train.batches(0)) as batches:
        for batch, _ in zip(batches, range(NUM_STEPS), strict=False):
            started = time.perf_counter()
            total = parts.computation.loss.count(batch.targets)
            parts.computation.forward_backward(parts.model, [batch], total_count=total, measure=False)
            passes.append(time.perf_counter() - started)
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - started)
    return Bare(typical_s(times[WARM_UP_STEPS:]), typical_s(passes[WARM_UP_STEPS:]))
