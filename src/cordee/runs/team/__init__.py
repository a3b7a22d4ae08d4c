"""Runs whose workers train as one team, in lockstep, generation by generation."""
