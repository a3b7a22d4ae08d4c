"""Runs of one's own script: its workers train in lockstep, like a team, in a loop that the script has."""
