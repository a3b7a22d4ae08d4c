"""The command `cordee`: parsing and printing only."""

from cordee.cli.entry import main

__all__ = ["main"]
