"""The planner: what a job would take on each strategy, which to choose, and why."""
