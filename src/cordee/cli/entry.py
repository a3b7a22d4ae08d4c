"""The way into the command, light so that Ctrl-C is heard while the rest is imported."""

from __future__ import annotations


def main() -> None:
    """Run the command line and exit."""
    try:
        from cordee.cli.app import run_command

        run_command()
    except KeyboardInterrupt:
        from cordee.cli.output import end_interrupted

        end_interrupted()
