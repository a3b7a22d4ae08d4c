"""Served runs: workers, servers of parameters and an evaluator, each a process with a loop of its own."""

from cordee.runs.dispatched.run import DispatchedRun, check_dispatched

__all__ = ["DispatchedRun", "check_dispatched"]
