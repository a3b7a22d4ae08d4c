"""The planner: what a job would take on each strategy, which to choose, and why."""

from __future__ import annotations

from cordee.planner.cluster_file import load_cluster
from cordee.planner.plan import Plan
from cordee.planner.prediction import Candidate, Prediction, Work
from cordee.planner.search import choose, search

__all__ = ["Candidate", "Plan", "Prediction", "Work", "choose", "load_cluster", "search"]
