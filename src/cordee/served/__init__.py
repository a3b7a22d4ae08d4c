"""Served runs: workers, servers of parameters and an evaluator, each a process with a loop of its own."""

from cordee.served.run import ServedRun, check_served

__all__ = ["ServedRun", "check_served"]
