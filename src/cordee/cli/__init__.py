"""The command `cordee`: parsing and printing only."""

from cordee.cli.app import main

__all__ = ["main"]
