"""How much of the time is training that lasts, when workers fail. Pure."""

from __future__ import annotations

import math

import numpy as np

from cordee.planner.simulator.scenario import Scenario

NUM_FAILURES = 4000  # that are drawn: the share is then known to about 2 % of what is lost


def effective_share(scenario: Scenario, workers: int) -> float:
    """Return useful time over all time: without saving, starting again, and what was lost since the last checkpoint.

    Workers fail independently and at any time, also while all start again; one failure stops all.
    """
    every_s, saving_s, restart_s = scenario.checkpoint_every_s, scenario.checkpoint_time_s, scenario.restart_s
    if not scenario.mtbf_s:
        return every_s / (every_s + saving_s)
    random = np.random.default_rng([scenario.seed, workers, 1])
    gaps = random.exponential(scenario.mtbf_s / workers, NUM_FAILURES)
    # A gap first goes into starting, then into whole rounds of training and saving; the broken round is lost.
    rounds = np.floor(np.maximum(gaps - restart_s, 0.0) / (every_s + saving_s))
    return float(rounds.sum() * every_s / gaps.sum())


def expected_share(scenario: Scenario, workers: int) -> float:
    """Return the same in closed form, after J. T. Daly (2006), "A higher order estimate of the optimum checkpoint
    interval": each round succeeds with probability exp(-round / mtbf), and starting again costs exp(restart / mtbf).
    """
    every_s, saving_s = scenario.checkpoint_every_s, scenario.checkpoint_time_s
    if not scenario.mtbf_s:
        return every_s / (every_s + saving_s)
    mean_s = scenario.mtbf_s / workers
    return every_s / (mean_s * math.exp(scenario.restart_s / mean_s) * math.expm1((every_s + saving_s) / mean_s))
