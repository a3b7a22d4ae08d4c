"""Runs with work on demand: workers, servers of parameters and an evaluator, each a process with a loop of its own."""
