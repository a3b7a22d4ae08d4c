"""Runs whose workers train as one team, generation by generation, led by a coordinator."""

from cordee.runs.team.run import TeamRun

__all__ = ["TeamRun"]
