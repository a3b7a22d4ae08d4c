"""The strategies: one module for each row of the strategy table."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cordee.compute import Computation
from cordee.core import Job
from cordee.core.errors import JobError, nearest
from cordee.strategies.single import Single
from cordee.strategies.strategy import Requirements, Strategy, Update

__all__ = ["STRATEGIES", "Requirements", "Strategy", "Update", "choose_strategy", "make_strategy"]

STRATEGIES: Mapping[str, Callable[[Computation, float], Strategy]] = {"single": Single}


def choose_strategy(job: Job) -> str:
    """Return the name of the strategy the job asks for; 'auto' takes the one that fits. Raises JobError."""
    name = job.strategy.name
    if name == "auto":
        name = "single"
    if name not in STRATEGIES:
        raise JobError(
            f"strategy.name = '{name}' is not known{nearest(name, STRATEGIES)} "
            f"This version has: {', '.join(sorted(STRATEGIES))} (and 'auto')"
        )
    if job.strategy.settings:
        key = next(iter(job.strategy.settings))
        raise JobError(f"strategy '{name}' has no setting '{key}'{nearest(key, ('name', 'workers'))}")
    return name


def make_strategy(job: Job, computation: Computation) -> Strategy:
    """Return the job's strategy, ready for `setup`. Raises JobError for settings it does not have."""
    strategy = STRATEGIES[choose_strategy(job)](computation, job.training.clip_norm)
    strategy.requirements(job)
    return strategy
