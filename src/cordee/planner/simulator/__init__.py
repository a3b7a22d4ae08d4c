"""Training on machines that are not here, simulated."""

from __future__ import annotations

from cordee.planner.simulator.cluster import ClusterOutcome, simulate
from cordee.planner.simulator.scenario import PUBLISHED, Scenario, load_scenario, read_scenario

__all__ = ["PUBLISHED", "ClusterOutcome", "Scenario", "load_scenario", "read_scenario", "simulate"]
