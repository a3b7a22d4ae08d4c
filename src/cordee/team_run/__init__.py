"""Runs whose workers train as one team, generation by generation, led by a coordinator."""

from cordee.team_run.run import TeamRun

__all__ = ["TeamRun"]
